"""AsyncMPClient: calls to a core in a process of its own, on one event loop, for AsyncLLM."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import weakref
from collections.abc import Callable
from typing import Any

import zmq

from evensong.config.sections import EngineConfig
from evensong.engine.client.base import AsyncCoreClient
from evensong.engine.client.mp_channel import (
    CLIENT_INCARNATION,
    DEFAULT_UTILITY_SECONDS,
    ENGINE_INDEX,
    IO_THREADS,
    LAUNCHER,
    ClientInbox,
    CoreChannel,
    CoreLaunch,
    again,
    bind,
    open_launch,
    utility_args,
)
from evensong.engine.client.resources import BackgroundResources
from evensong.protocol.errors import EngineDeadError, EngineStartError, EvensongError
from evensong.protocol.handshake import ClientAddress, Membership
from evensong.protocol.kv_spec import Resources
from evensong.protocol.output import EngineCoreOutputs
from evensong.protocol.request import EngineCoreRequest
from evensong.protocol.wire import Stamp

RETRY_SECONDS = 0.01
# Messages that are read in a row before others on the loop get their turn.
MOST_IN_A_ROW = 16


class AsyncInbox(ClientInbox):
    """The inbox of an AsyncMPClient: waiters live on one loop, once it is known."""

    def __init__(self, channel: CoreChannel | None = None) -> None:
        super().__init__()
        self.channel = channel
        self.resources: Resources | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._outputs: asyncio.Queue[EngineCoreOutputs | EngineDeadError] = asyncio.Queue()

    async def get(self) -> EngineCoreOutputs:
        """The next outputs; raises EngineDeadError after the last ones."""
        item = await self._outputs.get()
        if isinstance(item, EngineDeadError):
            # Stays for whoever asks next.
            self._outputs.put_nowait(item)
            raise again(item)
        return item

    def update(self, membership: Membership, fault: EvensongError | None = None) -> None:
        """What the launcher knows, from any thread."""
        for member in membership.members:
            if member.index == ENGINE_INDEX:
                if self.channel is not None:
                    self.channel.incarnation = member.incarnation
                self.resources = member.resources or self.resources
        super().update(membership, fault)

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """From now on waiters live on `loop`."""
        with self._lock:
            self._loop = loop

    def _put(self, item: EngineCoreOutputs | EngineDeadError) -> None:
        if self._loop is None or not isinstance(item, EngineDeadError):
            self._outputs.put_nowait(item)
        else:
            # A closed loop has no waiters left.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._outputs.put_nowait, item)


class Arrivals:
    """Calls `take` on a loop for each message of a socket, without the task and the futures of zmq.asyncio.

    The socket's descriptor tells of changes only, so the socket is read until it is empty, and must be read (`read`)
    after each other use of it. What `take` raises, or reading, goes to `failed`, and is the end.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: zmq.Socket[bytes],
        take: Callable[[list[bytes]], None],
        failed: Callable[[Exception], None],
    ) -> None:
        self._loop = loop
        self._socket = sock
        self._take = take
        self._failed = failed
        # A copy: the socket may be closed by another thread, and its number be given to another file.
        self._fd: int | None = os.dup(sock.FD)
        loop.add_reader(self._fd, self.read)
        loop.call_soon(self.read)

    def read(self) -> None:
        """Takes what is there; in several turns of the loop where it is much."""
        if self._fd is None:
            return
        try:
            for _ in range(MOST_IN_A_ROW):
                self._take(self._socket.recv_multipart(zmq.NOBLOCK))
        except zmq.Again:
            return
        except Exception as error:
            self._stop()
            if not self._socket.closed:
                self._failed(error)
        else:
            self._loop.call_soon(self.read)

    def close(self) -> None:
        """From any thread; nothing more is taken."""
        if self._loop.is_closed():
            self._stop()
        else:
            try:
                self._loop.call_soon_threadsafe(self._stop)
            except RuntimeError:  # closed in this moment
                self._stop()

    def _stop(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            if not self._loop.is_closed():
                self._loop.remove_reader(fd)
            os.close(fd)


class AsyncMPClient(AsyncCoreClient):
    """Binds the sockets of `address`, where a core that someone else launched connects.

    Whoever launched it tells `update_membership`; `AsyncMPClient.launch` starts a core of its own. All coroutines
    belong to one event loop. A request that cannot be routed yet waits until the core has connected, or died.
    """

    def __init__(self, address: ClientAddress, stamp: Stamp, inbox: AsyncInbox | None = None) -> None:
        self._channel = CoreChannel(stamp)
        self._inbox = inbox or AsyncInbox()
        self._inbox.channel = self._channel
        self._background = BackgroundResources(self._inbox.fail)
        self._finalizer = weakref.finalize(self, self._background)
        self._unsent: collections.deque[list[bytes]] = collections.deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._greetings: Arrivals | None = None
        try:
            self._background.context = context = zmq.Context(IO_THREADS)
            self._router: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
            bind(self._router, address.requests)
            self._outputs: zmq.Socket[bytes] = context.socket(zmq.PULL)
            bind(self._outputs, address.outputs)
        except BaseException:
            self._finalizer()
            raise

    @classmethod
    def launch(cls, config: EngineConfig, launcher: str = LAUNCHER) -> AsyncMPClient:
        """Starts a core and returns when it is ready (it blocks the thread so long).

        Raises EngineStartError or ConfigError; nothing is left behind then.
        """
        inbox = AsyncInbox()
        launch: CoreLaunch | None = None
        try:
            launch = open_launch(launcher, config, inbox.update)
            client = cls(launch.client, Stamp(launch.token, launch.client.client_index, CLIENT_INCARNATION), inbox)
        except BaseException:
            if launch is not None:
                launch.close()
            raise
        client._background.launch = launch
        try:
            launch.start_core()
            inbox.resources = launch.wait_ready()
        except BaseException:
            client.shutdown()
            raise
        return client

    @property
    def resources(self) -> Resources:
        if self._inbox.resources is None:
            raise EngineStartError("the engine core is still starting")
        return self._inbox.resources

    @property
    def dead_error(self) -> EngineDeadError | None:
        return self._inbox.dead

    @property
    def num_dropped(self) -> int:
        """Messages on the client's sockets that were not its core's."""
        return self._channel.num_dropped

    def update_membership(self, membership: Membership) -> None:
        """What the launcher said last; a core that it calls DEAD fails every waiter."""
        self._inbox.update(membership)

    async def add_request(self, request: EngineCoreRequest) -> None:
        await self._send(self._channel.add(request))

    async def abort_requests(self, request_ids: list[str]) -> None:
        await self._send(self._channel.abort(request_ids))

    async def get_output(self) -> EngineCoreOutputs:
        self._begin_reading()
        return await self._inbox.get()

    async def call_utility(self, verb: str, timeout: float | None = None, /, **args: Any) -> Any:
        raw = utility_args(verb, timeout, args)
        call_id, future = self._inbox.calls.open()
        seconds = DEFAULT_UTILITY_SECONDS if timeout is None else timeout
        try:
            await self._send(self._channel.utility(call_id, verb, raw))
            return await asyncio.wait_for(asyncio.wrap_future(future), seconds)
        except TimeoutError:
            raise TimeoutError(f"{verb} was not answered within {seconds:g} s") from None
        finally:
            self._inbox.calls.forget(call_id)

    def shutdown(self) -> None:
        self._finalizer()

    def _begin_reading(self) -> Arrivals:
        """Reads the sockets on the loop that runs now; they belong to it from then on."""
        if self._greetings is not None:
            return self._greetings
        loop = asyncio.get_running_loop()
        channel, inbox = self._channel, self._inbox
        inbox.attach(loop)

        # What the loop holds knows the inbox and the sockets, never the client: an unused client can be collected.
        def take(frames: list[bytes]) -> None:
            message = channel.read(frames)
            if message is not None:
                inbox.deliver(message)

        def failed(error: Exception) -> None:
            inbox.fail(EngineDeadError(f"the outputs of the engine core cannot be read: {error!r}"))

        arrivals = Arrivals(loop, self._outputs, take, failed)
        self._greetings = greetings = Arrivals(loop, self._router, channel.check, failed)
        tasks = self._tasks
        self._background.stop_tasks = lambda: _stop(loop, tasks, [arrivals, greetings])
        return greetings

    async def _send(self, frames: list[bytes]) -> None:
        if self._inbox.dead is not None:
            raise again(self._inbox.dead)
        greetings = self._begin_reading()
        if self._unsent:
            self._unsent.append(frames)
        elif not _sent(self._router, frames):
            self._unsent.append(frames)
            later = _send_later(self._router, self._unsent, self._inbox, greetings)
            task = asyncio.create_task(later, name="evensong unsent")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        greetings.read()


def _stop(loop: asyncio.AbstractEventLoop, tasks: set[asyncio.Task[None]], arrivals: list[Arrivals]) -> None:
    for one in arrivals:
        one.close()
    if loop.is_closed():
        return
    for task in list(tasks):
        loop.call_soon_threadsafe(task.cancel)


def _sent(router: zmq.Socket[bytes], frames: list[bytes]) -> bool:
    """True when `frames` are on their way, False when the core has not connected."""
    try:
        router.send_multipart(frames, zmq.NOBLOCK)
    except zmq.ZMQError as error:
        if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
            raise
        return False
    return True


async def _send_later(
    router: zmq.Socket[bytes], unsent: collections.deque[list[bytes]], inbox: AsyncInbox, greetings: Arrivals
) -> None:
    """Sends, in order, what could not be routed when it was asked for."""
    while unsent and inbox.dead is None:
        if _sent(router, unsent[0]):
            unsent.popleft()
        else:
            await asyncio.sleep(RETRY_SECONDS)
        greetings.read()
    unsent.clear()
