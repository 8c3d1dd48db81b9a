"""FrontEnd: the parts that LLMEngine and AsyncLLM share, put together for one model."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evensong.config.sections import EngineConfig
from evensong.engine.frontend.chat_template import ChatTemplate
from evensong.engine.frontend.detokenizer import TokenTexts
from evensong.engine.frontend.input_processor import InputProcessor
from evensong.engine.frontend.output_processor import OutputProcessor
from evensong.engine.frontend.reasoning import REASONING_FORMATS
from evensong.observe.metrics import EngineMetrics
from evensong.observe.stats_log import StatsLog
from evensong.observe.tracing import make_tracer
from evensong.protocol.errors import ConfigError
from evensong.protocol.kv_spec import Resources
from evensong.sources.generation_config import load_generation_defaults
from evensong.sources.model_config import ModelDescription, load_model_description
from evensong.sources.resolve import resolve_model
from evensong.sources.tokenizer import Tokenizer, load_tokenizer

DEFAULT_MAX_N = 16384


@dataclass(frozen=True)
class ModelFiles:
    """What a front end reads of a model: no weights."""

    tokenizer: Tokenizer
    description: ModelDescription
    # Fields of SamplingParams that hold where a request says nothing.
    sampling_defaults: dict[str, Any] = field(default_factory=dict)


def load_model_files(config: EngineConfig, *, fetched: bool = False, chat_template: str | None = None) -> ModelFiles:
    """Tokenizer and description of the configured model; a file `chat_template` takes the place of its own.

    Where no launcher has `fetched` the model this does, so that the caller's own stderr shows the progress; the core
    then finds it. Raises ConfigError.
    """
    source = resolve_model(config.model.model, revision=config.model.revision, progress=not fetched, fetched=fetched)
    own = config.model
    defaults = load_generation_defaults(source, own.generation_config, own.override_generation_config)
    tokenizer = load_tokenizer(source)
    if chat_template is not None:
        tokenizer.chat_template = read_template(chat_template)
    return ModelFiles(tokenizer, load_model_description(source), defaults)


def read_template(path: str) -> str:
    """The chat template in a file. Raises ConfigError for one that cannot be read, or is no template."""
    try:
        source = Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"the chat template {path!r:.200} cannot be read: {error}") from error
    fault = ChatTemplate(source, {}).error if source else "it is empty"
    if fault is not None:
        raise ConfigError(f"the chat template {path!r:.200} cannot be used: {fault}")
    return source


def served_model_name(config: EngineConfig) -> str:
    """The model's name in the API and in metrics."""
    return config.model.served_model_name or config.model.model


@dataclass(frozen=True)
class FrontEnd:
    """Text to tokens, and tokens to text."""

    inputs: InputProcessor
    outputs: OutputProcessor
    texts: TokenTexts
    sampling_defaults: dict[str, Any]


def make_front_end(
    config: EngineConfig, files: ModelFiles, resources: Resources, *, max_n: int = DEFAULT_MAX_N
) -> FrontEnd:
    """The front end of a core that is ready."""
    inputs = InputProcessor(
        files.tokenizer,
        resources,
        eos_token_ids=files.description.eos_token_ids,
        max_logprobs=config.model.max_logprobs,
        max_n=max_n,
        seed=config.model.seed,
        reasoning=REASONING_FORMATS.get(config.model.reasoning_parser or ""),
    )
    metrics = EngineMetrics(served_model_name(config))
    stats_log = StatsLog(enabled=not config.observability.disable_log_stats)
    tracer = make_tracer(config.observability.otlp_traces_endpoint, served_model_name(config))
    tracer.startup(resources.phases)
    return FrontEnd(
        inputs, OutputProcessor(metrics, stats_log, tracer), TokenTexts(files.tokenizer), files.sampling_defaults
    )
