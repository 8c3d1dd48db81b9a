"""`evensong bench latency`: seconds that one batch takes from start to end, with vLLM's flags and result keys."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from tqdm import tqdm

from evensong.entrypoints.cli.bench.offline import (
    PERCENTILES,
    add_offline_flags,
    check_positive,
    engine_settings,
    random_ids,
    set_batch_defaults,
)
from evensong.entrypoints.cli.bench.report import show
from evensong.entrypoints.cli.flags import Parser
from evensong.entrypoints.llm import LLM
from evensong.protocol.errors import ConfigError
from evensong.protocol.sampling_params import SamplingParams


def make_parser() -> Parser:
    """vLLM's flags for its latency benchmark, and the engine's; prefix caching is off, as there."""
    parser = Parser(prog="evensong bench latency", description="Seconds that one batch of LLM.generate takes.")
    parser.add_argument("--input-len", type=int, default=32, help="tokens of each prompt")
    parser.add_argument("--output-len", type=int, default=128, help="tokens of each output")
    parser.add_argument("--batch-size", type=int, default=8, help="prompts in the batch")
    parser.add_argument("--n", type=int, default=1, help="outputs of each prompt")
    parser.add_argument("--num-iters-warmup", type=int, default=10, help="batches before, which do not count")
    parser.add_argument("--num-iters", type=int, default=30, help="batches that count")
    add_offline_flags(parser)
    set_batch_defaults(parser)
    # The batch is the same every time: from the second on the cache would hold its prompts.
    parser.set_defaults(enable_prefix_caching=False)
    return parser


def run(arguments: Sequence[str]) -> int:
    """Runs the same batch again and again; a table, then one JSON line."""
    options = make_parser().parse_args(list(arguments))
    check_positive(options, "input_len", "output_len", "batch_size", "n", "num_iters")
    if options.num_iters_warmup < 0:
        raise ConfigError("--num-iters-warmup must not be negative")
    settings = engine_settings(options)
    latencies = []
    with LLM(**settings) as llm:
        units, rng = random_ids(llm), random.Random(options.seed)
        prompts = [units.join(units.draw(options.input_len, rng)) for _ in range(options.batch_size)]
        params = SamplingParams(n=options.n, temperature=1.0, seed=0, max_tokens=options.output_len, ignore_eos=True)
        rounds = options.num_iters_warmup + options.num_iters
        for _ in tqdm(range(rounds), disable=not sys.stderr.isatty(), file=sys.stderr, unit="batch"):
            start = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            latencies.append(time.perf_counter() - start)
    latencies = latencies[options.num_iters_warmup :]
    result = {"avg_latency": float(np.mean(latencies)), "latencies": latencies, "percentiles": percentiles(latencies)}
    lines = [f"{'average latency (s)':<24}{result['avg_latency']:>10.4f}"]
    lines += [f"{name + '% (s)':<24}{value:>10.4f}" for name, value in percentiles(latencies).items()]
    show("\n".join(lines), result, options.output_json)
    return 0


def percentiles(values: Sequence[float]) -> dict[str, Any]:
    """By percent, as vLLM's result files have them."""
    found = np.percentile(values, PERCENTILES)
    return {str(percent): float(value) for percent, value in zip(PERCENTILES, found, strict=True)}
