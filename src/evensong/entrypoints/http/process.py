"""The process `evensong:http-I`: uvicorn on the inherited socket, answering from its first moment."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import gc
import os
import signal
import socket
import sys
from collections.abc import Iterator

import msgspec
import uvicorn
import zmq
from setproctitle import setproctitle

from evensong.config.sections import EngineConfig, ServerConfig
from evensong.engine.async_llm import AsyncLLM
from evensong.engine.client.mp_async import AsyncMPClient
from evensong.engine.core.handshake import ChildHandshake, begin_child
from evensong.engine.frontend.front import ModelFiles, load_model_files
from evensong.entrypoints.http.app import create_app
from evensong.entrypoints.http.protocol import protocol_class
from evensong.entrypoints.http.state import ServerState
from evensong.protocol.errors import ConfigError, EngineDeadError, EvensongError
from evensong.protocol.handshake import LOADING, Bootstrap, Failed, HttpInit, Membership, Ready
from evensong.protocol.wire import MessageType, Stamp
from evensong.utils.logging import configure_logging, get_logger
from evensong.utils.progress import CoreState, ProgressPage
from evensong.utils.tls import server_context

logger = get_logger(__name__)

USAGE = 2
# Objects that are made before the youngest are looked at: those of about 20 requests.
GC_THRESHOLD = 10_000
# After the drain time what still runs is aborted; its last events get this long to leave.
ABORT_SECONDS = 2.0


class HttpServer(uvicorn.Server):
    """Uvicorn without signal handlers of its own: the launcher decides."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """No handlers."""
        yield


class HttpProcess:
    """One HTTP process's life, on its event loop."""

    def __init__(self, bootstrap: Bootstrap, listener: socket.socket) -> None:
        self._bootstrap = bootstrap
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._inits: asyncio.Queue[HttpInit | None] = asyncio.Queue()
        self._state: ServerState | None = None
        self._server: HttpServer | None = None
        self._client: AsyncMPClient | None = None
        self._early: list[Membership] = []
        self._files: asyncio.Task[ModelFiles] | None = None
        self._engine_task: asyncio.Task[None] | None = None
        self._drain_task: asyncio.Task[None] | None = None
        self._loop.add_signal_handler(signal.SIGTERM, self._exit_now)
        self._handshake = ChildHandshake(bootstrap, self._receive, zmq.Context())

    async def run(self) -> None:
        """Serves until the launcher says stop. The settings come first; until then connections wait in the queue."""
        init = await self._inits.get()
        if init is not None:
            self._state, self._client = self._begin(init)
            self._server = HttpServer(uvicorn_config(self._state))
            for membership in self._early:
                self._update(self._state, self._client, membership)
            await self._server.serve(sockets=[self._listener])
            if self._state.engine is not None:
                self._state.engine.shutdown()
            else:
                self._client.shutdown()
        self._handshake.close()

    def _receive(self, type: MessageType, payload: bytes) -> None:
        """In the handshake's thread."""
        self._loop.call_soon_threadsafe(self._on_message, type, payload)

    def _on_message(self, type: MessageType, payload: bytes) -> None:
        if type is MessageType.INIT:
            self._inits.put_nowait(msgspec.msgpack.decode(payload, type=HttpInit))
        elif type is MessageType.MEMBERSHIP:
            membership = msgspec.msgpack.decode(payload, type=Membership)
            if self._state is None or self._client is None:
                self._early.append(membership)
            else:
                self._update(self._state, self._client, membership)
        elif type is MessageType.SHUTDOWN:
            seconds = msgspec.msgpack.decode(payload, type=float)
            if self._drain_task is None and self._state is not None:
                self._drain_task = self._loop.create_task(self._drain(self._state, seconds))
            elif seconds <= 0 or self._state is None:
                self._exit_now()

    def _begin(self, init: HttpInit) -> tuple[ServerState, AsyncMPClient]:
        config = msgspec.msgpack.decode(init.config, type=EngineConfig)
        server = msgspec.msgpack.decode(init.server, type=ServerConfig)
        logs = config.observability
        configure_logging(logs.log_level, f"http-{self._bootstrap.index}", logs.log_format)
        stamp = Stamp(self._bootstrap.token, init.client.client_index, self._bootstrap.incarnation)
        return ServerState(config, server, ProgressPage(init.progress_fd)), AsyncMPClient(init.client, stamp)

    def _update(self, state: ServerState, client: AsyncMPClient, membership: Membership) -> None:
        state.phase = membership.phase
        state.draining |= membership.draining
        client.update_membership(membership)
        for member in membership.members:
            if member.state == "DEAD":
                state.dead_reason = state.dead_reason or member.reason or "killed"
        ready = any(member.state == "READY" for member in membership.members)
        if self._files is None and (ready or membership.phase == LOADING):
            # The tokenizer is read in a thread, while the core loads and others are answered.
            template = state.server_config.chat_template
            load = functools.partial(load_model_files, state.engine_config, fetched=True, chat_template=template)
            self._files = self._loop.create_task(asyncio.to_thread(load))
        if ready and self._engine_task is None and self._files is not None:
            self._engine_task = self._loop.create_task(self._make_engine(state, client, self._files))

    async def _make_engine(self, state: ServerState, client: AsyncMPClient, files: asyncio.Task[ModelFiles]) -> None:
        """The engine, once the core is ready and the model's files are read."""
        config = state.engine_config
        try:
            state.engine = AsyncLLM(config, client=client, files=await files, max_n=state.server_config.max_n)
        except EvensongError as error:
            self._handshake.send(MessageType.FAILED, Failed(str(error), usage=isinstance(error, ConfigError)))
        else:
            # What start-up made stays: a collection that walks it holds up every stream, for tens of milliseconds. Of
            # what requests make little is ever freed by collections, and looking for it costs a fifth of a request.
            gc.collect()
            gc.freeze()
            gc.set_threshold(GC_THRESHOLD, 10, 10)
            self._handshake.send(MessageType.READY, Ready(client.resources))

    async def _drain(self, state: ServerState, seconds: float) -> None:
        """New work is refused, running work gets `seconds`, then it is aborted; then the process ends.

        A pause ends here, so that what it holds can finish; what a sleeping engine holds is aborted.
        """
        state.draining = True
        engine = state.engine
        held = state.progress.state
        if seconds > 0 and engine is not None and held is CoreState.PAUSED:
            with contextlib.suppress(EvensongError, TimeoutError):
                await engine.call_verb("resume")
        if seconds > 0 and (held is CoreState.ASLEEP or not await state.wait_quiet(seconds)):
            logger.info("drain time is over: %d requests are aborted", state.num_active)
            if engine is not None:
                with contextlib.suppress(EngineDeadError):
                    await engine.abort_everything()
            await state.wait_quiet(ABORT_SECONDS)
        self._exit_now()

    def _exit_now(self) -> None:
        self._inits.put_nowait(None)
        if self._server is not None:
            self._server.should_exit = True
            self._server.force_exit = True


def uvicorn_config(state: ServerState) -> uvicorn.Config:
    """How uvicorn serves the application around `state`."""
    server = state.server_config
    context = server_context(server.ssl_certfile, server.ssl_keyfile, server.ssl_ca_certs, server.ssl_cert_reqs)
    return uvicorn.Config(
        create_app(state),
        http=protocol_class(server.read_timeout),
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        # Whoever connects is the client; what a proxy says of others must open no control route.
        proxy_headers=False,
        timeout_keep_alive=server.timeout_keep_alive,
        ssl_context_factory=None if context is None else lambda config, default: context,
    )


async def _serve(bootstrap: Bootstrap, listener: socket.socket) -> None:
    await HttpProcess(bootstrap, listener).run()


def main(arguments: list[str]) -> int:
    """`python -m evensong.entrypoints.http.process --bootstrap-fd N --listen-fd M`."""
    parser = argparse.ArgumentParser(description="a child process of evensong; start `evensong serve` instead")
    parser.add_argument("--bootstrap-fd", type=int, required=True)
    parser.add_argument("--listen-fd", type=int, required=True)
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the launcher answers Ctrl-C
    bootstrap = begin_child(options.bootstrap_fd)
    setproctitle(f"evensong:http-{bootstrap.index}")
    configure_logging("info", f"http-{bootstrap.index}")
    listener = socket.socket(fileno=options.listen_fd)
    with asyncio.Runner(loop_factory=uvicorn.Config("", log_config=None).get_loop_factory()) as runner:
        runner.run(_serve(bootstrap, listener))
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)
