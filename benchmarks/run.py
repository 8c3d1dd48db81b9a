"""`make bench`: start-up, throughput beside peers and the machine's limits, load, and the Python time of a step.

    make bench ARGS='--quick'
    make bench ARGS='--only 1x32x128,context,beside --pairs 3'

Sections: startup; workloads as streams x prompt x output; context (decode at 4,096 tokens against 128); beside (a busy
process); steps (Python time). Tables as they come, then the whole as one JSON line and in --report.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import beside_load
from machine import Machine
from throughput import CONTEXT, SHAPES, add_flags, compare, open_sides

HERE = Path(__file__).resolve().parent
STARTUP, BESIDE, STEPS = "startup", "beside", "steps"
ALL = (STARTUP, *SHAPES, CONTEXT, BESIDE, STEPS)
QUICK = (STARTUP, "1x32x128", "32x128x128", STEPS)
QUICK_PAIRS = 2


def part(*words: str) -> Any:
    """The last line of another benchmark, as JSON; the lines before it are shown. Raises SystemExit if it failed."""
    command = [sys.executable, str(HERE / words[0]), *words[1:]]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        raise SystemExit(f"{words[0]} ended with {done.returncode}")
    print(f"{words[0]}:", *lines[:-1], sep="\n", flush=True)
    return json.loads(lines[-1])


def is_shape(name: str) -> bool:
    """Whether it is streams x prompt x output."""
    numbers = name.split("x")
    return len(numbers) == 3 and all(number.isdigit() and int(number) for number in numbers)


def arguments() -> argparse.Namespace:
    """The flags. Exits for an unknown section."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_flags(parser)
    parser.add_argument("--only", default=None, help=f"sections, comma-separated (default: {','.join(ALL)})")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_PAIRS} pairs of {','.join(QUICK)}")
    parser.add_argument("--report", default="bench-report.json")
    options = parser.parse_args()
    options.sections = options.only.split(",") if options.only else list(QUICK if options.quick else ALL)
    unknown = [name for name in options.sections if name not in ALL and not is_shape(name)]
    if unknown:
        parser.error(f"no such section: {', '.join(unknown)}")
    if options.quick:
        options.pairs = min(options.pairs, QUICK_PAIRS)
    return options


def main() -> int:
    """Runs the sections; the report is written even where a later one fails."""
    options = arguments()
    began = time.monotonic()
    machine = Machine()
    report: dict[str, Any] = {"machine": machine.describe(), "pairs": options.pairs, "settings": options.settings}
    # Of the last minute: other work shows before anything of ours runs.
    report["load_average_before"] = round(os.getloadavg()[0], 2)
    try:
        if STARTUP in options.sections:
            report[STARTUP] = part("startup.py", "--model", options.model, "--runs", str(options.pairs))
        workloads = [name for name in options.sections if name == CONTEXT or is_shape(name)]
        if workloads or BESIDE in options.sections:
            with open_sides(options) as (own, sides):
                compare(workloads, options, sides, machine, report.setdefault("workloads", {}))
                if BESIDE in options.sections:
                    report[BESIDE] = beside_load.measure(own, options.pairs)
                    print("beside a busy process:")
                    beside_load.print_report(report[BESIDE])
        if STEPS in options.sections:
            report[STEPS] = part("step_time.py", "--model", options.model, "--settings", json.dumps(options.settings))
    finally:
        report["seconds"] = round(time.monotonic() - began)
        Path(options.report).write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
