"""Which client a front end gets (spec C1): in process or in a core process of its own, blocking or on an event loop."""

from __future__ import annotations

import importlib
from typing import Any, Literal, overload

from evensong.config.sections import EngineConfig
from evensong.engine.client.base import AsyncCoreClient, SyncCoreClient
from evensong.engine.client.mp_async import AsyncMPClient
from evensong.engine.client.mp_sync import SyncMPClient


@overload
def make_client(multiprocess_mode: bool, asyncio_mode: Literal[False], config: EngineConfig) -> SyncCoreClient:
    """A blocking client."""


@overload
def make_client(multiprocess_mode: bool, asyncio_mode: Literal[True], config: EngineConfig) -> AsyncCoreClient:
    """A client on an event loop."""


def make_client(multiprocess_mode: bool, asyncio_mode: bool, config: EngineConfig) -> SyncCoreClient | AsyncCoreClient:
    """A client whose core is ready; it blocks until then. Raises ConfigError or EngineStartError in one line."""
    if multiprocess_mode:
        return AsyncMPClient.launch(config) if asyncio_mode else SyncMPClient(config)
    # By name: it brings the whole core along, which a front end of a core in another process does without.
    inproc: Any = importlib.import_module("evensong.engine.client.inproc")
    client: SyncCoreClient | AsyncCoreClient = (
        inproc.AsyncInprocClient(config) if asyncio_mode else inproc.InprocClient(config)
    )
    return client
