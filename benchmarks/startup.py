"""Start-up times of the real server, warm: /health, ready, first token over HTTP; and `import evensong`.

python benchmarks/startup.py --runs 5        (cold starts too, and JSON with vLLM's keys: evensong bench startup)
"""

from __future__ import annotations

import argparse
import json
import statistics

from evensong.entrypoints.cli.bench.startup import import_seconds, one_start


def main() -> int:
    """A table, then one JSON line with medians and ranges."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--model", default="demo")
    options = parser.parse_args()
    one_start(options.model)
    runs = [{**one_start(options.model), "import": import_seconds()} for _ in range(options.runs)]
    report = {}
    for name in runs[0]:
        values = [run[name] for run in runs]
        report[name] = {k: round(f(values), 3) for k, f in (("median", statistics.median), ("min", min), ("max", max))}
        print(f"{name:<14}{report[name]}")
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
