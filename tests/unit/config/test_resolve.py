"""Flat settings to a frozen config: every name, kind and range is checked, in one line."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from evensong.config.resolve import EngineArgs, check_server
from evensong.config.sections import ServerConfig, for_terminal
from evensong.protocol.errors import ConfigError


def test_defaults_and_places() -> None:
    config = EngineArgs().config
    assert (config.model.model, config.model.dtype, config.model.max_model_len) == ("demo", "auto", "auto")
    assert (config.cache.block_size, config.scheduler.max_num_queued_reqs) == (16, 1024)
    given = EngineArgs("m.gguf", max_model_len=64, enable_prefix_caching=False, max_num_seqs=3, log_level="error")
    config = given.create_engine_config()
    assert (config.model.model, config.model.max_model_len) == ("m.gguf", 64)
    assert not config.cache.enable_prefix_caching
    assert (config.scheduler.max_num_seqs, config.observability.log_level) == (3, "error")
    assert repr(given).startswith("EngineArgs(model='m.gguf', max_model_len=64")


def test_the_config_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineArgs().config.cache.block_size = 3  # type: ignore[misc]


def test_vllms_other_name_for_the_pool() -> None:
    assert EngineArgs(num_gpu_blocks_override=9).config.cache.num_kv_blocks_override == 9


def test_an_unknown_name_gets_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"no setting 'max_num_seq'; did you mean 'max_num_seqs'\?"):
        EngineArgs(max_num_seq=4)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("block_size", 0),
        ("block_size", 2048),
        ("block_size", True),
        ("block_size", "16"),
        ("max_model_len", 1),
        ("max_model_len", "long"),
        ("max_logprobs", -1),
        ("max_num_seqs", 0),
        ("max_num_batched_tokens", -1),
        ("long_prefill_token_threshold", -1),
        ("step_seconds", 0),
        ("step_seconds", 100.0),
        ("max_num_queued_reqs", 0),
        ("max_num_queued_tokens", 0),
        ("scheduling_policy", "lifo"),
        ("request_timeout", 0),
        ("queue_timeout", -1.0),
        ("queue_timeout", float("nan")),
        ("fair_share", "everyone"),
        ("tenant_weights", "{"),
        ("tenant_weights", '{"alice": 0}'),
        ("tenant_weights", '{"alice": "much"}'),
        ("tenant_weights", '{"alice": 2}'),  # without fair_share
        ("num_kv_blocks_override", 1),
        ("kv_cache_memory_bytes", 0),
        ("dtype", "float8"),
        ("device", "tpu"),
        ("enable_prefix_caching", 1),
        ("seed", 1.5),
        ("log_level", "loud"),
        ("model", 5),
    ],
)
def test_bad_values(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name) as caught:
        EngineArgs(**{name: value})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "fields", [{"port": -1}, {"port": 65536}, {"max_request_bytes": 10}, {"max_n": 0}, {"shutdown_timeout": -1.0}]
)
def test_bad_server_settings(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="--port|max_request_bytes|max_n|--shutdown-timeout"):
        check_server(ServerConfig(**fields))


def test_a_bar_only_where_somebody_sees_it(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineArgs().config
    monkeypatch.setattr("sys.stderr", None)
    assert for_terminal(config).observability.use_tqdm_on_load is False


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be at least 1"),
        ({"pipeline_parallel_size": -2}, "pipeline_parallel_size must be at least 1"),
        ({"tensor_parallel_size": 2, "distributed_executor_backend": "uni"}, "2 ranks need mp"),
        ({"worker_timeout": 0.0}, r"worker_timeout must be in 0\.1\.\.86400"),
        ({"worker_timeout": float("inf")}, "worker_timeout must be in"),
        ({"worker_timeout": float("nan")}, "worker_timeout must be in"),
        ({"pipeline_layers": "18;12"}, "such as 18,12"),
        ({"pipeline_layers": "18,"}, "such as 18,12"),
        ({"pipeline_layers": "0,30", "pipeline_parallel_size": 2}, "such as 18,12"),
        ({"pipeline_layers": "18,12"}, "names 2 stages; pipeline_parallel_size is 1"),
    ],
)
def test_ranks_that_cannot_be(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        EngineArgs(**settings)


def test_ranks_are_counted() -> None:
    parallel = EngineArgs(tensor_parallel_size=2, pipeline_parallel_size=3, pipeline_layers="9, 9, 12").config.parallel
    assert parallel.num_ranks == 6 and EngineArgs().config.parallel.num_ranks == 1
