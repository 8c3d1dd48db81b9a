"""`evensong bench NAME`: a table of benchmarks, imported when they run."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from evensong.protocol.errors import ConfigError

_HERE = "evensong.entrypoints.cli.bench"
# name -> (module with `run(arguments) -> exit code`, one line)
BENCHMARKS: dict[str, tuple[str, str]] = {
    "serve": (f"{_HERE}.serve", "load on a running server: latencies, throughput, goodput"),
    "latency": (f"{_HERE}.latency", "seconds that one batch takes, offline"),
    "throughput": (f"{_HERE}.throughput", "tokens per second of LLM.generate, offline"),
    "startup": (f"{_HERE}.startup", "seconds from the command to the first token"),
}


def usage() -> str:
    """What `evensong bench --help` says."""
    lines = [f"usage: evensong bench {'|'.join(BENCHMARKS)} [FLAGS]   (--help lists them)", ""]
    lines += [f"  {name:<12}{text}" for name, (_, text) in BENCHMARKS.items()]
    return "\n".join(lines)


def run(arguments: Sequence[str]) -> int:
    """Dispatches to the benchmark named first; returns the exit code. Raises ConfigError for a name it lacks."""
    words = list(arguments)
    if not words or words[0] in ("-h", "--help"):
        sys.stdout.write(f"{usage()}\n")
        return 0 if words else 2
    if words[0] not in BENCHMARKS:
        raise ConfigError(f"there is no benchmark {words[0]!r:.40}; there are: {', '.join(BENCHMARKS)}")
    code: int = importlib.import_module(BENCHMARKS[words[0]][0]).run(words[1:])
    return code
