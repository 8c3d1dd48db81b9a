"""A line every 10 s while busy, none when idle."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from evensong.observe.stats_log import StatsLog, logger
from evensong.protocol.stats import SchedulerStats

BUSY = SchedulerStats(num_running=2, num_waiting=1, kv_cache_usage=0.125)
IDLE = SchedulerStats()


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def lines() -> Iterator[list[str]]:
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield found
    logger.removeHandler(handler)
    logger.setLevel(level)


def test_a_line_when_the_interval_is_over(lines: list[str]) -> None:
    clock = Clock()
    log = StatsLog(clock=clock)
    log.record(50, 0, BUSY)
    for _ in range(10):
        clock.now += 1
        log.record(0, 20, SchedulerStats(2, 1, 0.125, prefix_cache_queries=10, prefix_cache_hits=5))
    assert len(lines) == 1
    for part in (
        "prompt throughput: 5.0 tokens/s",
        "generation throughput: 20.0 tokens/s",
        "Running: 2 reqs",
        "Waiting: 1 reqs",
        "KV cache usage: 12.5%",
        "hit rate: 50.0%",
    ):
        assert part in lines[0]


def test_nothing_while_idle_and_a_new_interval_with_new_work(lines: list[str]) -> None:
    clock = Clock()
    log = StatsLog(clock=clock)
    log.record(5, 1, BUSY)
    log.record(0, 1, IDLE)
    clock.now += 3600
    log.record(0, 0, IDLE)
    log.record(0, 0, None)
    clock.now += 3600
    log.record(5, 1, BUSY)
    clock.now += 9
    log.record(0, 1, BUSY)
    assert lines == []
    clock.now += 1
    log.record(0, 98, BUSY)
    assert "generation throughput: 10.0 tokens/s" in lines[0]


def test_switched_off(lines: list[str]) -> None:
    clock = Clock()
    log = StatsLog(enabled=False, clock=clock)
    log.record(5, 1, BUSY)
    clock.now += 100
    log.record(5, 1, BUSY)
    assert lines == []


def test_a_line_on_demand(lines: list[str]) -> None:
    clock = Clock()
    log = StatsLog(clock=clock)
    log.log_now()
    assert lines == []
    log.record(0, 10, BUSY)
    clock.now += 2
    log.log_now()
    assert "generation throughput: 5.0 tokens/s" in lines[0]
