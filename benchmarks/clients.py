"""`make clients`: every script of examples/clients, each in its own environment, against one server on the demo model.

    python benchmarks/clients.py [--only NAME,NAME] [--vllm-python PATH] [--report clients-report.json]

Environments are made under build/clients, never in the project's own; a script's requirements stand in its header
(PEP 723). The report is JSON; the table between the marks of docs/clients.md is written anew. The exit code is 1 where
a client that could be installed did not work.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

from serving import served

from evensong.sources.resolve import resolve_model
from evensong.sources.tokenizer import load_tokenizer

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "examples" / "clients"
ENVIRONMENTS = ROOT / "build" / "clients"
PAGE = ROOT / "docs" / "clients.md"
BEGIN, END = "<!-- results: make clients -->", "<!-- end of results -->"
INSTALL_SECONDS, RUN_SECONDS = 1200, 900


def requirements(script: Path) -> list[str]:
    """The dependencies in a script's header."""
    lines = re.search(r"^# /// script\n((?:#.*\n)+?)# ///$", script.read_text(), re.M)
    assert lines is not None, f"{script} has no header with its requirements"
    header = tomllib.loads("\n".join(line.removeprefix("#").strip() for line in lines[1].splitlines()))
    return [str(name) for name in header["dependencies"]]


def environment(name: str, packages: list[str]) -> Path:
    """The interpreter of an environment with exactly these, made once. Raises RuntimeError with pip's last word."""
    folder = ENVIRONMENTS / name
    stamp = folder / f".done-{hashlib.sha256(' '.join(packages).encode()).hexdigest()[:16]}"
    python = folder / "bin" / "python"
    if not stamp.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", *packages]
        done = subprocess.run(pip, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False)
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
            raise RuntimeError(errors[-1] if errors else done.stderr.strip()[-300:])
        stamp.touch()
    return python


def tokenizer_folder(model: str, folder: Path) -> Path:
    """The model's tokenizer as a folder that the field's loaders read: they count tokens, no hub is asked."""
    tokenizer = load_tokenizer(resolve_model(model))
    folder.mkdir()
    (folder / "tokenizer.json").write_text(tokenizer.backend.to_str())
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.special_tokens_map}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": tokenizer.chat_template}))
    return folder


def run_client(script: Path, python: Path, url: str, tokenizer: Path) -> dict[str, Any]:
    """Runs one script; what it said, or what went wrong with it."""
    started = time.monotonic()
    clean = {name: value for name, value in os.environ.items() if not name.endswith(("_API_KEY", "_proxy", "_PROXY"))}
    try:
        done = subprocess.run(
            [str(python), str(script), f"{url}/v1", str(tokenizer)],
            capture_output=True, text=True, timeout=RUN_SECONDS, env=clean, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"works": False, "problem": f"not done after {RUN_SECONDS} s"}
    seconds = round(time.monotonic() - started, 1)
    if done.returncode:
        return {"works": False, "seconds": seconds, "problem": (done.stderr or done.stdout).strip()[-1500:]}
    return {"works": True, "seconds": seconds, "said": done.stdout.strip().splitlines()}


def table(report: dict[str, Any]) -> str:
    """The report for docs/clients.md."""
    rows = ["| client | version | script | result |", "| --- | --- | --- | --- |"]
    for name, entry in report["clients"].items():
        package, _, version = entry["requirements"][0].partition("==")
        if entry.get("works"):
            result = "works"
        else:
            problem = entry["problem"].strip().splitlines()[-1]
            result = ("does not work: " if "works" in entry else "not installed: ") + problem[:160].replace("|", "/")
        rows.append(f"| {package} | {version} | [{name}.py](../examples/clients/{name}.py) | {result} |")
    return "\n".join(rows)


def main() -> int:
    """Runs them one after another."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=None, help="scripts' names, comma-separated; the page is not written then")
    parser.add_argument("--vllm-python", default=None, help="interpreter of an environment that has vLLM already")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--report", default="clients-report.json")
    options = parser.parse_args()
    scripts = sorted(SCRIPTS.glob("with_*.py"))
    if options.only is not None:
        scripts = [script for script in scripts if script.stem.removeprefix("with_") in options.only.split(",")]
    report: dict[str, Any] = {"model": options.model, "clients": {}}
    with tempfile.TemporaryDirectory() as name:
        tokenizer = tokenizer_folder(options.model, Path(name) / "tokenizer")
        with served(options.model, log=Path(name) / "server.log") as url:
            for script in scripts:
                entry: dict[str, Any] = {"requirements": requirements(script)}
                report["clients"][script.stem] = entry
                try:
                    given = options.vllm_python if script.stem == "with_vllm_bench" else None
                    python = Path(given) if given else environment(script.stem, entry["requirements"])
                except (RuntimeError, subprocess.SubprocessError, OSError) as error:
                    entry["problem"] = str(error)
                else:
                    entry |= run_client(script, python, url, tokenizer)
                print(f"{script.stem}: {json.dumps(entry)}", flush=True)
    Path(options.report).write_text(json.dumps(report, indent=2) + "\n")
    if options.only is None:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n{table(report)}\n{END}{rest.partition(END)[2]}")
    print(json.dumps(report))
    return 0 if all(entry.get("works", True) for entry in report["clients"].values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
