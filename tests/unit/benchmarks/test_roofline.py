"""The benchmarks' roofline against numbers worked out by hand."""

from __future__ import annotations

from benchmarks.roofline import Phase, Rows, Sizes, Step, phases, seconds, totals, workload_seconds, workload_steps

# 2 layers, 4 query heads on 2 kv heads of 8.
TINY = Sizes(2, 32, 4, 2, 8, 64, 100, tied=True)


def found(step: Step) -> dict[str, Phase]:
    return {phase.name: phase for phase in phases(TINY, step)}


def test_matrices_count_every_weight_once() -> None:
    assert TINY.linears == {"qkv": (32, 64), "output": (32, 32), "gate_up": (32, 128), "down": (64, 32)}
    layer = 2048 + 1024 + 4096 + 2048
    assert TINY.total_weight_bytes == 2 * (2 * layer + 3200)
    untied = Sizes(2, 32, 4, 2, 8, 64, 100, tied=False, weight_bytes=1.0)
    assert untied.total_weight_bytes == 2 * layer + 6400


def test_a_decode_row_reads_its_context() -> None:
    step = found(Step((Rows(9), Rows(4)), 2))  # contexts 10 and 5
    assert step["qkv"] == Phase("qkv", 2 * 2 * 2048, 2 * 2048, 2)
    assert step["down"] == Phase("down", 2 * 2 * 2048, 2 * 2048, 2)
    # 15 keys: 4 heads x 8 x (2 for the score + 2 for the value); 2 heads x 8 x keys and values x 2 bytes
    assert step["attention"] == Phase("attention", 15 * 128, 15 * 64, 2)
    assert step["head"] == Phase("head", 2 * 2 * 3200, 2 * 3200)
    assert step["embedding"] == Phase("embedding", 0, 2 * 64)


def test_prompt_tokens_see_what_is_before_them() -> None:
    # 3 tokens from position 4: 5 + 6 + 7 pairs, 7 keys read once
    step = found(Step((Rows(4, 3),), 0))
    assert step["attention"] == Phase("attention", 18 * 128, 7 * 64, 2)
    assert step["gate_up"].flop == 2 * 3 * 4096
    assert (step["head"].flop, step["head"].bytes) == (0, 0)


def test_each_phase_is_bound_by_what_is_slower() -> None:
    step = Step((Rows(9),), 1)
    # One row has 2 FLOP a weight of 2 bytes; attention has 10 x 128 FLOP and 10 x 64 bytes.
    nearly_no_flop = seconds(TINY, step, 1e30, 1.0)
    assert nearly_no_flop == 64 + 2 * (2 * 9216 + 640) + 6400
    assert seconds(TINY, step, 1.0, 1e30) == 2 * (2 * 9216 + 1280) + 6400
    # With a FLOP/s for each byte/s only attention, which has two FLOP a byte, is bound by FLOP.
    assert seconds(TINY, step, 1.0, 1.0) == 64 + 2 * (2 * 9216 + 1280) + 6400


def test_kv_bytes_follow_their_own_type() -> None:
    eight_bits = Sizes(2, 32, 4, 2, 8, 64, 100, tied=True, kv_bytes=1.0)
    assert (TINY.kv_bytes_per_token, eight_bits.kv_bytes_per_token) == (128, 64)


def test_a_workload_is_one_prompt_step_and_the_decode_steps() -> None:
    steps = workload_steps(2, 5, 3)
    assert steps == [
        Step((Rows(0, 5), Rows(0, 5)), 2),
        Step((Rows(5), Rows(5)), 2),
        Step((Rows(6), Rows(6)), 2),
    ]
    assert [rows.keys for step in steps for rows in step.rows] == [5, 5, 6, 6, 7, 7]
    assert workload_seconds(TINY, 2, 5, 3, 1e9, 1e9) == sum(seconds(TINY, step, 1e9, 1e9) for step in steps)
    assert len(workload_steps(16, 512, 1)) == 1


def test_totals_sum_over_layers_and_steps() -> None:
    step = Step((Rows(9),), 1)
    flop, size = totals(TINY, [step, step])
    assert flop == 2 * (2 * (2 * 9216 + 1280) + 6400)
    assert size == 2 * (64 + 2 * (2 * 9216 + 640) + 6400)
