"""Figures that a core reports with its outputs; only front ends hold a metrics registry."""

from __future__ import annotations

import msgspec


class SchedulerStats(msgspec.Struct, array_like=True, gc=False):
    """State of a scheduler after a step. Gauges are absolute; the rest counts since the last report.

    Prefix-cache figures are in tokens; `kv_cache_usage` is a share of all blocks in [0, 1].
    """

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_preemptions: int = 0
