"""The core process seen from its launcher's side of the wire: ready, tokens, the last word, and every way to end."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import zmq

from evensong.config.resolve import resolve
from evensong.protocol.handshake import Bootstrap, ClientAddress, CoreInit, Failed, Ready
from evensong.protocol.output import EngineCoreOutput, EngineCoreOutputs, EngineDeath, FinishReason
from evensong.protocol.request import EngineCoreRequest
from evensong.protocol.sampling_params import SamplingParams
from evensong.protocol.wire import ENGINE_CORE_DEAD, MessageType, Stamp, engine_identity
from evensong.testing.fake_executor import scripted_token

CHILD = textwrap.dedent("""
    import json, os, sys, time
    from evensong.engine.core.process import run_core
    from evensong.testing.fake_executor import FakeExecutor

    def make_executor(config):
        settings = json.loads(sys.argv[2])
        time.sleep(settings.pop("load_seconds", 0))
        return FakeExecutor(**settings)

    os._exit(run_core(int(sys.argv[1]), make_executor))
""")


class Child:
    """A core process whose launcher and only client is this test."""

    def __init__(self, folder: Path, executor: dict[str, Any], **settings: Any) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.shake = self._bind(zmq.ROUTER, f"ipc://{folder}/h")
        self.requests = self._bind(zmq.ROUTER, f"ipc://{folder}/r")
        self.outputs = self._bind(zmq.PULL, f"ipc://{folder}/o")
        self.stamp = Stamp(b"s" * 16, 0, 1)
        read, self.lifeline = os.pipe()
        orders = msgspec.msgpack.encode(Bootstrap(self.stamp.token, f"ipc://{folder}/h", "core", 0, 1))
        os.write(self.lifeline, struct.pack("<I", len(orders)) + orders)
        command = [sys.executable, "-c", CHILD, str(read), json.dumps(executor)]
        self.process = subprocess.Popen(command, pass_fds=[read], stderr=subprocess.DEVNULL)
        os.close(read)
        self.identity, header, _ = self.shake.recv_multipart()
        assert self.stamp.read(header).type is MessageType.HELLO
        config = resolve({"model": "demo", "num_kv_blocks_override": 64, "max_model_len": 512} | settings)
        client = ClientAddress(0, f"ipc://{folder}/r", f"ipc://{folder}/o")
        self.tell(MessageType.INIT, CoreInit(msgspec.Raw(msgspec.msgpack.encode(config)), [client]))

    def _bind(self, kind: int, address: str) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self.context.socket(kind)
        socket.rcvtimeo, socket.linger = 10_000, 0
        socket.bind(address)
        return socket

    def tell(self, type: MessageType, record: Any) -> None:
        self.shake.send_multipart([self.identity, self.stamp.header(type), msgspec.msgpack.encode(record)])

    def hear(self) -> tuple[MessageType, bytes]:
        _, header, payload = self.shake.recv_multipart()
        return self.stamp.read(header).type, payload

    def ready(self) -> Ready:
        type, payload = self.hear()
        assert type is MessageType.READY
        self.requests.recv_multipart()
        return msgspec.msgpack.decode(payload, type=Ready)

    def add(self, request_id: str, max_tokens: int) -> None:
        params = SamplingParams(seed=1, max_tokens=max_tokens, ignore_eos=True)
        payload = msgspec.msgpack.encode(EngineCoreRequest(request_id, [1, 2], params))
        self.requests.send_multipart([engine_identity(0), self.stamp.header(MessageType.ADD), payload])

    def stream(self, request_id: str) -> Iterator[EngineCoreOutput]:
        while True:
            frames = self.outputs.recv_multipart()
            assert self.stamp.read(frames[0]).type is MessageType.OUTPUTS, frames
            for output in msgspec.msgpack.decode(frames[1], type=EngineCoreOutputs).outputs:
                if output.request_id == request_id:
                    yield output
                    if output.finish_reason is not None:
                        return

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        if self.lifeline >= 0:
            os.close(self.lifeline)
        self.context.destroy(linger=0)

    def cut_lifeline(self) -> None:
        os.close(self.lifeline)
        self.lifeline = -1


@pytest.fixture
def child(request: pytest.FixtureRequest, sockets_base: Path) -> Iterator[Child]:
    folder = sockets_base / "child"
    folder.mkdir()
    made = Child(folder, **getattr(request, "param", {"executor": {}}))
    yield made
    made.end()
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


def running_with(**executor: Any) -> Any:
    return pytest.mark.parametrize("child", [{"executor": executor}], indirect=True, ids=["child"])


def test_ready_then_tokens_then_a_drain_with_exit_code_0(child: Child) -> None:
    resources = child.ready().resources
    assert (resources.num_blocks, resources.max_model_len) == (64, 512)
    child.add("r", 30)
    tokens = [1, 2]
    for _ in range(30):
        tokens.append(scripted_token(tokens))
    stream = child.stream("r")
    got = list(next(stream).new_token_ids)
    child.tell(MessageType.SHUTDOWN, 5.0)
    for output in stream:
        got += output.new_token_ids
    assert got == tokens[2:]
    assert child.process.wait(3) == 0


def test_an_idle_core_uses_no_processor_time(child: Child) -> None:
    child.ready()
    process = psutil.Process(child.process.pid)
    time.sleep(0.2)
    before = process.cpu_times()
    time.sleep(1.0)
    after = process.cpu_times()
    assert (after.user + after.system) - (before.user + before.system) <= 0.03


@running_with(fail_at_step=3)
def test_the_last_word_of_a_core_whose_step_fails_says_why(child: Child) -> None:
    child.ready()
    child.add("r", 100)
    while len(frames := child.outputs.recv_multipart()) == 2:
        assert child.stamp.read(frames[0]).type is MessageType.OUTPUTS
    header, mark, payload = frames
    assert child.stamp.read(header).type is MessageType.DEAD and mark == ENGINE_CORE_DEAD
    death = msgspec.msgpack.decode(payload, type=EngineDeath)
    assert (death.engine_index, death.incarnation) == (0, 1) and "the fake worker fails at step 3" in death.reason
    assert child.process.wait(4) == 1


@running_with(step_seconds=0.01)
def test_sigterm_aborts_what_runs_and_exits_with_0(child: Child) -> None:
    child.ready()
    child.add("r", 400)
    stream = child.stream("r")
    next(stream)
    begin = time.monotonic()
    child.process.send_signal(signal.SIGINT)  # ignored
    child.process.terminate()
    assert list(stream)[-1].finish_reason is FinishReason.ABORT
    assert child.process.wait(3) == 0 and time.monotonic() - begin < 2.0


@running_with(step_seconds=0.5)
def test_the_end_of_the_lifeline_ends_a_running_core_at_once(child: Child) -> None:
    child.ready()
    child.add("r", 100)
    time.sleep(0.1)
    begin = time.monotonic()
    child.cut_lifeline()
    assert child.process.wait(3) == 3 and time.monotonic() - begin < 0.4


@running_with(load_seconds=60)
@pytest.mark.parametrize("way", ["lifeline", "sigterm", "shutdown"])
def test_a_loading_core_can_be_ended_at_once(child: Child, way: str) -> None:
    time.sleep(0.1)
    begin = time.monotonic()
    if way == "lifeline":
        child.cut_lifeline()
    elif way == "sigterm":
        child.process.terminate()
    else:
        child.tell(MessageType.SHUTDOWN, 30.0)
    assert child.process.wait(3) == (3 if way == "lifeline" else 0)
    assert time.monotonic() - begin < 1.0


@pytest.mark.parametrize("child", [{"executor": {}, "max_model_len": 4097}], indirect=True, ids=["child"])
def test_a_setting_that_does_not_fit_is_reported_before_the_exit(child: Child) -> None:
    type, payload = child.hear()
    failed = msgspec.msgpack.decode(payload, type=Failed)
    assert type is MessageType.FAILED and failed.usage and "own limit of 4096" in failed.message
    assert child.process.wait(3) == 2


def test_started_by_hand_it_says_what_to_start_instead() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "evensong.engine.core.process"], capture_output=True, text=True, timeout=20
    )
    assert done.returncode == 2 and "evensong serve" in done.stderr
