"""MaskBench: schemas with valid and invalid instances, walked token by token through the masks of three sides.

    python benchmarks/maskbench.py --data ../shared/data/jsonschema/maskbench [--limit 100]
    python benchmarks/maskbench.py ... --xgrammar-python /tmp/xg/bin/python      (an environment with xgrammar)

evensong is what a request gets; llguidance and xgrammar are given the schemas as they are. An instance is written with
json.dumps' defaults and its keys in the order of the schema, and encoded by the demo model's tokenizer; valid ones must
be allowed at every token and may end, invalid ones must not get that far. Files without instances are counted apart:
they can only be compiled.
"""

from __future__ import annotations

import argparse
import json
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

from schema_instances import write

from evensong.sources.resolve import resolve_model
from evensong.sources.tokenizer import load_tokenizer

HERE = Path(__file__).resolve().parent
SECONDS = 60.0  # for one file; a side that takes longer is ended, and the file is an error
SHOWN = 20


class Side:
    """A process that answers jobs; it is started again after one that it does not survive."""

    def __init__(self, name: str, python: str, setup: str) -> None:
        self._command = [python, str(HERE / "maskbench_side.py"), name]
        self._setup = setup
        self._process: subprocess.Popen[str] | None = None

    def answer(self, job: str) -> dict[str, Any]:
        """The outcome of one file."""
        process = self._process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(job + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            self.close()
            return {"error": "the process ended", "compile": 0.0}
        ready, _, _ = select.select([process.stdout], [], [], SECONDS)
        line = process.stdout.readline() if ready else ""
        if not line:
            self.close()
            return {"error": "the process ended" if ready else f"no answer within {SECONDS:.0f} s", "compile": SECONDS}
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _start(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdin is not None
        process.stdin.write(self._setup + "\n")
        process.stdin.flush()
        return process


def percentiles(seconds: list[float]) -> dict[str, float]:
    """p50, p99 and max in milliseconds."""
    ordered = sorted(seconds) or [0.0]
    found = {f"p{rank}": ordered[min(len(ordered) - 1, len(ordered) * rank // 100)] for rank in (50, 99)}
    return {name: round(1e3 * value, 3) for name, value in {**found, "max": ordered[-1]}.items()}


def summary(jobs: list[dict[str, Any]], outcomes: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of one side."""
    compiled = covered = bare = bare_compiled = 0
    wrong: dict[str, list[str]] = {"false_rejects": [], "false_accepts": []}
    refusals: dict[str, str] = {}
    for job, outcome in zip(jobs, outcomes, strict=True):
        ok = "error" not in outcome
        if not job["valid"]:
            bare, bare_compiled = bare + 1, bare_compiled + ok
            continue
        if not ok:
            refusals[job["name"]] = outcome["error"]
            continue
        compiled += 1
        pairs = list(zip(job["valid"], outcome["accepted"], strict=True))
        if any(valid and not accepted for valid, accepted in pairs):
            wrong["false_rejects"].append(job["name"])
        else:
            covered += 1
        if any(accepted and not valid for valid, accepted in pairs):
            wrong["false_accepts"].append(job["name"])
    files = len(jobs) - bare
    return {
        "files": files,
        "compiled": compiled,
        "covered": covered,
        "coverage": round(100 * covered / max(files, 1), 2),
        **wrong,
        "without_instances": {"files": bare, "compiled": bare_compiled},
        "compile_ms": percentiles([outcome["compile"] for outcome in outcomes]),
        "mask_ms": percentiles([each for outcome in outcomes for each in outcome.get("masks", ())]),
        "refusals": refusals,
    }


def load(data: Path, limit: int | None, every: int) -> tuple[list[dict[str, Any]], str]:
    """The jobs, and what a side needs of the tokenizer."""
    tokenizer = load_tokenizer(resolve_model("demo"))
    vocabulary = [tokenizer.id_to_token(token) or "" for token in range(tokenizer.vocab_size)]
    setup = {
        "tokenizer": tokenizer.backend.to_str(),
        "vocabulary": vocabulary,
        "end": tokenizer.eos_token_id,
    }
    jobs = []
    for path in sorted(data.glob("*.json"))[::every][:limit]:
        file = json.loads(path.read_text())
        texts = [write(file["schema"], test["data"]) for test in file["tests"]]
        jobs.append(
            {
                "name": path.name,
                "schema": json.dumps(file["schema"]),
                "valid": [test["valid"] for test in file["tests"]],
                "instances": [tokenizer.encode(text, add_special_tokens=False) for text in texts],
            }
        )
    return jobs, json.dumps(setup)


def main() -> int:
    """Prints the table; the report holds the names of what went wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=None)
    parser.add_argument("--every", type=int, default=1, help="take each n-th file")
    parser.add_argument("--sides", default="evensong,llguidance,xgrammar")
    parser.add_argument("--xgrammar-python", default=None, help="of an environment with xgrammar; else not measured")
    parser.add_argument("--report", type=Path, default=Path("maskbench-report.json"))
    options = parser.parse_args()
    jobs, setup = load(options.data, options.limit, options.every)
    lines = [json.dumps({"schema": job["schema"], "instances": job["instances"]}) for job in jobs]
    report: dict[str, Any] = {}
    print(
        f"{'side':<12}{'coverage':>16}{'false rejects':>15}{'false accepts':>15}  compile ms, mask ms: p50 / p99 / max"
    )
    for name in options.sides.split(","):
        python = options.xgrammar_python if name == "xgrammar" else sys.executable
        if python is None:
            report[name] = {"not_measured": "no environment with xgrammar was named"}
            print(f"{name:<12} not measured: {report[name]['not_measured']}")
            continue
        side = Side(name, python, setup)
        try:
            found = report[name] = summary(jobs, [side.answer(line) for line in lines])
        finally:
            side.close()
        share = f"{found['covered']}/{found['files']} {found['coverage']:.1f} %"
        times = ", ".join(" / ".join(map(str, found[kind].values())) for kind in ("compile_ms", "mask_ms"))
        rejects, accepts = len(found["false_rejects"]), len(found["false_accepts"])
        print(f"{name:<12}{share:>16}{rejects:>15}{accepts:>15}  {times}", flush=True)
    options.report.write_text(json.dumps(report, indent=1))
    for kind in ("false_rejects", "false_accepts"):
        print(f"evensong, {kind}:", *report.get("evensong", {}).get(kind, [])[:SHOWN])
    return 0


if __name__ == "__main__":
    sys.exit(main())
