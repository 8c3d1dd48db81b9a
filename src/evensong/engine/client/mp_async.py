"""AsyncMPClient: calls to a core in a process of its own, on one event loop, for AsyncLLM."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import weakref
from typing import Any

import zmq
import zmq.asyncio

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
        try:
            self._background.context = context = zmq.asyncio.Context(IO_THREADS)
            self._router = context.socket(zmq.ROUTER)
            bind(self._router, address.requests)
            self._outputs = context.socket(zmq.PULL)
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
        self._run_tasks()
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

    def _run_tasks(self) -> None:
        """Starts the readers on the loop that runs now; the sockets belong to it from then on."""
        if self._tasks:
            return
        loop = asyncio.get_running_loop()
        self._inbox.attach(loop)
        # The tasks know the inbox and the sockets, never the client: an unused client can be collected.
        tasks = [
            loop.create_task(_read_outputs(self._outputs, self._channel, self._inbox), name="evensong outputs"),
            loop.create_task(_read_greetings(self._router, self._channel), name="evensong greetings"),
        ]
        self._tasks.update(tasks)
        all_tasks = self._tasks
        self._background.stop_tasks = lambda: _cancel(loop, all_tasks)

    async def _send(self, frames: list[bytes]) -> None:
        if self._inbox.dead is not None:
            raise again(self._inbox.dead)
        self._run_tasks()
        if self._unsent:
            self._unsent.append(frames)
        elif not await _sent(self._router, frames):
            self._unsent.append(frames)
            task = asyncio.create_task(_send_later(self._router, self._unsent, self._inbox), name="evensong unsent")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)


def _cancel(loop: asyncio.AbstractEventLoop, tasks: set[asyncio.Task[None]]) -> None:
    if loop.is_closed():
        return
    for task in list(tasks):
        loop.call_soon_threadsafe(task.cancel)


async def _sent(router: zmq.asyncio.Socket, frames: list[bytes]) -> bool:
    """True when `frames` are on their way, False when the core has not connected."""
    try:
        await router.send_multipart(frames)
    except zmq.ZMQError as error:
        if error.errno != zmq.EHOSTUNREACH:
            raise
        return False
    return True


async def _read_outputs(outputs: zmq.asyncio.Socket, channel: CoreChannel, inbox: AsyncInbox) -> None:
    try:
        while True:
            message = channel.read(await outputs.recv_multipart())
            if message is not None:
                inbox.deliver(message)
    except asyncio.CancelledError:
        raise
    except Exception as error:
        inbox.fail(EngineDeadError(f"the outputs of the engine core cannot be read: {error!r}"))


async def _read_greetings(router: zmq.asyncio.Socket, channel: CoreChannel) -> None:
    while True:
        channel.check(await router.recv_multipart())


async def _send_later(router: zmq.asyncio.Socket, unsent: collections.deque[list[bytes]], inbox: AsyncInbox) -> None:
    """Sends, in order, what could not be routed when it was asked for."""
    while unsent and inbox.dead is None:
        if await _sent(router, unsent[0]):
            unsent.popleft()
        else:
            await asyncio.sleep(RETRY_SECONDS)
    unsent.clear()
