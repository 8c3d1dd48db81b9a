"""Metrics, percentiles and goodput of records whose figures can be told by hand."""

from __future__ import annotations

import pytest

from evensong.entrypoints.cli.bench.figures import (
    details,
    figures,
    peaks,
    read_metrics,
    read_objectives,
    read_percentiles,
    summarize,
    values_of,
)
from evensong.entrypoints.cli.bench.load import INTERRUPTED, Record
from evensong.protocol.errors import ConfigError

# Seconds that binary fractions hold exactly, so that == can be asked.
FAST = Record(10, 5, start=100.0, ttft=0.25, itl=[0.25] * 4, latency=1.25, text="a")
SLOW = Record(30, 3, start=100.5, queued=0.5, ttft=1.0, itl=[0.5, 0.5], latency=2.0)
SINGLE = Record(1, 1, start=101.0, ttft=0.5, latency=0.5)
FAILED = Record(7, error="400: no")
LOST = Record(7, error=INTERRUPTED)
ALL = [FAST, SLOW, FAILED, SINGLE, LOST]


def test_counts_rates_and_goodput() -> None:
    objectives = {"ttft": 500.0, "tpot": 300.0}
    result = figures(ALL, 4.0, metrics=["ttft"], percentiles=[50], objectives=objectives)
    assert (result["completed"], result["failed"], result["unfinished"]) == (3, 1, 1)
    assert result["first_error"] == "400: no"
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (41, 9)
    assert (result["request_throughput"], result["output_throughput"]) == (0.75, 2.25)
    assert result["total_token_throughput"] == 12.5
    # FAST: 250 ms and 250 ms a token; SLOW misses both; SINGLE has no second token, so only its TTFT counts.
    assert result["request_goodput"] == 0.5
    assert result["median_ttft_ms"] == result["p50_ttft_ms"] == 500.0


def test_a_limit_that_is_met_exactly_is_met() -> None:
    for most, good in ((1250.0, 0.5), (1249.0, 0.25), (2000.0, 0.75)):
        result = figures(ALL, 4.0, metrics=[], percentiles=[], objectives={"e2el": most})
        assert result["request_goodput"] == good


def test_values_are_of_answered_requests_only() -> None:
    assert values_of("tpot", ALL) == [0.25, 0.5]
    assert values_of("itl", ALL) == [0.25] * 4 + [0.5] * 2
    assert values_of("e2el", ALL) == [1.25, 2.0, 0.5]
    assert values_of("client_queue_time", ALL) == [0.0, 0.5, 0.0]
    assert values_of("e2el_including_client_queue", ALL) == [1.25, 2.5, 0.5]


def test_summary_has_vllms_keys_in_milliseconds() -> None:
    found = summarize([0.001, 0.002, 0.003, 0.004], "itl", [25, 99.9])
    assert found == pytest.approx(
        {"mean_itl_ms": 2.5, "median_itl_ms": 2.5, "std_itl_ms": 1.25**0.5, "p25_itl_ms": 1.75, "p99.9_itl_ms": 3.997}
    )


def test_nothing_measured_is_none_not_zero() -> None:
    assert set(summarize([], "ttft", [99]).values()) == {None}
    result = figures([FAILED], 1.0, metrics=["ttft"], percentiles=[99], objectives={"ttft": 1.0})
    assert (result["p99_ttft_ms"], result["max_concurrent_requests"], result["request_goodput"]) == (None, 0, 0.0)


def test_peaks_count_seconds() -> None:
    tokens, running = peaks(ALL)
    # From 100.0: FAST's tokens at .25 .5 .75 1 1.25; SLOW's at 1.5 2 2.5; SINGLE's at 1.5.
    assert tokens == [3, 4, 2] and running == [2, 3, 1]


def test_a_chunk_of_several_tokens_counts_them_all() -> None:
    tokens, _ = peaks([Record(1, 7, start=0.0, ttft=0.5, itl=[0.25, 1.0], latency=1.75)])
    assert sum(tokens) == 7


def test_details_have_one_value_a_request() -> None:
    assert {len(values) for values in details(ALL).values()} == {len(ALL)}


def test_lists_are_read() -> None:
    assert read_metrics("ttft, e2el") == ["ttft", "e2el"]
    assert read_percentiles("50,99.9") == [50.0, 99.9]
    assert read_objectives(["ttft:500", "e2el:1.5"]) == {"ttft": 500.0, "e2el": 1.5}


@pytest.mark.parametrize("words", [["ttft"], ["ttft:x"], ["ttft:-1"], ["ttft:inf"], ["ttft:nan"], ["speed:1"]])
def test_objectives_of_another_form_are_refused(words: list[str]) -> None:
    with pytest.raises(ConfigError, match="--goodput"):
        read_objectives(words)
