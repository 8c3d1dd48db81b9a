"""`schemathesis` over /openapi.json against a real server: python -m tests.server.schema_run REPORT [EXAMPLES].

No 5xx, nothing that the description does not say, and nothing wrong that is taken. What is left out: that everything
the schemas allow is accepted. Limits such as "the prompt fits the model" are no part of a schema.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.server.harness import Server

FLAGS = ("--max-model-len", "64", "--max-n", "2", "--read-timeout", "5")
# They stop what other routes do, so they are tried by themselves.
STOPPING = "^/(pause|sleep|resume|wake_up|start_profile|stop_profile)$"
SEED = "20261130"


def run(url: str, report: Path, phases: str, examples: int, *options: str) -> subprocess.CompletedProcess[str]:
    """One run of `st`; its return code is 0 when nothing was found."""
    command = [str(Path(sys.executable).parent / "st"), "run", f"{url}/openapi.json", "--phases", phases]
    command += ["--exclude-checks", "positive_data_acceptance", "--max-examples", str(examples), "--seed", SEED]
    command += ["--request-timeout", "60", "--continue-on-failure", "--no-color", "--warnings", "off"]
    command += ["--report", "json", "--report-json-path", str(report), *options]
    environment = {**os.environ, "SCHEMATHESIS_HOOKS": "tests.server.schema_hooks"}
    root = Path(__file__).resolve().parents[2]
    with tempfile.TemporaryDirectory() as folder:  # it keeps a database of examples where it runs
        environment["PYTHONPATH"] = str(root)
        return subprocess.run(
            command, env=environment, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )


def main(arguments: list[str]) -> int:
    """Both parts, in full; the reports are REPORT and REPORT with `-control` before its ending."""
    report = Path(arguments[0]).resolve()
    examples = int(arguments[1]) if len(arguments) > 1 else 100
    codes = []
    with tempfile.TemporaryDirectory() as folder:
        flags = (*FLAGS, "--served-model-name", "demo", "--torch-profiler-dir", f"{folder}/traces")
        with Server(Path(folder) / "log", *flags) as server:
            for place, choice in (
                (report, ("--exclude-path-regex", STOPPING)),
                (report.with_stem(f"{report.stem}-control"), ("--include-path-regex", STOPPING)),
            ):
                done = run(server.url, place, "examples,coverage,fuzzing", examples, *choice)
                print(done.stdout)
                codes.append(done.returncode)
            server.client.post("/wake_up")
            code = server.stop()
    return max([*codes, code])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
