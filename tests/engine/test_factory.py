"""The four clients of the factory, with the real model: one request, one answer."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from evensong.config.resolve import resolve
from evensong.engine.client.base import AsyncCoreClient, SyncCoreClient
from evensong.engine.client.factory import make_client
from evensong.engine.client.inproc import AsyncInprocClient
from evensong.engine.client.mp_sync import SyncMPClient
from evensong.protocol.errors import ConfigError
from evensong.protocol.output import EngineCoreOutputs
from evensong.protocol.request import EngineCoreRequest
from evensong.protocol.sampling_params import SamplingParams

PROMPT = [504, 3575, 282, 4649, 314]


def config_for(model: Path):  # type: ignore[no-untyped-def]
    return resolve(
        {"model": str(model), "num_kv_blocks_override": 32, "max_num_batched_tokens": 64, "max_model_len": 256}
    )


def ask(seed: int) -> EngineCoreRequest:
    return EngineCoreRequest(f"r{seed}", list(PROMPT), SamplingParams(seed=seed, max_tokens=8, temperature=0.8))


def take(message: EngineCoreOutputs, tokens: list[int]) -> bool:
    for output in message.outputs:
        tokens += output.new_token_ids
        if output.finish_reason is not None:
            return True
    return False


def blocking(client: SyncCoreClient) -> list[int]:
    tokens: list[int] = []
    try:
        client.add_request(ask(1))
        while not take(client.get_output(), tokens):
            pass
    finally:
        client.shutdown()
    return tokens


async def awaited(client: AsyncCoreClient) -> list[int]:
    tokens: list[int] = []
    try:
        await client.add_request(ask(1))
        while not take(await client.get_output(), tokens):
            pass
    finally:
        client.shutdown()
    return tokens


def test_a_core_of_its_own_and_one_in_process_give_the_same_tokens(demo_model: Path) -> None:
    config = config_for(demo_model)
    client = make_client(True, False, config)
    assert type(client) is SyncMPClient
    tokens = blocking(client)
    other = make_client(False, True, config)
    assert type(other) is AsyncInprocClient
    assert len(tokens) == 8
    assert asyncio.run(awaited(other)) == tokens


def test_each_mode_has_its_client(demo_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    factory = "evensong.engine.client.factory"
    monkeypatch.setattr("evensong.engine.client.inproc.InprocClient", lambda config: made.append("in process"))
    monkeypatch.setattr(f"{factory}.AsyncMPClient.launch", lambda config: made.append("async, own process"))
    make_client(False, False, config_for(demo_model))
    make_client(True, True, config_for(demo_model))
    assert made == ["in process", "async, own process"]


@pytest.mark.parametrize("multiprocess", [True, False])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_model_that_is_not_there_is_refused_before_any_process(multiprocess: bool, asynchronous: bool) -> None:
    with pytest.raises(ConfigError, match="no model '/no/such'"):
        if asynchronous:
            make_client(multiprocess, True, resolve({"model": "/no/such"}))
        else:
            make_client(multiprocess, False, resolve({"model": "/no/such"}))
