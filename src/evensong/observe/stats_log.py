"""The stats line: every 10 s while there is work, nothing when idle."""

from __future__ import annotations

import time
from collections.abc import Callable

from evensong.protocol.stats import SchedulerStats
from evensong.utils.logging import get_logger

logger = get_logger(__name__)

INTERVAL_SECONDS = 10.0


class StatsLog:
    """Collects figures and logs a line when one is due; driven by the messages of the core."""

    def __init__(self, enabled: bool = True, clock: Callable[[], float] = time.monotonic) -> None:
        self._enabled = enabled
        self._clock = clock
        self._since: float | None = None
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._queries = 0
        self._hits = 0
        self._last = SchedulerStats()

    def record(self, prompt_tokens: int, generation_tokens: int, stats: SchedulerStats | None) -> None:
        """Takes what one message brought; logs when the interval is over."""
        if not self._enabled:
            return
        now = self._clock()
        if stats is not None:
            self._last = stats
            self._queries += stats.prefix_cache_queries
            self._hits += stats.prefix_cache_hits
        if self._since is None:
            busy = stats is not None and (stats.num_running or stats.num_waiting)
            if not (prompt_tokens or generation_tokens or busy):
                return
            self._since = now
        self._prompt_tokens += prompt_tokens
        self._generation_tokens += generation_tokens
        if stats is None:
            return
        if now - self._since >= INTERVAL_SECONDS:
            self._log(now - self._since, stats)
        if stats.num_running == 0 and stats.num_waiting == 0:
            self._since = None
            self._prompt_tokens = self._generation_tokens = 0

    def log_now(self) -> None:
        """Logs the interval that has begun, however short; nothing when idle."""
        if self._since is not None:
            self._log(max(self._clock() - self._since, 1e-9), self._last)

    def _log(self, seconds: float, stats: SchedulerStats) -> None:
        logger.info(
            "Engine 000: Avg prompt throughput: %.1f tokens/s, Avg generation throughput: %.1f tokens/s, "
            "Running: %d reqs, Waiting: %d reqs, KV cache usage: %.1f%%, Prefix cache hit rate: %.1f%%",
            self._prompt_tokens / seconds,
            self._generation_tokens / seconds,
            stats.num_running,
            stats.num_waiting,
            100 * stats.kv_cache_usage,
            100 * self._hits / self._queries if self._queries else 0.0,
        )
        self._since = self._clock()
        self._prompt_tokens = self._generation_tokens = 0
