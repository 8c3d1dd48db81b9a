"""The datasets of all benchmarks: their flags, and the requests that they make. Names and defaults are vLLM's."""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from evensong.entrypoints.cli.bench.prompt_files import read_prompts
from evensong.entrypoints.cli.bench.traces import block_size_of, make_prompts, read_trace
from evensong.entrypoints.cli.bench.units import Prompt, Units
from evensong.protocol.errors import ConfigError

FILE_SETS = ("custom", "sharegpt", "spec_bench")
TRACES = ("trace", "timed_trace")
NAMES = ("random", "prefix_repetition", *FILE_SETS, *TRACES)


@dataclass(frozen=True)
class Sample:
    """One request to make. `prompt_len` in tokens, None where only the server can tell; `arrival` in seconds."""

    prompt: Prompt
    output_len: int
    prompt_len: int | None = None
    arrival: float | None = None


def add_dataset_flags(
    parser: argparse.ArgumentParser, *, num_prompts: int, input_len: int = 1024, output_len: int = 128
) -> None:
    """The flags that choose requests; `--seed` is the benchmark's own."""
    group = parser.add_argument_group("dataset")
    group.add_argument("--dataset-name", choices=NAMES, default="random", help="where requests come from")
    group.add_argument("--dataset-path", default=None, metavar="FILE", help="file of prompts or of a trace")
    group.add_argument("--num-prompts", type=int, default=num_prompts, help="requests, or at most as many as there are")
    group.add_argument(
        "--input-len", "--random-input-len", type=int, default=input_len, help="random: tokens of each prompt"
    )
    group.add_argument(
        "--output-len", "--random-output-len", type=int, default=None,
        help=f"tokens of each output (default: {output_len}; of a file of prompts 256; of a trace its own)",
    )  # fmt: skip
    group.add_argument(
        "--random-range-ratio", type=float, default=0.0, metavar="R", help="random: lengths vary by up to this share"
    )
    group.add_argument(
        "--random-prefix-len", type=int, default=0, help="random: tokens before each prompt that all share"
    )
    group.add_argument("--prefix-repetition-prefix-len", type=int, default=256, help="tokens that requests share")
    group.add_argument("--prefix-repetition-suffix-len", type=int, default=256, help="tokens of each request's own")
    group.add_argument("--prefix-repetition-num-prefixes", type=int, default=10, help="different shared prefixes")
    group.add_argument("--prefix-repetition-output-len", type=int, default=128, help="tokens of each output")
    group.add_argument(
        "--custom-output-len", "--sharegpt-output-len", "--spec-bench-output-len", type=int, default=256,
        help="tokens of each output, where the file of prompts names none",
    )  # fmt: skip
    group.add_argument(
        "--timed-trace-chunk-hash-size", type=int, default=None, metavar="N",
        help="tokens that one hash id of the trace stands for (default: what its rows say)",
    )  # fmt: skip
    group.add_argument(
        "--time-scale", type=float, default=1.0, metavar="X", help="trace: arrival times are multiplied by this"
    )
    parser.set_defaults(default_output_len=output_len)


def check_dataset_flags(options: argparse.Namespace) -> None:
    """Raises ConfigError for numbers that cannot be, and for a file that is needed and not named."""
    positive = ["num_prompts", "input_len", "output_len", "custom_output_len", "timed_trace_chunk_hash_size"]
    positive += ["prefix_repetition_num_prefixes", "prefix_repetition_output_len"]
    for name in positive:
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1")
    for name in ("random_prefix_len", "prefix_repetition_prefix_len", "prefix_repetition_suffix_len"):
        if getattr(options, name) < 0:
            raise ConfigError(f"--{name.replace('_', '-')} must not be negative")
    if options.prefix_repetition_prefix_len + options.prefix_repetition_suffix_len < 1:
        raise ConfigError("--prefix-repetition-suffix-len must be at least 1 where there is no prefix")
    if not 0 <= options.random_range_ratio < 1:
        raise ConfigError("--random-range-ratio must be in [0, 1)")
    if not 0 <= options.time_scale < float("inf"):
        raise ConfigError("--time-scale must not be negative")
    if options.dataset_name in FILE_SETS + TRACES and options.dataset_path is None:
        raise ConfigError(f"--dataset-name {options.dataset_name} needs --dataset-path FILE")


def load_samples(options: argparse.Namespace, units: Callable[[], Units]) -> list[Sample]:
    """The requests that the flags ask for; the same ones for the same seed.

    `units` is called where prompts are made here rather than read. Raises ConfigError for a file that cannot be used.
    """
    if options.dataset_name in FILE_SETS:
        return _from_file(options)
    if options.dataset_name in TRACES:
        return _from_trace(options, units())
    rng = random.Random(f"requests {options.seed}")
    if options.dataset_name == "prefix_repetition":
        return _prefix_repetition(options, units(), rng)
    return _random(options, units(), rng)


def _random(options: argparse.Namespace, units: Units, rng: random.Random) -> list[Sample]:
    ratio = options.random_range_ratio

    def length(middle: int) -> int:
        return max(rng.randint(int(middle * (1 - ratio)), int(middle * (1 + ratio))), 1)

    prefix = units.draw(options.random_prefix_len, rng)
    output_len = options.output_len or options.default_output_len
    samples = []
    for _ in range(options.num_prompts):
        own = units.draw(length(options.input_len), rng)
        samples.append(Sample(units.join(prefix, own), length(output_len), len(prefix) + len(own)))
    return samples


def _prefix_repetition(options: argparse.Namespace, units: Units, rng: random.Random) -> list[Sample]:
    """Each prefix in turn, the requests shuffled."""
    num = options.prefix_repetition_num_prefixes
    prefixes = [units.draw(options.prefix_repetition_prefix_len, rng) for _ in range(num)]
    samples = []
    for index in range(options.num_prompts):
        prefix, own = prefixes[index % num], units.draw(options.prefix_repetition_suffix_len, rng)
        output_len = options.output_len or options.prefix_repetition_output_len
        samples.append(Sample(units.join(prefix, own), output_len, len(prefix) + len(own)))
    rng.shuffle(samples)
    return samples


def _from_file(options: argparse.Namespace) -> list[Sample]:
    pairs = read_prompts(Path(options.dataset_path), options.num_prompts)
    return [Sample(text, options.output_len or length or options.custom_output_len) for text, length in pairs]


def _from_trace(options: argparse.Namespace, units: Units) -> list[Sample]:
    rows = read_trace(Path(options.dataset_path), options.num_prompts)
    block = options.timed_trace_chunk_hash_size or block_size_of(rows)
    prompts = make_prompts(rows, block, units, options.seed)
    return [
        Sample(prompt, options.output_len or row.output_len, row.input_len, row.arrival * options.time_scale)
        for row, prompt in zip(rows, prompts, strict=True)
    ]
