"""FrontEnd: the parts that LLMEngine and AsyncLLM share, put together for one model."""

from __future__ import annotations

from dataclasses import dataclass

from evensong.config.sections import EngineConfig
from evensong.engine.frontend.detokenizer import TokenTexts
from evensong.engine.frontend.input_processor import InputProcessor
from evensong.engine.frontend.output_processor import OutputProcessor
from evensong.observe.metrics import EngineMetrics
from evensong.observe.stats_log import StatsLog
from evensong.observe.tracing import make_tracer
from evensong.protocol.kv_spec import Resources
from evensong.sources.model_config import ModelDescription, load_model_description
from evensong.sources.resolve import resolve_model
from evensong.sources.tokenizer import Tokenizer, load_tokenizer

DEFAULT_MAX_N = 16384


@dataclass(frozen=True)
class ModelFiles:
    """What a front end reads of a model: no weights."""

    tokenizer: Tokenizer
    description: ModelDescription


def load_model_files(config: EngineConfig) -> ModelFiles:
    """Tokenizer and description of the configured model. Raises ConfigError."""
    source = resolve_model(config.model.model, progress=False)
    return ModelFiles(load_tokenizer(source), load_model_description(source))


def served_model_name(config: EngineConfig) -> str:
    """The model's name in the API and in metrics."""
    return config.model.served_model_name or config.model.model


@dataclass(frozen=True)
class FrontEnd:
    """Text to tokens, and tokens to text."""

    inputs: InputProcessor
    outputs: OutputProcessor
    texts: TokenTexts


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
    )
    metrics = EngineMetrics(served_model_name(config))
    stats_log = StatsLog(enabled=not config.observability.disable_log_stats)
    tracer = make_tracer(config.observability.otlp_traces_endpoint, served_model_name(config))
    tracer.startup(resources.phases)
    return FrontEnd(inputs, OutputProcessor(metrics, stats_log, tracer), TokenTexts(files.tokenizer))
