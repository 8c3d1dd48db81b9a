"""The clients whose core runs in the caller's process, with scripted tokens."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest

from evensong.config.resolve import resolve
from evensong.engine.client.inproc import AsyncInprocClient, InprocClient
from evensong.executor.base import Executor
from evensong.protocol.errors import ConfigError, EngineDeadError, RequestError, UtilityError
from evensong.protocol.output import EngineCoreOutput, FinishReason
from evensong.protocol.request import EngineCoreRequest
from evensong.protocol.sampling_params import SamplingParams
from evensong.testing.fake_executor import FakeExecutor, scripted_token

CONFIG = resolve({"model": "demo", "num_kv_blocks_override": 64, "max_model_len": 256})


def ask(request_id: str, prompt: list[int], max_tokens: int = 4) -> EngineCoreRequest:
    return EngineCoreRequest(request_id, prompt, SamplingParams(seed=1, max_tokens=max_tokens))


def expected(prompt: list[int], max_tokens: int = 4) -> list[int]:
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(scripted_token(tokens))
    return tokens[len(prompt) :]


def tokens_of(outputs: list[EngineCoreOutput], request_id: str) -> list[int]:
    return [token for o in outputs if o.request_id == request_id for token in o.new_token_ids]


@pytest.fixture
def client() -> Iterator[InprocClient]:
    made = InprocClient(CONFIG, lambda _: FakeExecutor())
    yield made
    made.shutdown()


def drain(client: InprocClient) -> list[EngineCoreOutput]:
    outputs: list[EngineCoreOutput] = []
    while not client.call_utility("is_scheduler_empty"):
        outputs += client.get_output().outputs
    return outputs


def test_each_output_is_one_step_and_admission_comes_first(client: InprocClient) -> None:
    client.add_request(ask("a", [1, 2]))
    client.add_request(ask("b", [3]))
    first = client.get_output()
    assert [a.request_id for a in first.admissions] == ["a", "b"] and all(a.refusal is None for a in first.admissions)
    assert [len(o.new_token_ids) for o in first.outputs] == [1, 1]
    assert first.stats is not None and first.stats.num_running == 2
    outputs = first.outputs + drain(client)
    assert tokens_of(outputs, "a") == expected([1, 2]) and tokens_of(outputs, "b") == expected([3])
    assert client.call_utility("check_kv_cache")["owned"] == 0


@pytest.mark.parametrize(("prompt", "status"), [([], 400), ([1] * 300, 400), ([2**40] * 32, 500)])
def test_a_request_that_cannot_be_admitted_is_answered_and_alone(
    client: InprocClient, prompt: list[int], status: int
) -> None:
    client.add_request(ask("bad", prompt))
    client.add_request(ask("good", [7]))
    message = client.get_output()
    refused, admitted = message.admissions
    assert refused.refusal is not None and refused.refusal.status == status and admitted.refusal is None
    assert tokens_of(message.outputs + drain(client), "good") == expected([7])


def test_an_abort_ends_with_a_last_output(client: InprocClient) -> None:
    client.add_request(ask("waits", [1]))
    client.abort_requests(["waits", "unknown"])
    assert [(o.request_id, o.finish_reason) for o in client.get_output().outputs] == [("waits", FinishReason.ABORT)]
    client.add_request(ask("runs", [1], 50))
    client.get_output()
    client.abort_requests(["runs"])
    (last,) = client.get_output().outputs
    assert (last.finish_reason, last.start, last.new_token_ids) == (FinishReason.ABORT, 1, [])
    assert client.call_utility("is_scheduler_empty") and client.call_utility("check_kv_cache")["owned"] == 0


def test_verbs_fail_for_their_caller_alone(client: InprocClient) -> None:
    for verb, args in (("no_such", {}), ("shutdown", {}), ("is_scheduler_empty", {"x": 1})):
        with pytest.raises(UtilityError):
            client.call_utility(verb, **args)
    with pytest.raises(RequestError, match="no_such"):
        client.call_utility("collective_rpc", 1.0, method="no_such")
    assert client.call_utility("collective_rpc", 1.0, method="measure_token_rate") == [4000.0]


def test_a_failed_step_is_the_end() -> None:
    client = InprocClient(CONFIG, lambda _: FakeExecutor(fail_at_step=2))
    client.add_request(ask("a", [1]))
    client.get_output()
    with pytest.raises(EngineDeadError, match="fails at step 2"):
        client.get_output()
    for call in (client.get_output, lambda: client.add_request(ask("b", [1])), lambda: client.abort_requests(["a"])):
        with pytest.raises(EngineDeadError):
            call()
    client.shutdown()
    client.shutdown()


def test_a_start_that_fails_leaves_no_thread() -> None:
    def refuse(_: object) -> Executor:
        raise ConfigError("no such model")

    with pytest.raises(ConfigError, match="no such model"):
        AsyncInprocClient(CONFIG, refuse)
    until = time.monotonic() + 3
    while any(t.name.startswith("core") for t in threading.enumerate()) and time.monotonic() < until:
        time.sleep(0.01)
    assert not [t.name for t in threading.enumerate() if t.name.startswith("core")]


def test_on_an_event_loop_the_step_blocks_nobody() -> None:
    async def scene() -> None:
        client = AsyncInprocClient(CONFIG, lambda _: FakeExecutor(step_seconds=0.05))
        longest, done = 0.0, False

        async def watch() -> None:
            nonlocal longest
            while not done:
                begin = time.monotonic()
                await asyncio.sleep(0.001)
                longest = max(longest, time.monotonic() - begin)

        watching = asyncio.create_task(watch())
        waiting = asyncio.create_task(client.get_output())
        await asyncio.sleep(0.02)
        assert not waiting.done(), "an idle core has nothing to say"
        await client.add_request(ask("a", [5]))
        outputs = (await waiting).outputs
        while not outputs or outputs[-1].finish_reason is None:
            outputs += (await client.get_output()).outputs
        done = True
        await watching
        assert tokens_of(outputs, "a") == expected([5])
        assert longest < 0.045, f"the loop stood still for {longest:.3f} s"
        assert await client.call_utility("get_supported_tasks") == ["generate"]
        client.shutdown()
        assert isinstance(client.dead_error, EngineDeadError)
        with pytest.raises(EngineDeadError):
            await client.get_output()

    asyncio.run(scene())


def test_a_slow_verb_times_out_and_the_client_goes_on() -> None:
    class Slow(FakeExecutor):
        def get_rank(self) -> None:
            time.sleep(0.2)

    async def scene() -> None:
        client = AsyncInprocClient(CONFIG, lambda _: Slow())
        with pytest.raises(TimeoutError):
            await client.call_utility("collective_rpc", 0.02, method="get_rank")
        await client.add_request(ask("a", [5], 1))
        assert tokens_of((await client.get_output()).outputs, "a") == expected([5], 1)
        client.shutdown()

    asyncio.run(scene())
