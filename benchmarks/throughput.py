"""Throughput beside peers and beside the machine's limits: the same batches on all sides, in turn.

    python benchmarks/throughput.py --only 1x32x128,context --pairs 5 --peer-python PATH --peer-model FOLDER

Peers are vLLM in another environment and llama.cpp's llama-batched-bench; a side that is not set up is left out. A
table, then one JSON line: medians with min and max, the ratio pair by pair, and the fraction of the roofline
(roofline.py) that the machine had right before and after (machine.py).
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import statistics
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from machine import Machine, mean_of
from pairs import show, spread
from roofline import Rows, Sizes, Step, seconds, workload_seconds
from sides import LlamaSide, LLMSide, Side, evensong_side, vllm_side

from evensong.sources.model_config import load_model_description
from evensong.sources.resolve import resolve_model
from evensong.utils.machine import usable_cpus

# streams x prompt x output; one output token: prompt tokens are counted.
SHAPES = ("1x32x128", "8x32x128", "32x128x128", "64x128x128", "16x512x1")
CONTEXT = "context"
CONTEXT_STREAMS, CONTEXT_STEPS, SHORT, LONG = 8, 64, 128, 4096
# Reading the long prompts costs more than all that is measured after them.
CONTEXT_PAIRS = 3


def sizes_of(model: str, weight_bytes: float, kv_bytes: float) -> Sizes:
    """The model's sizes for the roofline."""
    config = load_model_description(resolve_model(model, progress=False))
    return Sizes(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        tied=config.tie_word_embeddings,
        weight_bytes=weight_bytes,
        kv_bytes=kv_bytes,
    )


class Comparison:
    """Runs workloads on all sides in turn. The first side is the one that the others are compared with."""

    def __init__(self, sides: list[Side], machine: Machine, sizes: Sizes, pairs: int) -> None:
        self._sides = sides
        self._machine = machine
        self._sizes = sizes
        self._pairs = pairs
        # No prompt comes twice, in whole or in part: no side's prefix cache helps it.
        self._seeds = itertools.count()

    def shape(self, name: str) -> dict[str, Any]:
        """Tokens per second of each side, their ratios, and their fractions of the roofline."""
        n, prompt_len, output_len = (int(part) for part in name.split("x"))
        tokens = n * (prompt_len if output_len == 1 else output_len)
        warm_up = next(self._seeds)
        for side in self._sides:
            side.run(n, prompt_len, min(output_len, 4), warm_up)
        before = self._machine.measure()
        rates: dict[str, list[float]] = {side.name: [] for side in self._sides}
        for side, seed in self._turns(self._pairs):
            rates[side.name].append(tokens / side.run(n, prompt_len, output_len, seed))
        row = self._row(rates, before)
        own = rates[self._sides[0].name]
        row["ratio"] = {
            name: spread([mine / other for mine, other in zip(own, peer, strict=True)])
            for name, peer in rates.items()
            if peer is not own
        }
        peak, bandwidth = _limits(row["machine"])
        roofline = tokens / workload_seconds(self._sizes, n, prompt_len, output_len, peak, bandwidth)
        row["roofline"] = round(roofline, 1)
        row["fraction"] = {side: round(statistics.median(values) / roofline, 3) for side, values in rates.items()}
        return {"unit": "prompt tokens/s" if output_len == 1 else "tokens/s", **row}

    def context(self) -> dict[str, Any]:
        """Milliseconds that a decode step takes longer at the long context, beside the time to read its keys."""
        seeds = {length: next(self._seeds) for length in (SHORT, LONG)}
        before = self._machine.measure()
        steps: dict[int, dict[str, list[float]]] = {
            length: {side.name: [] for side in self._sides} for length in (SHORT, LONG)
        }
        for side, _ in self._turns(min(self._pairs, CONTEXT_PAIRS)):
            for length, seed in seeds.items():
                taken = side.decode_step(CONTEXT_STREAMS, length, CONTEXT_STEPS, seed)
                steps[length][side.name].append(1e3 * taken)
        extra = {
            name: [long - short for short, long in zip(values, steps[LONG][name], strict=True)]
            for name, values in steps[SHORT].items()
        }
        row = self._row(extra, before)
        peak, bandwidth = _limits(row["machine"])
        extra_bytes = CONTEXT_STREAMS * (LONG - SHORT) * self._sizes.kv_bytes_per_token
        least = {length: 1e3 * seconds(self._sizes, _middle_step(length), peak, bandwidth) for length in (SHORT, LONG)}
        row["read_ms"] = round(1e3 * extra_bytes / bandwidth, 2)
        row["times_read"] = {name: round(statistics.median(v) / row["read_ms"], 2) for name, v in extra.items()}
        row["step_ms"] = {
            str(length): {name: spread(values) for name, values in steps[length].items()} for length in steps
        }
        row["roofline_step_ms"] = {str(length): round(value, 2) for length, value in least.items()}
        return {"unit": "ms more for a decode step", **row}

    def _turns(self, pairs: int) -> Iterator[tuple[Side, int]]:
        """Each side once a pair, with the pair's seed; who begins alternates."""
        for pair in range(pairs):
            seed = next(self._seeds)
            for side in self._sides if pair % 2 == 0 else reversed(self._sides):
                yield side, seed

    def _row(self, values: dict[str, list[float]], before: dict[str, float]) -> dict[str, Any]:
        after = self._machine.measure()
        return {
            "sides": {name: spread(one) for name, one in values.items()},
            "machine": mean_of(before, after),
            "machine_before_after": [before, after],
        }


def _limits(machine: dict[str, float]) -> tuple[float, float]:
    """FLOP/s and bytes/s. Whatever type a product is computed in: the faster one is the limit."""
    return 1e9 * max(machine["bf16_gflops"], machine["f32_gflops"]), 1e9 * machine["read_gb_per_s"]


def _middle_step(context: int) -> Step:
    return Step((Rows(context + CONTEXT_STEPS // 2),) * CONTEXT_STREAMS, CONTEXT_STREAMS)


def print_row(name: str, row: dict[str, Any]) -> None:
    """One workload, a line for each side."""
    limit = f"reading the keys: {row['read_ms']} ms" if name == CONTEXT else f"roofline {row['roofline']}"
    machine = ", ".join(f"{key} {value:g}" for key, value in row["machine"].items())
    print(f"{name}: {row['unit']}; {limit} ({machine})")
    for side, values in row["sides"].items():
        if name == CONTEXT:
            steps = ", ".join(f"{show(one[side])} at {length}" for length, one in row["step_ms"].items())
            words = f"{row['times_read'][side]} x reading; a step: {steps}"
        else:
            words = f"{row['fraction'][side]:.0%} of the roofline"
            if side in row["ratio"]:
                words += f"; evensong is {show(row['ratio'][side])} times that"
        print(f"  {side:<12}{show(values):<28}{words}", flush=True)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """What the sides need."""
    environment = os.environ.get
    parser.add_argument("--model", default="demo")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--settings", type=json.loads, default={}, help="JSON: more of LLM's arguments for evensong")
    parser.add_argument("--weight-bytes", type=float, default=2.0, help="of a weight in memory, for the roofline")
    parser.add_argument("--kv-bytes", type=float, default=2.0, help="of a cached key's element, for the roofline")
    parser.add_argument("--peer-python", default=environment("EVENSONG_PEER_VLLM"), help="vLLM's interpreter")
    parser.add_argument("--peer-model", default=environment("EVENSONG_PEER_VLLM_MODEL"), help="the model for vLLM")
    parser.add_argument("--llama-bench", default=environment("EVENSONG_PEER_LLAMA"), help="llama-batched-bench")
    parser.add_argument("--llama-model", default=environment("EVENSONG_PEER_LLAMA_MODEL"), help="a bf16 GGUF file")
    parser.add_argument("--llama-flags", default="", help="more flags for llama-batched-bench, in one word")


@contextlib.contextmanager
def open_sides(options: argparse.Namespace) -> Iterator[tuple[LLMSide, list[Side]]]:
    """evensong, and all sides with it as the first."""
    for tool, model in (("peer_python", "peer_model"), ("llama_bench", "llama_model")):
        if bool(getattr(options, tool)) != bool(getattr(options, model)):
            raise SystemExit(f"a peer needs both: {tool} and {model}")
    # A stopped process outlives its parent: a benchmark that is ended must end it.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with contextlib.ExitStack() as stack:
        own = evensong_side(options.model, options.settings)
        stack.callback(own.close)
        sides: list[Side] = [own]
        if options.peer_python:
            sides.append(vllm_side(options.peer_python, options.peer_model))
            stack.callback(sides[-1].close)
        if options.llama_bench:
            flags = options.llama_flags.split()
            sides.append(LlamaSide(options.llama_bench, options.llama_model, usable_cpus(), flags))
        yield own, sides


def compare(
    names: Sequence[str], options: argparse.Namespace, sides: list[Side], machine: Machine, report: dict[str, Any]
) -> None:
    """Measures and prints the workloads of these names, each into `report` as soon as it is done."""
    sizes = sizes_of(options.model, options.weight_bytes, options.kv_bytes)
    comparison = Comparison(sides, machine, sizes, options.pairs)
    for name in names:
        report[name] = comparison.context() if name == CONTEXT else comparison.shape(name)
        print_row(name, report[name])


def main() -> int:
    """Measures each workload in pairs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_flags(parser)
    parser.add_argument("--only", default=",".join((*SHAPES, CONTEXT)), help="workloads, comma-separated")
    options = parser.parse_args()
    machine = Machine()
    report: dict[str, Any] = {}
    with open_sides(options) as (_, sides):
        compare(options.only.split(","), options, sides, machine, report)
    print(json.dumps({"machine": machine.describe(), "workloads": report}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
