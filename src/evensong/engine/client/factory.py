"""Which client a front end gets (spec C1): in process or in a core process of its own, blocking or on an event loop."""

from __future__ import annotations

from typing import Literal, overload

from evensong.config.sections import EngineConfig
from evensong.engine.client.base import AsyncCoreClient, SyncCoreClient
from evensong.engine.client.inproc import AsyncInprocClient, InprocClient
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
    return AsyncInprocClient(config) if asyncio_mode else InprocClient(config)
