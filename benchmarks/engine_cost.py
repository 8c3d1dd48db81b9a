"""`make engine-cost`: what the engine alone costs, on a model of negligible compute, beside vLLM.

    python benchmarks/engine_cost.py --peer-python PATH [--quick] [--only offline,http-64] [--pairs 5]

Both engines are asked in turn, in pairs: offline (`LLM`, 64 streams), and over HTTP with the client of vLLM's own
environment at 1, 32 and 64 streams, with the processor time of all processes of the server. A client of our own counts
events. A table as it comes, then one JSON line, also in --report.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from advantages import Turns, row_of
from http_load import BenchClient, Load, events_per_token
from serving import Server, evensong_server, vllm_server
from sides import KV_BYTES, MAX_MODEL_LEN, MAX_STREAMS, VOCABULARY, LLMSide, evensong_side, vllm_side, wait_idle
from throughput import show, spread
from tiny_model import SPECIAL, VOCAB_SIZE, write_tiny_model

from evensong.utils.machine import usable_cpus

OFFLINE = "offline"
OFFLINE_SHAPE = (64, 128, 512)
PROMPT_LEN, OUTPUT_LEN = 128, 128
# By the number of streams: enough for seconds, and for several waves of requests.
NUM_PROMPTS = {1: 24, 32: 192, 64: 512}
SECTIONS = (OFFLINE, *(f"http-{streams}" for streams in NUM_PROMPTS))
QUICK_PAIRS = 2
# vLLM's server closes some connections of 64 at once here, unanswered; what it does answer is counted.
PEER_ANSWERS = 0.9
EVENT_TOKENS = 64
# The special tokens are the last ones.
NUM_WORDS = VOCAB_SIZE - len(SPECIAL)
# What of the client's report is kept, and under which name.
FIGURES = {
    "tokens_per_s": "output_throughput",
    "ttft_ms": "median_ttft_ms",
    "ttft_p99_ms": "p99_ttft_ms",
    "tpot_ms": "median_tpot_ms",
    "itl_ms": "median_itl_ms",
    "itl_mean_ms": "mean_itl_ms",
}


def summed_up(values: Sequence[float]) -> dict[str, float]:
    """Median, least and most."""
    return spread(values, 3)


def measure_offline(sides: list[LLMSide], turns: Turns) -> dict[str, Any]:
    """Output tokens a second of a batch, prompts included."""
    n, prompt_len, output_len = OFFLINE_SHAPE
    by_name = {side.name: side for side in sides}
    warm_up = turns.seed()
    for side in sides:
        side.run(n, prompt_len, 16, warm_up)
    values: dict[str, dict[str, list[float]]] = {name: {"tokens_per_s": []} for name in by_name}
    for name, seed in turns.of(list(by_name)):
        values[name]["tokens_per_s"].append(n * output_len / by_name[name].run(n, prompt_len, output_len, seed))
    return row_of(values, summed_up)


class HttpComparison:
    """Servers under the same load in turn; the others are off the processors meanwhile."""

    def __init__(self, servers: list[Server], client: BenchClient, model: Path, turns: Turns) -> None:
        self._servers = {server.name: server for server in servers}
        self._client = client
        self._model = model
        self._turns = turns
        for server in servers:
            wait_idle(server)
            server.pause()

    def measure(self, streams: int) -> dict[str, Any]:
        """The client's figures, the server's processor time and events for each token, and events that we counted."""
        load = Load(streams, NUM_PROMPTS[streams], PROMPT_LEN, OUTPUT_LEN)
        warm_up = self._turns.seed()
        for server in self._servers.values():
            with _on(server):
                self._client.run(server.url, Load(streams, streams, PROMPT_LEN, 16), warm_up)
        values: dict[str, dict[str, list[float]]] = {name: {} for name in self._servers}
        for name, seed in self._turns.of(list(self._servers)):
            for figure, value in self._one(self._servers[name], load, seed).items():
                values[name].setdefault(figure, []).append(value)
        row = row_of(values, summed_up)
        row["events_counted"] = {}
        for server in self._servers.values():
            with _on(server):
                counted = Load(streams, streams, PROMPT_LEN, EVENT_TOKENS)
                row["events_counted"][server.name] = round(
                    events_per_token(server.url, self._model, counted, NUM_WORDS), 3
                )
        return row

    def _one(self, server: Server, load: Load, seed: int) -> dict[str, float]:
        with _on(server):
            before = server.cpu_seconds()
            result = self._client.run(server.url, load, seed, least=1.0 if server.name == "evensong" else PEER_ANSWERS)
            cpu = server.cpu_seconds() - before
        if result["completed"] < load.num_prompts:
            unanswered = load.num_prompts - result["completed"]
            print(f"  {server.name}: {unanswered} of {load.num_prompts} requests failed: {result['error'][-200:]}")
        figures = {name: float(result[key]) for name, key in FIGURES.items()}
        # Both sum up the same times: one by tokens, the other by events.
        merged = result["mean_tpot_ms"] / result["mean_itl_ms"]
        return {**figures, "events_per_token": merged, "cpu_us_per_token": 1e6 * cpu / result["total_output_tokens"]}


@contextlib.contextmanager
def _on(server: Server) -> Iterator[None]:
    server.go_on()
    try:
        yield
    finally:
        server.pause()


def print_row(name: str, row: dict[str, Any]) -> None:
    """One section, a line for each figure."""
    print(f"{name}:")
    for figure, sides in row["figures"].items():
        words = [f"{side} {show(one)}" for side, one in sides.items()]
        words += [f"advantage {show(ratios[figure])}" for ratios in row["advantage"].values()]
        print(f"  {figure:<18}{'   '.join(words)}")
    if "events_counted" in row:
        print(f"  {'events_counted':<18}{row['events_counted']}")
    sys.stdout.flush()


def run_offline(options: argparse.Namespace, model: Path, turns: Turns) -> dict[str, Any]:
    """The offline section, each engine in a process of its own."""
    with contextlib.ExitStack() as stack:
        sides = [evensong_side(str(model), {VOCABULARY: NUM_WORDS})]
        stack.callback(sides[0].close)
        if options.peer_python:
            sides.append(vllm_side(options.peer_python, str(model), {VOCABULARY: NUM_WORDS}))
            stack.callback(sides[1].close)
        return measure_offline(sides, turns)


def run_http(options: argparse.Namespace, model: Path, turns: Turns, report: dict[str, Any]) -> None:
    """The HTTP sections, each into `report` as soon as it is done."""
    common = ("--dtype", "bfloat16", "--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", str(MAX_STREAMS))
    logs = model.parent
    with contextlib.ExitStack() as stack:
        own = ("--kv-cache-memory-bytes", str(KV_BYTES), "--log-level", "warning")
        servers = [stack.enter_context(evensong_server(str(model), *common, *own, log=logs / "evensong.log"))]
        peer = vllm_server(options.peer_python, str(model), *common, log=logs / "vllm.log", kv_bytes=KV_BYTES)
        servers.append(stack.enter_context(peer))
        client = BenchClient(options.peer_python, model)
        stack.callback(client.close)
        comparison = HttpComparison(servers, client, model, turns)
        for name in options.sections:
            if name != OFFLINE:
                report[name] = comparison.measure(int(name.removeprefix("http-")))
                print_row(name, report[name])


def arguments() -> argparse.Namespace:
    """The flags. Exits for an unknown section, or for HTTP without the client's environment."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--peer-python", default=os.environ.get("EVENSONG_PEER_VLLM"), help="vLLM's interpreter")
    parser.add_argument("--only", default=None, help=f"sections, comma-separated (default: {','.join(SECTIONS)})")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_PAIRS} pairs")
    parser.add_argument("--report", default="engine-cost-report.json")
    options = parser.parse_args()
    options.sections = options.only.split(",") if options.only else list(SECTIONS)
    if unknown := [name for name in options.sections if name not in SECTIONS]:
        parser.error(f"no such section: {', '.join(unknown)}")
    if not options.peer_python and options.sections != [OFFLINE]:
        parser.error("HTTP is measured with vLLM's client: --peer-python, or --only offline")
    if options.quick:
        options.pairs = min(options.pairs, QUICK_PAIRS)
    return options


def main() -> int:
    """Runs the sections; the report is written even where a later one fails."""
    options = arguments()
    # A stopped process outlives its parent: a benchmark that is ended must end it.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    began = time.monotonic()
    report: dict[str, Any] = {"processors": usable_cpus(), "pairs": options.pairs}
    # Of the last minute: other work shows before anything of ours runs.
    report["load_average_before"] = round(os.getloadavg()[0], 2)
    turns = Turns(options.pairs)
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_model(Path(folder) / "tiny")
        try:
            if OFFLINE in options.sections:
                report[OFFLINE] = run_offline(options, model, turns)
                print_row(OFFLINE, report[OFFLINE])
            if options.sections != [OFFLINE]:
                run_http(options, model, turns, report)
        finally:
            report["seconds"] = round(time.monotonic() - began)
            Path(options.report).write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
