"""ServerState: what the HTTP process knows of itself: starting, ready, draining or dead, and the engine."""

from __future__ import annotations

import asyncio
import time

from evensong.config.sections import EngineConfig, ServerConfig
from evensong.engine.async_llm import AsyncLLM
from evensong.engine.frontend.foreign_template import ForeignTemplates
from evensong.engine.frontend.front import served_model_name
from evensong.protocol.errors import RequestError
from evensong.utils.progress import CoreState, ProgressPage

RETRY_AFTER_SECONDS = 1
# What a token may add to the time of one layer. 6000 tokens in one step of a small model, on two cores that others used
# too, took 2.5 ms each (measured); a layer of the largest models is some times slower.
SECONDS_A_TOKEN = 0.01


class ServerState:
    """One for the process; changed on its event loop only."""

    def __init__(self, engine_config: EngineConfig, server_config: ServerConfig, progress: ProgressPage) -> None:
        self.engine_config = engine_config
        self.server_config = server_config
        self.progress = progress
        self.engine: AsyncLLM | None = None
        self.phase = "starting"
        self.draining = False
        self.dead_reason: str | None = None
        self.num_active = 0
        self.started = int(time.time())
        self.foreign_templates = ForeignTemplates()
        self._quiet = asyncio.Event()
        self._quiet.set()

    @property
    def model_name(self) -> str:
        """The one model that is served."""
        return served_model_name(self.engine_config)

    def not_ready(self) -> str | None:
        """Why no work can be taken now; None when it can."""
        if (reason := self.death()) is not None:
            return f"the engine died: {reason}"
        if self.draining:
            return "the server is draining"
        if self.engine is None:
            return f"starting: {self.phase}" if self.phase else "starting"
        return None

    def death(self) -> str | None:
        """Why the engine died; None while it lives. Its own last words come before its process is seen to be gone."""
        if self.engine is not None and self.engine.errored:
            return str(self.engine.dead_error)
        return self.dead_reason

    def held(self) -> str | None:
        """Why work that is taken waits; None when it does not."""
        words = {CoreState.PAUSED: "paused: requests wait for /resume", CoreState.ASLEEP: "asleep: wait for /wake_up"}
        return None if self.engine is None else words.get(self.progress.state)

    def stuck(self) -> str | None:
        """Why the engine does not come forward though it has work; None when it does, or has none."""
        since = None if self.engine is None else self.engine.front.outputs.oldest_arrival
        if since is None or self.held() is not None:
            return None
        # A step may be long: every layer counts as progress, and takes the longer the more tokens it has.
        still = min(self.progress.seconds_still, time.time() - since)
        if still <= self.server_config.stall_timeout + SECONDS_A_TOKEN * self.progress.num_tokens:
            return None
        return f"the engine has work and has not come forward for {still:.0f} s (step {self.progress.num_steps})"

    def require_engine(self, model: str | None = None) -> AsyncLLM:
        """The engine; raises RequestError (503, or 404 for another model's name)."""
        reason = self.not_ready()
        if reason is not None or self.engine is None:
            raise RequestError(
                str(reason), status=503, type="server_error", code="not_ready", retry_after=RETRY_AFTER_SECONDS
            )
        if model is not None and model != self.model_name:
            raise RequestError(
                f"the model {model!r:.200} is not served; this server has {self.model_name!r}",
                status=404,
                type="not_found_error",
                param="model",
                code="model_not_found",
            )
        return self.engine

    def enter(self) -> None:
        """A generation request begins."""
        self.num_active += 1
        self._quiet.clear()

    def leave(self) -> None:
        """A generation request has ended."""
        self.num_active -= 1
        if self.num_active == 0:
            self._quiet.set()

    async def wait_quiet(self, seconds: float) -> bool:
        """Until no generation request is left; False when the time is over first."""
        try:
            await asyncio.wait_for(self._quiet.wait(), seconds)
            return True
        except TimeoutError:
            return False
