"""Calls of the Berkeley Function Calling Leaderboard with tool_choice required: every one parses and validates.

    python benchmarks/bfcl.py --limit 50

Starts `evensong serve MODEL`. Which function a small model picks does not matter here; that each call is one of the
tools given, in JSON that matches its schema, does. Answers that max_tokens cuts are drawn again and counted. What
fails, a table, then one JSON line; the exit code is 1 where a call is not as it must be.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

from function_calls import FILES, FOLDER, cases, judge_all
from serving import served


def main() -> int:
    """Verdicts by category."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--limit", type=int, help="cases of each category (default: all)")
    parser.add_argument("--categories", nargs="+", choices=FILES, default=list(FILES))
    parser.add_argument("--max-tokens", type=int, default=768)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--report", type=Path)
    options = parser.parse_args()
    if not options.folder.is_dir():
        raise SystemExit(f"the data is not at {options.folder}")
    report: dict[str, dict[str, float]] = {}
    log = Path(tempfile.mkstemp(suffix=".log", prefix="bfcl-")[1])
    with served(options.model, "--served-model-name", "model", log=log) as url:
        print(f"{'category':<12}{'cases':>8}{'calls':>8}{'right':>8}{'redrawn':>9}{'seconds':>9}")
        for category in options.categories:
            asked = list(cases(category, options.folder, options.limit))
            began = time.perf_counter()
            verdicts = judge_all(url, "model", asked, max_tokens=options.max_tokens, at_once=options.at_once)
            for verdict in verdicts:
                for fault in verdict.faults:
                    print(f"  {verdict.name}: {fault}")
            figures = {
                "cases": len(verdicts),
                "calls": sum(verdict.num_calls for verdict in verdicts),
                "right": sum(not verdict.faults for verdict in verdicts),
                "redrawn": sum(verdict.num_cuts for verdict in verdicts),
                "seconds": round(time.perf_counter() - began, 1),
            }
            report[category] = figures
            print(
                f"{category:<12}" + "".join(f"{figures[k]:>{w}}" for k, w in zip(figures, (8, 8, 8, 9, 9), strict=True))
            )
    log.unlink()
    right = all(figures["right"] == figures["cases"] for figures in report.values())
    line = json.dumps({"benchmark": "bfcl", "model": options.model, "passed": right, **report})
    print(line)
    if options.report is not None:
        options.report.write_text(line + "\n")
    return 0 if right else 1


if __name__ == "__main__":
    raise SystemExit(main())
