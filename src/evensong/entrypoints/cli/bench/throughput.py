"""`evensong bench throughput`: offline tokens per second, with vLLM's flags and result keys."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from evensong.entrypoints.cli.bench.datasets import add_dataset_flags, check_dataset_flags, load_samples
from evensong.entrypoints.cli.bench.offline import (
    add_offline_flags,
    engine_settings,
    random_ids,
    set_batch_defaults,
    warm_up,
)
from evensong.entrypoints.cli.bench.report import show
from evensong.entrypoints.cli.flags import Parser
from evensong.entrypoints.llm import LLM
from evensong.protocol.sampling_params import SamplingParams


def make_parser() -> Parser:
    """vLLM's flags for its throughput benchmark, and the engine's."""
    parser = Parser(prog="evensong bench throughput", description="Offline throughput of LLM.generate.")
    add_dataset_flags(parser, num_prompts=32, input_len=128, output_len=128)
    add_offline_flags(parser)
    set_batch_defaults(parser)
    return parser


def run(arguments: Sequence[str]) -> int:
    """Runs the batch once after a small warm-up; a table, then one JSON line. A trace's arrival times do not count."""
    options = make_parser().parse_args(list(arguments))
    check_dataset_flags(options)
    settings = engine_settings(options)
    with LLM(**settings) as llm:
        samples = load_samples(options, lambda: random_ids(llm))
        params = [SamplingParams(temperature=0.0, max_tokens=s.output_len, ignore_eos=True) for s in samples]
        warm_up(llm)
        start = time.perf_counter()
        outputs = llm.generate([sample.prompt for sample in samples], params, use_tqdm=sys.stderr.isatty())
        elapsed = time.perf_counter() - start
    prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    output_tokens = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
    result = {
        "elapsed_time": elapsed,
        "num_requests": len(outputs),
        "total_num_tokens": prompt_tokens + output_tokens,
        "requests_per_second": len(outputs) / elapsed,
        "tokens_per_second": (prompt_tokens + output_tokens) / elapsed,
        "output_tokens_per_second": output_tokens / elapsed,
    }
    show("\n".join(f"{key:<28}{value:>14.2f}" for key, value in result.items()), result, options.output_json)
    return 0
