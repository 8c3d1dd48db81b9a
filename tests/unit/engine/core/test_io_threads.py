"""The IO threads on real sockets: whatever arrives or cannot be sent, both go on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import msgspec
import pytest
import zmq

from evensong.engine.core import io_threads
from evensong.engine.core.inbox import Abort, Add, ClientLost, Inbox, Message, Undecodable, Utility
from evensong.engine.core.io_threads import InputThread, OutputThread
from evensong.protocol.errors import ErrorBody
from evensong.protocol.handshake import ClientAddress
from evensong.protocol.output import Admission, EngineCoreOutput, EngineCoreOutputs, EngineDeath, UtilityReply
from evensong.protocol.request import AbortRequests, UtilityCall
from evensong.protocol.stats import SchedulerStats
from evensong.protocol.wire import ENGINE_CORE_DEAD, MessageType, Stamp, engine_identity, pack
from tests.unit.engine.core.making import STAMP, ask


class Ends:
    """Both threads of a core, and the sockets of two clients."""

    def __init__(self, folder: Path) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.routers, self.pulls, clients = [], [], []
        for index in range(2):
            address = ClientAddress(index, f"ipc://{folder}/requests-{index}", f"ipc://{folder}/outputs-{index}")
            router, pull = self.context.socket(zmq.ROUTER), self.context.socket(zmq.PULL)
            router.bind(address.requests)
            pull.rcvhwm = 10
            pull.bind(address.outputs)
            router.rcvtimeo = pull.rcvtimeo = 5000
            router.linger = 0
            self.routers.append(router)
            self.pulls.append(pull)
            clients.append(address)
        self.inbox: Inbox = Inbox()
        self.aborts: SimpleQueue[list[str]] = SimpleQueue()
        self.output = OutputThread(self.context, clients, STAMP, self.inbox)
        self.input = InputThread(self.context, clients, STAMP, self.inbox, self.aborts)
        for router in self.routers:
            identity, header, _ = router.recv_multipart()
            assert identity == engine_identity(0) and STAMP.read(header).type is MessageType.HELLO

    def send(self, type: MessageType, payload: bytes, client: int = 0, stamp: Stamp = STAMP) -> None:
        self.routers[client].send_multipart([engine_identity(0), stamp.header(type), payload])

    def next(self) -> Message:
        return self.inbox.get(timeout=5)

    def receive(self, client: int) -> EngineCoreOutputs:
        header, payload = self.pulls[client].recv_multipart()
        assert STAMP.read(header).type is MessageType.OUTPUTS
        return msgspec.msgpack.decode(payload, type=EngineCoreOutputs)

    def close(self) -> None:
        self.input.close()
        self.output.close()
        self.context.destroy(linger=0)


@pytest.fixture
def ends(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ends]:
    made = Ends(tmp_path_factory.mktemp("io"))
    yield made
    made.close()


def test_messages_arrive_decoded_with_the_client_whose_socket_brought_them(ends: Ends) -> None:
    ends.send(MessageType.ADD, msgspec.msgpack.encode(ask("r", client_index=0)), client=1)
    add = ends.next()
    assert isinstance(add, Add) and (add.client_index, add.request.client_index) == (1, 1)
    ends.send(MessageType.UTILITY, msgspec.msgpack.encode(UtilityCall(4, 0, "x", pack({}))))
    utility = ends.next()
    assert isinstance(utility, Utility) and utility.call.call_id == 4
    ends.send(MessageType.ABORT, msgspec.msgpack.encode(AbortRequests(["r"])))
    assert ends.next() == Abort(["r"]) and ends.aborts.get(timeout=1) == ["r"]


def test_foreign_frames_are_dropped_and_counted(ends: Ends) -> None:
    identity = engine_identity(0)
    good = msgspec.msgpack.encode(ask("r"))
    ends.send(MessageType.ADD, good, stamp=Stamp(b"x" * 16, 0, 1))
    for frames in ([b""], [b"\x00" * 28, good], [STAMP.header(MessageType.ADD)], [b"", b"", b""]):
        ends.routers[0].send_multipart([identity, *frames])
    ends.send(MessageType.START_DP_WAVE, b"\xc0")
    ends.send(MessageType.ADD, good)
    message = ends.next()
    assert isinstance(message, Add) and message.request.request_id == "r"
    assert ends.input.num_dropped == 5


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x91" * 5000, b"\xdd\xff\xff\xff\xff", b"\xc0", b"\x90"])
def test_garbage_is_undecodable_and_the_thread_lives(ends: Ends, payload: bytes) -> None:
    for type in (MessageType.ADD, MessageType.ABORT, MessageType.UTILITY, MessageType.READY):
        ends.send(type, payload, client=1)
        message = ends.next()
        assert isinstance(message, Undecodable) and message.client_index == 1
        assert (message.request_id, message.call_id) == (None, None)
    ends.send(MessageType.ADD, msgspec.msgpack.encode(ask("r")))
    assert isinstance(ends.next(), Add)


def test_the_sender_of_an_undecodable_message_can_be_answered(ends: Ends) -> None:
    ends.send(MessageType.ADD, msgspec.msgpack.encode(["r", "no list", [], 0, 3]), client=1)
    message = ends.next()
    assert isinstance(message, Undecodable)
    assert (message.client_index, message.request_id, message.attempt) == (1, "r", 3)
    ends.send(MessageType.UTILITY, msgspec.msgpack.encode([9, 0, 5, 5]))
    message = ends.next()
    assert isinstance(message, Undecodable) and message.call_id == 9 and "undecodable" in message.reason
    params = msgspec.msgpack.encode(["bad", [1], [0]])  # n = 0
    ends.send(MessageType.ADD, params)
    message = ends.next()
    assert isinstance(message, Undecodable) and message.request_id == "bad" and "n must be" in message.reason


def test_outputs_go_to_their_client_with_the_cores_name(ends: Ends) -> None:
    ends.output.send(1, EngineCoreOutputs(outputs=[EngineCoreOutput("r", 0, 0, [5])], timestamp=1.0))
    got = ends.receive(1)
    assert (got.engine_index, got.incarnation, got.outputs[0].new_token_ids) == (0, 1, [5])
    ends.output.send(77, EngineCoreOutputs())  # no such client: nobody minds
    ends.output.send_death("why")
    for pull in ends.pulls:
        header, mark, payload = pull.recv_multipart()
        assert STAMP.read(header).type is MessageType.DEAD and mark == ENGINE_CORE_DEAD
        assert msgspec.msgpack.decode(payload, type=EngineDeath).reason == "why"


def admits(name: str) -> EngineCoreOutputs:
    return EngineCoreOutputs(admissions=[Admission(name, 0)])


def test_admissions_in_a_row_go_in_one_message_and_nothing_overtakes() -> None:
    # Not started: what waits in its queue stays there.
    thread = OutputThread.__new__(OutputThread)
    thread._queue = SimpleQueue()
    output, death = EngineCoreOutputs(outputs=[EngineCoreOutput("a", 0, 0, [5])]), EngineDeath(0, 1, "why")
    stats = EngineCoreOutputs(admissions=[Admission("s", 0)], stats=SchedulerStats())
    waiting = [(0, admits("b")), (1, admits("c")), (1, admits("d")), (1, output), (1, output), (1, admits("e"))]
    for item in (*waiting, (1, stats), (1, admits("f")), death, None, (1, admits("too late"))):
        thread._queue.put(item)
    items = thread._with_what_waits((0, admits("a")))
    said = [item if not isinstance(item, tuple) else (item[0], names(item[1])) for item in items]
    assert said == [(0, "ab"), (1, "cd"), (1, ""), (1, ""), (1, "e"), (1, "s"), (1, "f"), death, None]
    assert thread._queue.get_nowait() == (1, admits("too late"))


def names(message: EngineCoreOutputs) -> str:
    return "".join(admission.request_id for admission in message.admissions)


def test_a_burst_arrives_whole_and_in_order(ends: Ends) -> None:
    for number in range(50):
        ends.output.send(0, admits(f"r{number}"))
        ends.output.send(0, admits(f"s{number}"))
        ends.output.send(0, EngineCoreOutputs(outputs=[EngineCoreOutput(f"r{number}", 0, 0, [number])]))
    admitted: list[str] = []
    num_outputs = 0
    while num_outputs < 50:
        message = ends.receive(0)
        admitted += [admission.request_id for admission in message.admissions]
        for output in message.outputs:
            assert output.new_token_ids == [num_outputs] and len(admitted) == 2 * num_outputs + 2
            num_outputs += 1
    assert admitted == [f"{kind}{number}" for number in range(50) for kind in "rs"]


def test_only_what_cannot_be_encoded_becomes_an_error(ends: Ends) -> None:
    good, bad = EngineCoreOutput("good", 0, 0, [5]), EngineCoreOutput("bad", 2, 1, [2**70])
    ends.output.send(0, EngineCoreOutputs(outputs=[good, bad]))
    got = ends.receive(0)
    assert [(o.request_id, o.attempt, o.new_token_ids) for o in got.outputs] == [("good", 0, [5]), ("bad", 2, [])]
    assert got.outputs[0].error is None and got.outputs[1].error is not None and got.outputs[1].error.status == 500
    assert ends.next() == Abort(["bad"])
    ends.output.send(0, EngineCoreOutputs(utility=UtilityReply(6, failure="\ud800")))
    utility = ends.receive(0).utility
    assert utility is not None and utility.call_id == 6 and "cannot be encoded" in str(utility.failure)
    ends.output.send(0, EngineCoreOutputs(admissions=[Admission("r", 0, 0, ErrorBody("\ud800"))]))
    refusal = ends.receive(0).admissions[0].refusal
    assert refusal is not None and refusal.status == 500


def test_a_client_that_never_reads_is_reported_lost_and_blocks_nobody(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(io_threads, "SEND_HIGH_WATER", 10)
    monkeypatch.setattr(io_threads, "MAX_BACKLOG", 50)
    ends = Ends(tmp_path_factory.mktemp("io"))
    try:
        for n in range(100):
            ends.output.send(0, EngineCoreOutputs(outputs=[EngineCoreOutput("deaf", 0, n, [n])]))
        ends.output.send(1, EngineCoreOutputs(outputs=[EngineCoreOutput("hears", 0, 0, [1])]))
        assert ends.receive(1).outputs[0].request_id == "hears"
        assert ends.next() == ClientLost(0) and ends.inbox.empty()
        # If it reads again after all, it is owed nothing less, and can be lost anew.
        assert [ends.receive(0).outputs[0].start for _ in range(100)] == list(range(100))
        time.sleep(0.05)
        for n in range(300):
            ends.output.send(0, EngineCoreOutputs(outputs=[EngineCoreOutput("deaf", 0, n, [n])]))
        assert ends.next() == ClientLost(0) and ends.next() == ClientLost(0)
    finally:
        ends.close()
