"""`evensong bench throughput`: offline tokens per second, with vLLM's flags and result keys."""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evensong.config.resolve import resolve
from evensong.config.sections import ENGINE_SECTIONS
from evensong.entrypoints.cli.flags import Parser, add_section_flags, section_values
from evensong.entrypoints.llm import LLM
from evensong.protocol.errors import ConfigError
from evensong.protocol.sampling_params import SamplingParams


def run(arguments: Sequence[str]) -> int:
    """Dispatches to the benchmark named first; returns the exit code."""
    words = list(arguments)
    if not words or words[0] in ("-h", "--help"):
        sys.stdout.write("usage: evensong bench throughput [FLAGS]   (--help lists them)\n")
        return 0 if words else 2
    if words[0] != "throughput":
        raise ConfigError(f"there is no benchmark {words[0]!r}; there is: throughput")
    return throughput(words[1:])


def make_parser() -> Parser:
    """vLLM's flags for its throughput benchmark, and the engine's."""
    parser = Parser(prog="evensong bench throughput", description="Offline throughput of LLM.generate.")
    parser.add_argument("--model", default="demo", help="a folder, a .gguf file, a name on the hub, or demo")
    parser.add_argument("--num-prompts", type=int, default=32, help="requests in the batch")
    parser.add_argument("--input-len", "--random-input-len", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--output-len", "--random-output-len", type=int, default=128, help="tokens of each output")
    parser.add_argument("--dataset-name", choices=("random",), default="random", help="where prompts come from")
    parser.add_argument("--output-json", default=None, metavar="FILE", help="write the figures to this file as well")
    for section in ENGINE_SECTIONS.values():
        add_section_flags(parser, section, skip=("model",))
    return parser


def throughput(arguments: list[str]) -> int:
    """Runs the batch once after a small warm-up; a table, then one JSON line."""
    options = make_parser().parse_args(arguments)
    for name in ("num_prompts", "input_len", "output_len"):
        if getattr(options, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1")
    settings: dict[str, Any] = {}
    for section in ENGINE_SECTIONS.values():
        settings |= section_values(options, section)
    resolve(settings)
    generator = random.Random(settings.get("seed", 0))
    with LLM(**settings) as llm:
        most = llm.llm_engine.front.inputs.num_token_ids
        prompts = [
            {"prompt_token_ids": [generator.randrange(most) for _ in range(options.input_len)]}
            for _ in range(options.num_prompts)
        ]
        params = SamplingParams(temperature=0.0, max_tokens=options.output_len, ignore_eos=True)
        llm.generate([[1] * 16], SamplingParams(temperature=0.0, max_tokens=4), use_tqdm=False)
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=sys.stderr.isatty())
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
    for key, value in result.items():
        sys.stdout.write(f"{key:<28}{value:>14.2f}\n")
    if options.output_json is not None:
        Path(options.output_json).write_text(json.dumps(result) + "\n", encoding="utf-8")
    sys.stdout.write(json.dumps(result) + "\n")
    return 0
