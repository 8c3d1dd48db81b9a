"""AsyncLLM over a client without a core."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from evensong.config.resolve import resolve
from evensong.engine.async_llm import INLINE_LENGTH, AsyncLLM
from evensong.engine.frontend.front import ModelFiles
from evensong.protocol.errors import EngineDeadError, EvensongError, RequestError
from evensong.protocol.output import EngineCoreOutputs, FinishReason
from evensong.protocol.request import EngineCoreRequest
from evensong.protocol.request_output import RequestOutput
from evensong.protocol.sampling_params import RequestOutputKind, SamplingParams
from evensong.testing.byte_tokenizer import byte_ids, byte_tokenizer, tiny_description
from evensong.testing.fake_client import FakeAsyncClient, tokens

DELTA = RequestOutputKind.DELTA
Body = Callable[[AsyncLLM, FakeAsyncClient], Awaitable[None]]


def run(body: Body, **options: Any) -> None:
    """Runs a test on an engine of its own, with a limit."""

    async def main() -> None:
        client = FakeAsyncClient(**options)
        engine = AsyncLLM(resolve({}), client=client, files=ModelFiles(byte_tokenizer(), tiny_description()))
        try:
            await asyncio.wait_for(body(engine, client), 20)
        finally:
            engine.shutdown()
            await asyncio.sleep(0)

    asyncio.run(main())


async def settle() -> None:
    """Lets everything that can run do so."""
    for _ in range(20):
        await asyncio.sleep(0)


async def collect(engine: AsyncLLM, prompt: Any = "hi", request_id: str = "r", **params: Any) -> list[RequestOutput]:
    settings = SamplingParams(**({"max_tokens": 50} | params))
    return [output async for output in engine.generate(prompt, settings, request_id)]


def test_outputs_until_finished() -> None:
    async def body(engine: AsyncLLM, client: FakeAsyncClient) -> None:
        task = asyncio.create_task(collect(engine, output_kind=DELTA))
        await settle()
        assert engine.is_running and not engine.is_stopped and not engine.errored
        request = client.script.added[0]
        for index, character in enumerate("abc"):
            client.send(tokens(request, index, byte_ids(character)))
            await settle()
        client.send(tokens(request, 3, [1], FinishReason.STOP))
        outputs = await task
        assert [output.outputs[0].text for output in outputs] == ["a", "b", "c", ""]
        assert [output.finished for output in outputs] == [False, False, False, True]
        assert client.script.aborted == []

    run(body)


def test_a_slow_consumer_gets_everything_merged() -> None:
    async def body(engine: AsyncLLM, client: FakeAsyncClient) -> None:
        stream = await engine.start("hi", SamplingParams(output_kind=DELTA, max_tokens=50), "r")
        request = client.script.added[0]
        for index, character in enumerate("abcdef"):
            client.send(tokens(request, index, byte_ids(character)))
        await settle()
        assert (await anext(stream)).outputs[0].text == "abcdef"
        client.send(tokens(request, 6, byte_ids("g"), FinishReason.LENGTH))
        assert (await anext(stream)).finished
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    run(body)


def test_nothing_is_yielded_before_admission_and_a_refusal_is_raised() -> None:
    def refuse(request: EngineCoreRequest) -> RequestError | None:
        return RequestError("queue is full", status=429, retry_after=1)

    async def body(engine: AsyncLLM, client: FakeAsyncClient) -> None:
        with pytest.raises(RequestError) as caught:
            await collect(engine)
        assert (caught.value.status, caught.value.retry_after) == (429, 1)
        assert engine.front.outputs.num_requests == 0

    run(body, refuse=refuse)


def test_no_choice_is_left_behind_by_one_that_was_refused() -> None:
    def refuse(request: EngineCoreRequest) -> RequestError | None:
        return RequestError("full", status=429) if request.request_id.startswith("2_") else None

    async def body(engine: AsyncLLM, client: FakeAsyncClient) -> None:
        with pytest.raises(RequestError):
            await collect(engine, n=8)
        added = {request.request_id for request in client.script.added}
        assert {i for i in added if not i.startswith("2_")} <= set(client.script.aborted)

    run(body, refuse=refuse)


def test_bad_input_never_reaches_the_core() -> None:
    async def body(engine: AsyncLLM, client: FakeAsyncClient) -> None:
        for prompt in ("", [], [-1], "a\ud800", "x" * 10**7, [20] * 10**6):
            with pytest.raises(RequestError):
                await collect(engine, prompt)
        with pytest.raises(RequestError):
            await collect(engine, n=10**6)
        with pytest.raises(RequestError):
            await anext(engine.generate("hi", None, "r"))  # type: ignore[arg-type]
        assert client.script.added == []
        assert engine.front.outputs.num_requests == 0

    run(body)


def test_a_long_prompt_does_not_hold_up_the_loop() -> None:
    async def body(engine: AsyncLLM, client: FakeAsyncClient) -> None:
        task = asyncio.create_task(collect(engine, "x" * (INLINE_LENGTH + 1), max_tokens=1))
        await asyncio.sleep(0)
        assert client.script.added == []  # being processed elsewhere
        while not client.script.added:
            await asyncio.sleep(0.001)
        client.send(tokens(client.script.added[0], 0, [1], FinishReason.STOP))
        await task

    run(body, max_model_len=8192)


@pytest.mark.parametrize("how", ["cancel", "break"])
def test_a_consumer_that_leaves_aborts_its_request(how: str) -> None:
    async def body(engine: AsyncLLM, client: FakeAsyncClient) -> None:
        async def leave() -> None:
            outputs = engine.generate("hi", SamplingParams(max_tokens=50), "r")
            async for _ in outputs:
                break
            await outputs.aclose()

        task = asyncio.create_task(leave() if how == "break" else collect(engine))
        await settle()
        client.send(tokens(client.script.added[0], 0, byte_ids("a")))
        await settle()
        if how == "cancel":
            task.cancel()
        await asyncio.wait([task])
        assert client.script.aborted == [client.script.added[0].request_id]
        assert engine.front.outputs.num_requests == 0
        client.send(tokens(client.script.added[0], 1, byte_ids("b")))  # was on its way
        await settle()
        assert engine.is_running

    run(body)


def test_cancelled_before_admission() -> None:
    async def body(engine: AsyncLLM, client: FakeAsyncClient) -> None:
        engine._ensure_handler()
        task = asyncio.create_task(collect(engine, n=3))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        await settle()
        assert {request.request_id for request in client.script.added} <= set(client.script.aborted)
        assert engine.front.outputs.num_requests == 0

    run(body)


def test_abort_ends_the_stream_with_abort() -> None:
    async def body(engine: AsyncLLM, client: FakeAsyncClient) -> None:
        task = asyncio.create_task(collect(engine, request_id="mine"))
        await settle()
        await engine.abort("nobody")
        await engine.abort("mine")
        outputs = await task
        assert outputs[-1].finished and outputs[-1].outputs[0].finish_reason == "abort"

    run(body)


def test_one_id_twice_at_once() -> None:
    async def body(engine: AsyncLLM, client: FakeAsyncClient) -> None:
        tasks = [asyncio.create_task(collect(engine, request_id="same")) for _ in range(2)]
        await settle()
        for index, request in enumerate(client.script.added):
            client.send(tokens(request, 0, byte_ids(str(index)), FinishReason.LENGTH))
        outputs = await asyncio.gather(*tasks)
        assert [output[-1].outputs[0].text for output in outputs] == ["0", "1"]
        assert {output[-1].request_id for output in outputs} == {"same"}

    run(body)


def test_stop_string_ends_the_request_and_aborts_it_in_the_core() -> None:
    async def body(engine: AsyncLLM, client: FakeAsyncClient) -> None:
        task = asyncio.create_task(collect(engine, stop="b"))
        await settle()
        client.send(tokens(client.script.added[0], 0, byte_ids("abc")))
        outputs = await task
        await settle()
        assert (outputs[-1].outputs[0].text, outputs[-1].outputs[0].stop_reason) == ("a", "b")
        assert client.script.aborted == [client.script.added[0].request_id]

    run(body)


def test_death_reaches_every_waiter_at_once() -> None:
    async def body(engine: AsyncLLM, client: FakeAsyncClient) -> None:
        tasks = [asyncio.create_task(collect(engine, request_id=str(index))) for index in range(20)]
        await settle()
        start = time.perf_counter()
        client.script.die("killed")
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert time.perf_counter() - start < 1
        assert all(isinstance(result, EngineDeadError) for result in results)
        assert engine.errored and engine.is_stopped
        assert "killed" in str(engine.dead_error)
        with pytest.raises(EngineDeadError):
            await engine.check_health()
        with pytest.raises(EngineDeadError):
            await collect(engine)

    run(body)


def test_a_reader_that_fails_leaves_nobody_waiting_and_starts_again() -> None:
    async def body(engine: AsyncLLM, client: FakeAsyncClient) -> None:
        task = asyncio.create_task(collect(engine))
        await settle()
        client.fail(ValueError("a bug"))
        with pytest.raises(EvensongError, match="a bug"):
            await task
        assert not engine.is_running
        await settle()
        assert client.script.aborted == [client.script.added[0].request_id]
        task = asyncio.create_task(collect(engine))
        await settle()
        assert engine.is_running
        client.send(tokens(client.script.added[-1], 0, byte_ids("a"), FinishReason.LENGTH))
        assert (await task)[-1].outputs[0].text == "a"

    run(body)


def test_shutdown_fails_what_runs() -> None:
    async def body(engine: AsyncLLM, client: FakeAsyncClient) -> None:
        task = asyncio.create_task(collect(engine))
        await settle()
        engine.shutdown()
        with pytest.raises(EngineDeadError, match="shut down"):
            await task
        engine.shutdown()
        assert client.num_shutdowns == 1
        assert engine.is_stopped and not engine.errored
        with pytest.raises(EngineDeadError):
            await collect(engine)

    run(body)


def test_verbs_are_awaited() -> None:
    async def body(engine: AsyncLLM, client: FakeAsyncClient) -> None:
        assert await engine.reset_prefix_cache() == "reset_prefix_cache done"  # type: ignore[attr-defined]
        assert engine.is_running
        await engine.check_health()

    run(body)


def test_many_streams_share_the_loop() -> None:
    async def body(engine: AsyncLLM, client: FakeAsyncClient) -> None:
        tasks = [asyncio.create_task(collect(engine, request_id=str(i), output_kind=DELTA)) for i in range(200)]
        await settle()
        added = client.script.added
        for index, character in enumerate("hello"):
            finish = FinishReason.LENGTH if index == 4 else None
            client.send(*(tokens(request, index, byte_ids(character), finish) for request in added))
        for outputs in await asyncio.gather(*tasks):
            assert "".join(output.outputs[0].text for output in outputs) == "hello"
            assert outputs[-1].finished

    run(body)


def test_an_empty_message_is_nothing() -> None:
    async def body(engine: AsyncLLM, client: FakeAsyncClient) -> None:
        engine._ensure_handler()
        client._messages.put_nowait(EngineCoreOutputs())
        await settle()
        assert engine.is_running

    run(body)
