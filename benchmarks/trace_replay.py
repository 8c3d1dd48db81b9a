"""Replays a trace with prefix caching on and off: is every request answered, and what share of prompt tokens is found?

    python benchmarks/trace_replay.py --trace FILE.jsonl --time-scale 1 --report trace-report.json

The hit rate of /metrics must be that of the ids under the rules of the cache (`shared_tokens`), within one point;
with the cache off it must be 0. The exit code is 1 where it is not, or where a request was not answered.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from serving import metric, served

from evensong.entrypoints.cli.bench.traces import block_size_of, read_trace, shared_tokens

CACHE_BLOCK = 16
DEFAULT_TRACE = (
    Path(__file__).resolve().parents[2] / "shared" / "data" / "traces" / "mooncake_conversation_first200_div32.jsonl"
)
ALLOWED_POINTS = 1.0
KEPT = ("duration", "completed", "failed", "first_error", "total_input_tokens", "total_output_tokens", "mean_ttft_ms")


def replay(options: argparse.Namespace, flags: list[str], folder: Path) -> dict[str, Any]:
    """One run against a server of its own: the bench's figures and the server's counters."""
    with served(options.model, *flags, log=folder / "server.log") as url:
        command = [sys.executable, "-m", "evensong.entrypoints.cli.main", "bench", "serve", "--base-url", url]
        command += ["--dataset-name", "trace", "--dataset-path", str(options.trace), "--ignore-eos"]
        command += ["--time-scale", str(options.time_scale), "--num-prompts", str(options.num_prompts)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        sys.stdout.write(done.stdout)
        result = json.loads(done.stdout.splitlines()[-1])
        queries, hits = metric(url, "prefix_cache_queries_total"), metric(url, "prefix_cache_hits_total")
        kept = {name: result[name] for name in KEPT}
        preemptions = metric(url, "num_preemptions_total")
    rate = hits / queries if queries else 0.0
    return kept | {"queries": queries, "hits": hits, "hit_rate": rate, "num_preemptions": preemptions}


def main() -> int:
    """Both runs, then the report as one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, default=DEFAULT_TRACE)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--num-prompts", type=int, default=200)
    parser.add_argument("--time-scale", type=float, default=1.0)
    parser.add_argument("--report", default="trace-report.json")
    options = parser.parse_args()
    if not options.trace.exists():
        raise SystemExit(f"there is no trace at {options.trace}: give --trace FILE.jsonl")
    rows = read_trace(options.trace, options.num_prompts)
    tokens = sum(row.input_len for row in rows)
    shared = shared_tokens(rows, block_size_of(rows), CACHE_BLOCK)
    report: dict[str, Any] = {"trace": options.trace.name, "requests": len(rows), "prompt_tokens": tokens}
    report |= {"time_scale": options.time_scale, "shared_tokens": shared, "sharing": shared / tokens}
    with tempfile.TemporaryDirectory() as folder:
        # Room for every block of the trace: what is found must not depend on what had to go.
        blocks = sum((row.input_len + row.output_len) // CACHE_BLOCK + 1 for row in rows)
        flags = ["--block-size", str(CACHE_BLOCK), "--num-kv-blocks-override", str(blocks)]
        report["on"] = replay(options, flags, Path(folder))
        report["off"] = replay(options, [*flags, "--no-enable-prefix-caching"], Path(folder))
    report["points_apart"] = 100 * abs(report["on"]["hit_rate"] - report["sharing"])
    answered = all(report[run]["completed"] == len(rows) for run in ("on", "off"))
    report["ok"] = bool(answered and report["points_apart"] <= ALLOWED_POINTS and report["off"]["hits"] == 0)
    Path(options.report).write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report))
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
