"""Fuzzes the readers of weight files with atheris (`make fuzz SECONDS=60`); what crashes one is kept in the corpus.

Inputs that reach new lines are gathered in build/fuzz, so a later run goes on where this one ended.
"""

from __future__ import annotations

import argparse
import logging
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["evensong.sources"]):
    from tests.fuzz.targets import TARGETS

from tests.fuzz.mutate import mutated

ROOT = Path(__file__).resolve().parents[2]
CORPUS = Path(__file__).parent / "corpus"
MAX_BYTES = 4096


def main() -> int:
    """Fuzzes each target in a process of its own; 1 where one found something."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=60, help="for each target (default 60)")
    parser.add_argument("--only", choices=[*TARGETS], help="one target")
    parser.add_argument("--child", choices=[*TARGETS], help=argparse.SUPPRESS)
    parser.add_argument("--scratch", type=Path, help=argparse.SUPPRESS)
    options, rest = parser.parse_known_args()
    if options.child:
        _fuzz(options.child, options.scratch, rest)
    failed = [target for target in ([options.only] if options.only else TARGETS) if not _run(target, options.seconds)]
    for target in failed:
        print(
            f"{target}: found something; the input is tests/fuzz/corpus/{target}/crash-* or its like", file=sys.stderr
        )
    return bool(failed)


def _run(target: str, seconds: int) -> bool:
    gathered = ROOT / "build" / "fuzz" / target
    gathered.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "tests.fuzz.fuzz_readers", "--child", target, str(gathered), str(CORPUS / target)]
    # The child ends without unwinding, so the folder for its inputs is not its own.
    folder = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=folder, prefix="fuzz-of-evensong-") as scratch:
        return _child(command, target, seconds, scratch)


def _child(command: list[str], target: str, seconds: int, scratch: str) -> bool:
    command += ["--scratch", scratch]
    command += [f"-max_total_time={seconds}", f"-max_len={MAX_BYTES}", "-timeout=10", "-rss_limit_mb=2048"]
    command += [f"-artifact_prefix={CORPUS / target}/", "-print_final_stats=1", "-use_value_profile=1"]
    return subprocess.run(command, cwd=ROOT, check=False).returncode == 0


def _fuzz(target: str, scratch: Path, flags: list[str]) -> None:
    """Does not return: libFuzzer ends the process."""
    logging.disable()
    path, run = scratch / "input", TARGETS[target]

    def mutate(data: bytes, max_size: int, seed: int) -> bytes:
        rng = random.Random(seed)
        out = mutated(target, data, rng) if rng.random() < 0.5 else atheris.Mutate(data, len(data))
        return bytes(out[:max_size])

    atheris.Setup([sys.argv[0], *flags], lambda data: run(data, path), custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())
