"""RankGroup: the processes of all ranks of a replica. Started together, heard together, ended together.

Plans and calls go out by one ring that every rank reads; each rank answers by a ring of its own, and rings the core's
doorbell. All memory is anonymous and all descriptors are inherited: when the last process is gone, nothing is left.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec

from evensong.config.sections import EngineConfig
from evensong.distributed.grid import RankGrid
from evensong.executor.placement import Place, place_ranks
from evensong.executor.uniproc import limit_spinning
from evensong.protocol.errors import EngineStartError
from evensong.protocol.ranks import Fault, FromRank, Reply, ToRanks, WorkerOrders, error_of
from evensong.protocol.step import ModelOutput
from evensong.utils.child import Child, NoChildError
from evensong.utils.doorbell import Doorbell, anonymous_memory
from evensong.utils.progress import ProgressPage, make_page
from evensong.utils.shm_ring import RING_BYTES, RingClosed, RingReader, RingWriter, make_ring

MODULE = "evensong.worker.process"
# Worker and core look at each other's progress this often while they wait.
SLICE_SECONDS = 0.25
PING_SECONDS = 0.3
# A core that ends gives its workers less than it is given itself.
EXIT_SECONDS = 1.5


class RankProcess:
    """One rank: its process, what it says, how far it is."""

    def __init__(self, index: int, child: Child, answers: RingReader, page: ProgressPage | None) -> None:
        self.index = index
        self.child = child
        self.answers = answers
        self.page = page
        self.ready = False
        self.fault: Fault | None = None
        self._seen = 0

    def moved(self) -> bool:
        """Whether its steps came forward since the last call."""
        if self.page is None:
            return False
        seen, self._seen = self._seen, self.page.num_ticks
        return seen != self._seen


class RankGroup:
    """Construction starts every process and waits until each has loaded its weights.

    Raises what a rank raises, as it says it; ConfigError where there is no place; EngineStartError. All calls but
    `fail` are for one thread. `on_failure(reason)` is called once, from any thread.
    """

    def __init__(
        self, config: EngineConfig, worker_class: str, replica: int, on_failure: Callable[[str], None]
    ) -> None:
        parallel = config.parallel
        self.grid = RankGrid(parallel.tensor_parallel_size, parallel.pipeline_parallel_size)
        self.outputs: deque[ModelOutput] = deque()
        self.replies: dict[tuple[int, int], Reply] = {}
        self.ranks: list[RankProcess] = []
        self._replica = replica
        self._seconds = parallel.worker_timeout
        self._on_failure = on_failure
        self._failure: Callable[[], Exception] | None = None
        self._closing = False
        # Held while answers are read, or a failure is noted: the core's thread and those that watch the processes.
        self._lock = threading.Lock()
        self._resources = contextlib.ExitStack()
        try:
            self._open(config, worker_class)
            self.wait(lambda: all(rank.ready for rank in self.ranks), None)
        except BaseException:
            self.close()
            raise

    # ---- out

    def send(self, kind: ToRanks, record: Any = None) -> None:
        """To every rank. Raises what the ranks died of, and TimeoutError when one has long read nothing."""
        self._raise_failure()
        self._encoder.encode_into(record, self._buffer, 1)
        self._buffer[0] = kind
        try:
            self._plans.send(self._buffer, self._seconds)
        except TimeoutError:
            self.time_out(self._seconds)
        except RingClosed:
            self._raise_failure()
            raise

    # ---- in

    def wait(self, ready: Callable[[], bool], seconds: float | None, tick: Callable[[], None] | None = None) -> bool:
        """Reads answers until `ready`; False after `seconds`. `tick` is called now and then while a rank moves.

        Raises what the ranks died of.
        """
        until = None if seconds is None else time.monotonic() + seconds
        while True:
            self._read()
            if ready():
                return True
            self._raise_failure()
            left = SLICE_SECONDS if until is None else min(until - time.monotonic(), SLICE_SECONDS)
            if left <= 0:
                return False
            if self._doorbell.wait(left):
                continue
            # All of them are asked, so that none is seen moving for what it did long ago.
            moved = [rank.moved() for rank in self.ranks]
            if any(moved) and tick is not None:
                tick()

    def time_out(self, seconds: float) -> None:
        """A rank took longer than it may: all of them end. Raises TimeoutError, which names it."""
        late = self._hanging() or [self.grid.output_rank]
        names = " and ".join(f"rank {index}" for index in late)
        message = f"{names} did not answer in {seconds:g} s (--worker-timeout)"
        self.fail(lambda: TimeoutError(message))
        self._raise_failure()

    def _hanging(self) -> list[int]:
        """Ranks that do not even read. Others may wait for them, and still do."""
        with contextlib.suppress(TimeoutError, RingClosed):
            self._plans.send(bytes([ToRanks.PING]), PING_SECONDS)
        until = time.monotonic() + PING_SECONDS
        while self._plans.unread() and time.monotonic() < until:
            time.sleep(PING_SECONDS / 100)
        return self._plans.unread()

    def fail(self, make_error: Callable[[], Exception]) -> None:
        """Nothing runs any more, for this reason; the first one counts. Whoever waits is woken, every process ends."""
        with self._lock:
            if self._failure is not None or self._closing:
                return
            self._failure = make_error
            self._plans.close()
            self._doorbell.ring()
        self._on_failure(str(make_error()))
        for rank in self.ranks:
            rank.child.kill()

    def close(self) -> None:
        """Ends every process, within EXIT_SECONDS where it answers; safe to call twice."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
        until = time.monotonic() + EXIT_SECONDS
        if self.ranks and self._failure is None and all(rank.ready for rank in self.ranks):
            with contextlib.suppress(Exception):
                self._buffer[:] = bytes([ToRanks.END])
                self._plans.send(self._buffer, EXIT_SECONDS / 2)
            for rank in self.ranks:
                rank.child.join(until - time.monotonic())
        for rank in self.ranks:
            rank.child.kill()
        for rank in self.ranks:
            rank.child.join(EXIT_SECONDS)
            rank.child.release()
        self._resources.close()

    # ---- within

    def _open(self, config: EngineConfig, worker_class: str) -> None:
        limit_spinning()  # of torch's threads in the workers, which inherit it
        places = place_ranks(config.model.device, self.grid.num_ranks)
        keep = self._resources.enter_context
        bells = [keep(contextlib.closing(Doorbell())) for _ in places]
        self._doorbell = keep(contextlib.closing(Doorbell()))
        self._encoder, self._buffer = msgspec.msgpack.Encoder(), bytearray()
        plans_fd = self._owned(make_ring("plans", RING_BYTES))
        links_fd = self._owned(anonymous_memory("links", 0)) if len(places) > 1 else None
        # A rank that cannot get rid of an answer reads no plans.
        self._plans = RingWriter(plans_fd, bells, self._read)
        self._resources.callback(self._plans.release)
        for index, (place, bell) in enumerate(zip(places, bells, strict=True)):
            self._start(index, config, worker_class, place, bell, plans_fd, links_fd)

    def _start(
        self,
        index: int,
        config: EngineConfig,
        worker_class: str,
        place: Place,
        bell: Doorbell,
        plans_fd: int,
        links_fd: int | None,
    ) -> None:
        answers_fd, page_fd = self._owned(make_ring("answers", RING_BYTES)), self._owned(make_page())
        orders = WorkerOrders(
            config=msgspec.Raw(msgspec.msgpack.encode(config if index == 0 else _quiet(config))),
            worker_class=worker_class,
            title=f"worker-{self._replica}.{index}",
            rank=index,
            tensor_parallel_size=self.grid.tensor_parallel_size,
            pipeline_parallel_size=self.grid.pipeline_parallel_size,
            plans_fd=plans_fd,
            answers_fd=answers_fd,
            doorbell=bell.fds,
            core_doorbell=self._doorbell.fds,
            progress_fd=page_fd,
            links_fd=links_fd,
            processors=place.processors,
            of_main_thread=threading.current_thread() is threading.main_thread(),
        )
        fds = {plans_fd, answers_fd, page_fd, *bell.fds, *self._doorbell.fds}
        fds |= set() if links_fd is None else {links_fd}
        try:
            child = Child(
                f"evensong:{orders.title}",
                MODULE,
                msgspec.msgpack.encode(orders),
                lambda _: self._ended(index),
                pass_fds=sorted(fd for fd in fds if fd >= 0),
                variables=place.variables,
                own_session=False,
            )
        except NoChildError as error:
            raise EngineStartError(str(error)) from error
        reader = RingReader(answers_fd)
        self._resources.callback(reader.release)
        page = None if page_fd < 0 else ProgressPage(page_fd)
        if page is not None:
            self._resources.callback(page.close)
        with self._lock:
            self.ranks.append(RankProcess(index, child, reader, page))
        if not child.alive:
            # It may have gone before anybody knew it.
            self._ended(index)

    def _owned(self, fd: int) -> int:
        if fd >= 0:
            self._resources.callback(os.close, fd)
        return fd

    def _read(self) -> None:
        """Takes what the ranks have written."""
        with self._lock:
            for rank in self.ranks:
                self._read_from(rank)

    def _read_from(self, rank: RankProcess) -> None:
        while (message := rank.answers.receive()) is not None:
            self._take(rank, message[0], memoryview(message)[1:])

    def _take(self, rank: RankProcess, kind: int, body: memoryview) -> None:
        if kind == FromRank.OUTPUT:
            self.outputs.append(_OUTPUTS.decode(body))
        elif kind == FromRank.REPLY:
            reply = _REPLIES.decode(body)
            # Its result lies in the ring.
            reply.result = msgspec.Raw(bytes(reply.result))
            self.replies[reply.call_id, rank.index] = reply
        elif kind == FromRank.READY:
            rank.ready = True
        elif kind == FromRank.FAILED:
            rank.fault = _FAULTS.decode(body)

    def _ended(self, index: int) -> None:
        """A process has ended: in the thread that watched it."""
        with self._lock:
            if self._closing or index >= len(self.ranks):
                return
            rank = self.ranks[index]
            self._read_from(rank)
            fault, started = rank.fault, all(other.ready for other in self.ranks)
        place = f"rank {index}" if self.grid.num_ranks > 1 else ""
        if fault is not None:
            found = fault
            # What a user got wrong is said as it is.
            self.fail(lambda: error_of(found, place))
            return
        ending = rank.child.ending()
        message = f"worker {self._replica}.{index} {'ended with ' if ending.startswith('exit') else ''}{ending}"
        self.fail(lambda: RuntimeError(message) if started else EngineStartError(message))

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure()


_OUTPUTS = msgspec.msgpack.Decoder(ModelOutput)
_REPLIES = msgspec.msgpack.Decoder(Reply)
_FAULTS = msgspec.msgpack.Decoder(Fault)


def _quiet(config: EngineConfig) -> EngineConfig:
    """One rank's progress bar is enough."""
    return replace(config, observability=replace(config.observability, use_tqdm_on_load=False))
