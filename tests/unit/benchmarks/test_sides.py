"""What the benchmarks read from llama.cpp's tool."""

from __future__ import annotations

import pytest
from benchmarks.sides import parse_batched_bench

LINE = '{"pp": 512, "tg": 0, "pl": 2, "t_pp": 0.587042, "t_tg": 0.000000, "speed_tg": -nan, "t": 0.587042}'


def test_a_speed_of_no_steps_is_nothing() -> None:
    result = parse_batched_bench(f"main: n_kv_max = 4096\n\n{LINE}\n")
    assert (result["t"], result["speed_tg"]) == (0.587042, None)


def test_the_last_result_counts() -> None:
    assert parse_batched_bench(f'{{"t": 1.0, "speed_tg": inf}}\n{LINE}')["t"] == 0.587042


def test_no_result_is_an_error() -> None:
    with pytest.raises(ValueError, match="no result"):
        parse_batched_bench("main: n_kv_max = 256\n")
