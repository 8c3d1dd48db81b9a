"""The real core process, with scripted tokens, behind both multiprocess clients."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from evensong.config.resolve import resolve
from evensong.config.sections import EngineConfig
from evensong.engine.client.mp_async import AsyncMPClient
from evensong.engine.client.mp_sync import SyncMPClient
from evensong.engine.launch import Launch
from evensong.engine.launch_handshake import OnChange
from evensong.engine.launch_table import ProcessRow
from evensong.protocol.errors import ConfigError, EngineDeadError, RequestError
from evensong.protocol.output import EngineCoreOutput, FinishReason
from evensong.protocol.request import EngineCoreRequest
from evensong.protocol.sampling_params import SamplingParams
from evensong.protocol.wire import MessageType, Stamp, engine_identity
from evensong.testing.fake_executor import scripted_token
from tests.engine.launching import SHORT, eventually, running

LAUNCHER = "tests.engine.test_core_process:open_scripted"
CONFIG = resolve({"model": "demo", "num_kv_blocks_override": 64, "max_model_len": 512})
TABLE = {"core": ProcessRow("core", "evensong:core-{index}", "tests.engine.scripted_core")}


def open_scripted(config: EngineConfig, on_change: OnChange) -> Launch:
    return Launch(config, on_change, table=TABLE, limits=SHORT)


def ask(request_id: str, prompt: list[int], max_tokens: int = 8) -> EngineCoreRequest:
    params = SamplingParams(seed=1, max_tokens=max_tokens, ignore_eos=True)
    return EngineCoreRequest(request_id, prompt, params, arrival_time=time.time())


def expected(prompt: list[int], max_tokens: int = 8) -> list[int]:
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(scripted_token(tokens))
    return tokens[len(prompt) :]


@pytest.fixture
def client() -> Iterator[SyncMPClient]:
    made = SyncMPClient(CONFIG, LAUNCHER)
    yield made
    made.shutdown()


def collect(client: SyncMPClient, request_ids: set[str]) -> dict[str, list[EngineCoreOutput]]:
    """Every output of these requests, until all have ended."""
    got: dict[str, list[EngineCoreOutput]] = {request_id: [] for request_id in request_ids}
    open_ids = set(request_ids)
    while open_ids:
        message = client.get_output()
        for admission in message.admissions:
            if admission.refusal is not None:
                open_ids.discard(admission.request_id)
        for output in message.outputs:
            got.setdefault(output.request_id, []).append(output)
            if output.finish_reason is not None:
                open_ids.discard(output.request_id)
    return got


def pid_of_core(client: SyncMPClient | AsyncMPClient) -> int:
    background = client._background if isinstance(client, AsyncMPClient) else client._finalizer.peek()[1]
    assert background is not None
    return int(next(iter(background.launch.pids.values())))


def test_many_requests_get_their_own_tokens(client: SyncMPClient) -> None:
    prompts = {f"r{n}": [100 + n, 200, 300] for n in range(30)}
    for request_id, prompt in prompts.items():
        client.add_request(ask(request_id, prompt))
    got = collect(client, set(prompts))
    for request_id, prompt in prompts.items():
        tokens = [token for output in got[request_id] for token in output.new_token_ids]
        assert tokens == expected(prompt), request_id
        assert got[request_id][-1].finish_reason is FinishReason.LENGTH
    title = Path(f"/proc/{pid_of_core(client)}/cmdline").read_bytes().rstrip(b"\0")
    assert title == b"evensong:core-0"
    maps = Path(f"/proc/{pid_of_core(client)}/maps").read_text()
    assert "libtorch" not in maps, "the core itself needs no torch"


def test_verbs_answer_and_their_errors_reach_the_caller_alone(client: SyncMPClient) -> None:
    assert client.call_utility("is_scheduler_empty") is True
    assert client.call_utility("get_supported_tasks") == ["generate"]
    assert client.call_utility("reset_prefix_cache") is True
    with pytest.raises(RequestError, match="no_such_method"):
        client.call_utility("collective_rpc", 5.0, method="no_such_method", args=[])
    with pytest.raises(RequestError, match="no arguments"):
        client.call_utility("collective_rpc", 5.0, method="describe", args=[1])
    client.add_request(ask("after", [1, 2]))
    assert collect(client, {"after"})["after"][-1].finish_reason is FinishReason.LENGTH


def test_messages_that_cannot_be_decoded_do_not_end_the_core(client: SyncMPClient) -> None:
    stamp = client._channel._stamp
    foreign = Stamp(b"x" * 16, 0, 1)
    identity = engine_identity(0)
    client._send([identity, foreign.header(MessageType.ADD), b"\xc0"])
    client._send([identity, b"short", b"\xc0"])
    client._send([identity, stamp.header(MessageType.ADD), b"\xc1"])
    client._send([identity, stamp.header(MessageType.READY), b"\xc0"])
    broken = msgspec.msgpack.encode(["bad", "a string, not a list of ids", {}])
    client._send([identity, stamp.header(MessageType.ADD), broken])
    message = client.get_output()
    while not message.admissions:
        message = client.get_output()
    (admission,) = message.admissions
    assert admission.request_id == "bad" and admission.refusal is not None and admission.refusal.status == 400
    client.add_request(ask("good", [5]))
    assert [o.request_id for o in collect(client, {"good"})["good"]][-1] == "good"


def test_aborts_end_requests_and_leave_no_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCRIPTED_CORE", json.dumps({"step_seconds": 0.002}))
    client = SyncMPClient(CONFIG, LAUNCHER)
    try:
        for n in range(20):
            client.add_request(ask(f"r{n}", [n + 1, 7], max_tokens=400))
        client.abort_requests([f"r{n}" for n in range(20)])
        assert eventually(lambda: client.call_utility("is_scheduler_empty", 5.0))
        counts = client.call_utility("check_kv_cache")
        assert counts["owned"] == 0, counts
    finally:
        client.shutdown()


def test_a_failing_step_is_the_last_word_of_the_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCRIPTED_CORE", json.dumps({"fail_at_step": 3}))
    client = SyncMPClient(CONFIG, LAUNCHER)
    pid = pid_of_core(client)
    try:
        client.add_request(ask("r", [1, 2]))
        begin = time.monotonic()
        with pytest.raises(EngineDeadError, match="the fake worker fails at step 3"):
            while True:
                client.get_output()
        assert time.monotonic() - begin < 2.0
        assert eventually(lambda: not running(pid), 3.0)
    finally:
        client.shutdown()


def test_a_killed_core_fails_streams_and_verbs_within_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCRIPTED_CORE", json.dumps({"step_seconds": 0.05}))

    async def scene() -> None:
        client = AsyncMPClient.launch(CONFIG, LAUNCHER)
        try:
            for n in range(4):
                await client.add_request(ask(f"r{n}", [n + 1], max_tokens=500))
            assert (await client.get_output()).admissions

            async def stream() -> None:
                while True:
                    await client.get_output()

            waiters = [asyncio.create_task(stream()) for _ in range(3)]
            await asyncio.sleep(0.2)
            begin = time.monotonic()
            client._background.launch._children["core", 0].kill()  # type: ignore[union-attr]
            ends = await asyncio.wait_for(asyncio.gather(*waiters, return_exceptions=True), 2)
            assert time.monotonic() - begin < 1.0
            assert all(isinstance(end, EngineDeadError) for end in ends)
        finally:
            client.shutdown()

    asyncio.run(scene())


def test_settings_that_do_not_fit_are_the_users_mistake() -> None:
    config = resolve({"model": "demo", "num_kv_blocks_override": 2, "max_model_len": 4096})
    with pytest.raises(ConfigError):
        SyncMPClient(config, LAUNCHER)


def test_closing_lets_running_requests_end_in_the_time_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCRIPTED_CORE", json.dumps({"step_seconds": 0.01}))
    launch_closed = threading.Event()
    client = SyncMPClient(CONFIG, LAUNCHER)
    try:
        client.add_request(ask("r", [1], max_tokens=40))
        # Only then does it run: the stop takes another way, and may come before the request does.
        assert [admission.refusal for admission in client.get_output().admissions] == [None]
        launch = client._finalizer.peek()[1].launch  # type: ignore[index]
        threading.Thread(target=lambda: (launch.close(5.0), launch_closed.set())).start()
        tokens: list[int] = []
        finish = None
        while finish is None:
            for output in client.get_output().outputs:
                tokens += output.new_token_ids
                finish = output.finish_reason
        assert finish is FinishReason.LENGTH
        assert tokens == expected([1], 40)
        assert launch_closed.wait(3.0)
    finally:
        client.shutdown()


def test_a_stranger_on_the_sockets_disturbs_nobody(client: SyncMPClient, sockets_base: Path) -> None:
    folder = next(sockets_base.iterdir())
    with zmq.Context() as context, context.socket(zmq.PUSH) as push, context.socket(zmq.DEALER) as dealer:
        push.connect(f"ipc://{folder}/outputs-0")
        dealer.connect(f"ipc://{folder}/handshake")
        for n in range(200):
            push.send_multipart([bytes([n]) * 28, b"\xc0"])
            dealer.send_multipart([bytes([n]) * 28, b"\xc0"])
        client.add_request(ask("r", [3]))
        tokens = [t for output in collect(client, {"r"})["r"] for t in output.new_token_ids]
        assert tokens == expected([3])
        assert eventually(lambda: client.num_dropped == 200)
