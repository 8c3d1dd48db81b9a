"""From flat settings (EngineArgs, flags) to a frozen EngineConfig."""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from evensong.config.foreign import is_foreign
from evensong.config.sections import (
    ENGINE_SECTIONS,
    CacheConfig,
    EngineConfig,
    ParallelConfig,
    SchedulerConfig,
    ServerConfig,
)
from evensong.protocol.errors import ConfigError


class EngineArgs:
    """Flat settings of an engine under vLLM's names: `EngineArgs(model="demo", max_num_seqs=8)`.

    The names, types and defaults are the fields of config/sections.py; vLLM's others may be given where they ask for
    nothing that is not so anyway (config/foreign.py). Raises ConfigError for a name that does not exist, naming the
    nearest, and for a value of the wrong kind.
    """

    def __init__(self, model: str = "demo", **settings: Any) -> None:
        own = {name: value for name, value in settings.items() if not is_foreign(name, value)}
        self.settings: dict[str, Any] = {"model": model, **own}
        self.config = resolve(self.settings)

    def __repr__(self) -> str:
        return f"EngineArgs({', '.join(f'{k}={v!r}' for k, v in self.settings.items())})"

    def create_engine_config(self) -> EngineConfig:
        """The frozen config that these settings describe."""
        return self.config


def resolve(settings: Mapping[str, Any]) -> EngineConfig:
    """The frozen EngineConfig of flat settings; raises ConfigError in one line for any that cannot be used."""
    settings = {_canonical(name): value for name, value in settings.items()}
    owners = {f.name: section for section, cls in ENGINE_SECTIONS.items() for f in dataclasses.fields(cls)}
    for name in settings:
        if name not in owners:
            raise ConfigError(f"there is no setting {name!r}{nearest(name, owners)}")
    sections: dict[str, Any] = {}
    for section, cls in ENGINE_SECTIONS.items():
        own = {name: value for name, value in settings.items() if owners[name] == section}
        sections[section] = build_section(cls, own)
    config = EngineConfig(**sections)
    _check_cache(config.cache)
    _check_scheduler(config.scheduler, config.cache)
    _check_parallel(config.parallel)
    _check_traces(config.observability.otlp_traces_endpoint)
    if config.model.max_model_len != "auto":
        _at_least("max_model_len", config.model.max_model_len, 2)
    _at_least("max_logprobs", config.model.max_logprobs, 0)
    return config


def build_section(cls: type, values: Mapping[str, Any]) -> Any:
    """One section from `values`, each checked against the field's declared type."""
    hints = typing.get_type_hints(cls)
    checked = {name: check_type(name, value, hints[name]) for name, value in values.items()}
    return cls(**checked)


def check_server(config: ServerConfig) -> ServerConfig:
    """`config` unchanged; raises ConfigError for a value that cannot be used."""
    if not 0 <= config.port <= 65535:
        raise ConfigError(f"--port must be in 0..65535, got {config.port}")
    _at_least("max_request_bytes", config.max_request_bytes, 1024)
    _at_least("responses_store_bytes", config.responses_store_bytes, 0)
    _at_least("max_n", config.max_n, 1)
    for name in ("shutdown_timeout", "read_timeout", "stall_timeout", "timeout_keep_alive"):
        seconds = getattr(config, name)
        if not 0 <= seconds <= 86400:
            raise ConfigError(f"--{name.replace('_', '-')} must be in 0..86400 seconds, got {seconds}")
    if any(not key.strip() or key != key.strip() for key in config.api_key):
        raise ConfigError("--api-key must not be empty, nor begin or end with a space")
    if config.ssl_cert_reqs not in (0, 1, 2):
        raise ConfigError(f"--ssl-cert-reqs must be 0, 1 or 2, got {config.ssl_cert_reqs}")
    if config.root_path and (not config.root_path.startswith("/") or config.root_path.endswith("/")):
        raise ConfigError(f"--root-path must begin with / and not end with it, got {config.root_path!r}")
    return config


def read_tenant_weights(text: str | None) -> dict[str, float]:
    """Weights by name, from the setting's JSON. Raises ConfigError."""
    try:
        weights = msgspec.json.decode(text or "{}", type=dict[str, float])
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        raise ConfigError(f"tenant_weights must be a JSON object of names and numbers: {error}") from error
    for name, weight in weights.items():
        if not 1e-3 <= weight <= 1e6:
            raise ConfigError(f"tenant_weights: {name!r:.60} must be in 0.001..1000000, got {weight}")
    return weights


def _check_traces(endpoint: str | None) -> None:
    if endpoint is None:
        return
    if not endpoint.startswith(("http://", "https://")) or not endpoint.partition("://")[2]:
        raise ConfigError(
            f"--otlp-traces-endpoint must be an http(s) URL such as http://host:4318/v1/traces: {endpoint!r}"
        )
    try:
        found = importlib.util.find_spec("opentelemetry.exporter.otlp.proto.http")
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise ConfigError("--otlp-traces-endpoint needs more packages: pip install 'evensong[otel]'")


def nearest(name: str, names: Iterable[str]) -> str:
    """`; did you mean X?` for the closest of `names`, or nothing."""
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def check_type(name: str, value: Any, hint: Any) -> Any:
    """`value` if it is of the declared kind (an int passes for a float); raises ConfigError otherwise."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        options = typing.get_args(hint)
        if any(_matches(value, option) for option in options):
            return value
        raise ConfigError(f"{name} cannot be {value!r}; expected {' or '.join(_shown(o) for o in options)}")
    if origin is tuple and isinstance(value, list):
        value = tuple(value)
    if not _matches(value, hint):
        raise ConfigError(f"{name} cannot be {value!r}; expected {_shown(hint)}")
    return float(value) if hint is float else value


def _matches(value: Any, hint: Any) -> bool:
    if hint is type(None):
        return value is None
    if typing.get_origin(hint) is typing.Literal:
        return value in typing.get_args(hint)
    if typing.get_origin(hint) is tuple:
        return isinstance(value, tuple) and all(_matches(item, typing.get_args(hint)[0]) for item in value)
    if typing.get_origin(hint) is dict:
        return isinstance(value, dict) and all(isinstance(key, str) for key in value)
    if hint is bool:
        return isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return isinstance(value, hint)


def _shown(hint: Any) -> str:
    if hint is type(None):
        return "none"
    if typing.get_origin(hint) is typing.Literal:
        return ", ".join(typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return f"a list of {_shown(typing.get_args(hint)[0])}"
    if typing.get_origin(hint) is dict:
        return "an object with text for keys"
    return str(getattr(hint, "__name__", hint))


def _canonical(name: str) -> str:
    return {"num_gpu_blocks_override": "num_kv_blocks_override"}.get(name, name)


def _at_least(name: str, value: int, low: int) -> None:
    if value < low:
        raise ConfigError(f"{name} must be at least {low}, got {value}")


def _check_cache(cache: CacheConfig) -> None:
    if not 1 <= cache.block_size <= 1024:
        raise ConfigError(f"block_size must be in 1..1024, got {cache.block_size}")
    if cache.num_kv_blocks_override is not None:
        _at_least("num_kv_blocks_override", cache.num_kv_blocks_override, 2)
    if cache.kv_cache_memory_bytes is not None:
        _at_least("kv_cache_memory_bytes", cache.kv_cache_memory_bytes, 1)


def _check_parallel(parallel: ParallelConfig) -> None:
    """What can be said without the model; what it has to give is looked up before workers start."""
    _at_least("tensor_parallel_size", parallel.tensor_parallel_size, 1)
    _at_least("pipeline_parallel_size", parallel.pipeline_parallel_size, 1)
    if parallel.distributed_executor_backend == "uni" and parallel.num_ranks > 1:
        raise ConfigError(
            f"distributed_executor_backend uni has one worker; {parallel.num_ranks} ranks need mp (or auto)"
        )
    if not 0.1 <= parallel.worker_timeout <= 86400:
        raise ConfigError(f"worker_timeout must be in 0.1..86400 seconds, got {parallel.worker_timeout}")
    if parallel.pipeline_layers is not None:
        counts = [word.strip() for word in parallel.pipeline_layers.split(",")]
        if not all(word.isdecimal() and 0 < len(word) < 10 and int(word) for word in counts):
            raise ConfigError(
                f"pipeline_layers must be the number of layers of each stage, such as 18,12: "
                f"{parallel.pipeline_layers!r:.80}"
            )
        if len(counts) != parallel.pipeline_parallel_size:
            raise ConfigError(
                f"pipeline_layers {parallel.pipeline_layers:.80} names {len(counts)} stages; pipeline_parallel_size is "
                f"{parallel.pipeline_parallel_size}"
            )


def _check_scheduler(scheduler: SchedulerConfig, cache: CacheConfig) -> None:
    for name in ("max_num_seqs", "max_num_batched_tokens"):
        value = getattr(scheduler, name)
        if value is not None:
            _at_least(name, value, 1)
    if not 0.01 <= scheduler.step_seconds <= 60:
        raise ConfigError(f"step_seconds must be in 0.01..60, got {scheduler.step_seconds}")
    _at_least("long_prefill_token_threshold", scheduler.long_prefill_token_threshold, 0)
    _at_least("max_num_queued_reqs", scheduler.max_num_queued_reqs, 1)
    if scheduler.max_num_queued_tokens is not None:
        _at_least("max_num_queued_tokens", scheduler.max_num_queued_tokens, 1)
    read_tenant_weights(scheduler.tenant_weights)
    if scheduler.tenant_weights is not None and scheduler.fair_share == "none":
        raise ConfigError("tenant_weights mean nothing without fair_share")
    for name in ("request_timeout", "queue_timeout"):
        seconds = getattr(scheduler, name)
        if seconds is not None and not 0 < seconds <= 1e9:
            raise ConfigError(f"{name} must be above 0 and at most 1e9 seconds, got {seconds}")
