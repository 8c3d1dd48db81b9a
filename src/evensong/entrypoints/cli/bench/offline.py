"""What the offline benchmarks share: the engine's flags, its settings, and prompts of random token ids."""

from __future__ import annotations

import argparse
from typing import Any

from evensong.config.resolve import resolve
from evensong.entrypoints.cli.bench.units import Units
from evensong.entrypoints.cli.flags import Parser, add_engine_flags, engine_values
from evensong.entrypoints.llm import BATCH_STEP_SECONDS, LLM, UNLIMITED_QUEUE
from evensong.protocol.errors import ConfigError
from evensong.protocol.sampling_params import SamplingParams

PERCENTILES = (10, 25, 50, 75, 90, 99)


def add_offline_flags(parser: Parser) -> None:
    """--model, --output-json and the engine's sections."""
    parser.add_argument("--model", default="demo", help="a folder, a .gguf file, a name on the hub, or demo")
    parser.add_argument("--output-json", default=None, metavar="FILE", help="write the figures to this file as well")
    add_engine_flags(parser)


def set_batch_defaults(parser: Parser) -> None:
    """What LLM takes where it is not told otherwise, for its own defaults do not count when every flag has one."""
    parser.set_defaults(max_num_queued_reqs=UNLIMITED_QUEUE, step_seconds=BATCH_STEP_SECONDS)


def engine_settings(options: argparse.Namespace) -> dict[str, Any]:
    """The engine's settings, checked. Raises ConfigError. Gives `options` a seed where it has none."""
    settings = engine_values(options)
    resolve(settings)
    options.seed = settings.get("seed") or 0
    return settings


def check_positive(options: argparse.Namespace, *names: str) -> None:
    """Raises ConfigError for a number below 1."""
    for name in names:
        if getattr(options, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1")


def random_ids(llm: LLM) -> Units:
    """Prompts of any token ids that the model takes."""
    return Units(range(llm.llm_engine.front.inputs.num_token_ids))


def warm_up(llm: LLM) -> None:
    """One small request."""
    llm.generate([[1] * 16], SamplingParams(temperature=0.0, max_tokens=4), use_tqdm=False)
