"""Programs and the engine: taps, call-backs, tokens fed forward, steps that cannot be, failures within one."""

from __future__ import annotations

import gc
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evensong import _native
from evensong.protocol.kv_spec import KVCacheConfig
from evensong.testing.tiny_models import TinyLlama, write_tiny_llama
from evensong.worker.device import Device
from evensong.worker.native_rows import logits_rows
from tests.unit.models.stepping import load

VOCAB, BLOCK = 272, 16
ROW = struct.Struct("=dddqQQqiiii")  # SampleRow of native/src/step.h
NOTHING = np.empty(0, dtype=np.int64)


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Any]:
    yield made(tmp_path)


def made(folder: Path, **how: Any) -> Any:
    device: Any = load(str(write_tiny_llama(folder, TinyLlama(num_layers=3))), "bfloat16", **how)[0]
    prepare(device)
    return device


def prepare(device: Device) -> None:
    device.prepare(KVCacheConfig(64, BLOCK), 256, VOCAB)


def inputs(counts: list[int], starts: list[int], tokens: list[int], first_block: int = 0) -> tuple[Any, ...]:
    """Each sequence in four blocks of its own."""
    tables = [np.arange(4, dtype=np.int32)[None] + first_block + 4 * i for i in range(len(counts))]
    return np.array(counts, np.int32), np.array(starts, np.int32), tables, np.array(tokens, np.int64)


def draw_row(feed_slot: int = -1, temperature: float = 0.0, seed: int = 0, mask: int = -1) -> bytes:
    return ROW.pack(temperature, 1.0, 0.0, 0, seed, 7, -1, 1, -1, feed_slot, mask)


def submit(device: Any, step: tuple[Any, ...], rows: list[int], samples: bytes, **part: Any) -> int:
    program = device._recording.program
    ticket: int = device._engine.submit(
        program, *step, np.array(rows, np.int64), np.frombuffer(samples, np.uint8), **part
    )
    return ticket


def run(device: Any, step: tuple[Any, ...], rows: list[int] | None = None, samples: bytes = b"") -> Any:
    return device._engine.wait(submit(device, step, rows or [], samples))


def test_a_tap_copies_what_a_layer_gives(device: Any) -> None:
    limit = device._recording._memory.kv_cache.max_num_batched_tokens
    target = np.zeros((limit, 64), dtype=np.float32)
    device.watchers.taps["layer 1"] = target.view(np.uint8).reshape(-1)
    prepare(device)
    run(device, inputs([5], [0], [1, 2, 3, 4, 5]))
    first = target[:5].copy()
    assert first.any() and not target[5:].any()
    assert not np.array_equal(first, device._recording.program.view(0, 5)), "a layer further on, the stream is another"
    run(device, inputs([1], [4], [5]))
    assert np.array_equal(target[0], first[4]), "token by token the same bits"


def test_a_tap_that_is_too_small_is_refused(device: Any) -> None:
    device.watchers.taps["layer 1"] = np.zeros(100, np.uint8)
    with pytest.raises(ValueError, match="too small"):
        prepare(device)


def test_a_call_back_stands_between_two_layers(device: Any) -> None:
    """It sees the rows, runs with the GIL, and what it changes is what the next layer reads."""
    seen: list[tuple[int, int]] = []
    plain = run(device, inputs([3], [0], [7, 8, 9]), [2], draw_row(temperature=1.0))
    logits = device._recording.program.view(device._recording.logits, 1).copy()

    def call(rows: int) -> None:
        seen.append((rows, threading.get_ident()))
        device._recording.program.view(0, rows)[:] *= -1.0

    device.watchers.callbacks["layer 0"] = call
    prepare(device)
    changed = run(device, inputs([3], [0], [7, 8, 9]), [2], draw_row(temperature=1.0))
    assert [rows for rows, _ in seen] == [3] and seen[0][1] != threading.get_ident()
    assert not np.array_equal(device._recording.program.view(device._recording.logits, 1), logits)
    assert plain[0][0] >= 0 and changed[0][0] >= 0


def test_a_call_back_that_fails_fails_its_step_alone(device: Any) -> None:
    fails = [True]

    def call(rows: int) -> None:
        if fails:
            raise KeyError("by the hook")

    device.watchers.callbacks["layer 1"] = call
    prepare(device)
    step = inputs([2], [0], [3, 4])
    tickets = [submit(device, step, [], b"") for _ in range(3)]
    for ticket in tickets:
        with pytest.raises(KeyError, match="by the hook"):
            device._engine.wait(ticket)
    fails.clear()
    assert run(device, step, [1], draw_row())[0][0] >= 0
    with pytest.raises(ValueError, match="ticket"):
        device._engine.wait(10_000)


@pytest.mark.parametrize("temperature", [0.8, 1.5])
def test_tokens_are_fed_to_steps_that_are_queued_already(device: Any, temperature: float) -> None:
    """Five steps of two sequences in the queue at once, none of whose tokens Python knows; against one by one."""
    prompts = [[5, 6, 7, 8], [100, 101]]

    def first() -> tuple[Any, ...]:
        return inputs([4, 2], [0, 0], [t for prompt in prompts for t in prompt])

    def samples(step: int) -> bytes:
        return b"".join(
            ROW.pack(temperature, 1.0, 0.0, 0, 3 + i, 10 + step, -1, 1, -1, i, -1) for i in range(len(prompts))
        )

    expected = [run(device, first(), [3, 5], samples(0))[0].tolist()]
    for step in range(1, 6):
        starts = [4 + step - 1, 2 + step - 1]
        expected.append(run(device, inputs([1, 1], starts, expected[-1]), [0, 1], samples(step))[0].tolist())
    tickets = [submit(device, first(), [3, 5], samples(0))]
    for step in range(1, 6):
        fed = inputs([1, 1], [4 + step - 1, 2 + step - 1], [-1, -2])
        tickets.append(submit(device, fed, [0, 1], samples(step)))
    assert [device._engine.wait(ticket)[0].tolist() for ticket in tickets] == expected
    assert len({tuple(tokens) for tokens in expected}) > 1


@pytest.mark.parametrize("spoil", [None, np.nan, np.inf, -np.inf])
def test_greedy_steps_that_write_no_logits_choose_the_same(device: Any, spoil: float | None) -> None:
    """Alone in a step greedy rows take their tokens from the head's products; beside a drawn row, from the logits."""
    tokens = list(range(20, 40))
    step = inputs([20], [0], tokens)
    rows = list(range(20))

    def call(num_rows: int) -> None:
        if spoil is not None:
            device._recording.program.view(0, num_rows)[3] = spoil

    device.watchers.callbacks["layer 2"] = call
    prepare(device)
    alone = run(device, step, rows, 20 * draw_row())[0].tolist()
    among = run(device, step, [*rows, 0], 20 * draw_row() + draw_row(temperature=1.0))[0].tolist()[:20]
    assert alone == among and len(set(alone)) > 3
    assert (alone[3] == -1) == (spoil is not None)


def test_steps_that_cannot_be(device: Any) -> None:
    good = inputs([2], [0], [3, 4])
    counts, starts, tables, tokens = good
    limit = device._recording._memory.kv_cache.max_num_batched_tokens
    bad = {
        "no tokens": (np.array([0], np.int32), starts, tables, NOTHING),
        "more tokens than counted": (counts, starts, tables, np.array([3, 4, 5])),
        "fewer tokens than counted": (counts, starts, tables, np.array([3])),
        "a token that does not exist": (counts, starts, tables, np.array([3, VOCAB])),
        "a feed slot that does not exist": (counts, starts, tables, np.array([3, -1000])),
        "a negative start": (counts, np.array([-1], np.int32), tables, tokens),
        "beyond the longest": (counts, np.array([255], np.int32), [np.zeros((1, 40), np.int32)], tokens),
        "a table that is too short": (counts, np.array([70], np.int32), tables, tokens),
        "a block that does not exist": (counts, starts, [np.array([[64 + 4 + 1]], np.int32)], tokens),
        "no block for a token": (counts, starts, [np.array([[-1]], np.int32)], tokens),
        "tables of two groups": (counts, starts, [np.zeros((2, 4), np.int32)], tokens),
        "no table": (counts, starts, [], tokens),
        "no start": (counts, np.empty(0, np.int32), tables, tokens),
        "a step that is too large": (np.array([limit + 1], np.int32), starts, tables, np.zeros(limit + 1, np.int64)),
    }
    for name, step in bad.items():
        with pytest.raises(ValueError):
            submit(device, step, [], b"")
            pytest.fail(name)
    for rows, samples in ([[2], draw_row()], [[-1], draw_row()], [[0], b""], [[0], draw_row(feed_slot=10_000)]):
        with pytest.raises(ValueError):
            submit(device, good, rows, samples)
    for first, last in ((0, 10_000), (5, 4)):
        with pytest.raises(ValueError):
            submit(device, good, [], b"", first=first, last=last)
    assert run(device, good, [1], draw_row())[0][0] >= 0


def test_logits_alone(device: Any) -> None:
    tokens, *_ = run(device, inputs([3], [0], [1, 2, 3]), [0, 2], logits_rows(2).tobytes())
    assert tokens.tolist() == [-1, -1]
    assert device._recording.program.view(device._recording.logits, 2).any()


def test_programs_and_engines_go_while_others_run(tmp_path: Path) -> None:
    """What a program holds on to lives as long as its steps, whoever lets go of it last."""
    device = made(tmp_path, threads=3)
    engine = device._engine
    tickets = [submit(device, inputs([2], [0], [3, 4]), [1], draw_row()) for _ in range(20)]
    device.unload()
    gc.collect()
    results = [engine.wait(ticket)[0].tolist() for ticket in tickets]
    assert len(results) == 20 and all(result == results[0] for result in results)
    del device, engine
    gc.collect()


def test_an_engine_that_goes_ends_its_steps_first(tmp_path: Path) -> None:
    """They may need the GIL, which whoever drops the engine holds."""
    device, calls = made(tmp_path), []
    device.watchers.callbacks["layer 1"] = lambda rows: calls.append(rows)
    prepare(device)
    for _ in range(5):
        submit(device, inputs([2], [0], [3, 4]), [], b"")
    device._engine = None
    gc.collect()
    assert calls == [2] * 5


def test_an_engine_has_threads() -> None:
    with pytest.raises(ValueError):
        _native.Engine(0)
    assert _native.Engine(2).threads == 2


@pytest.mark.parametrize("isa", _native.supported_isas())
def test_weights_of_other_sizes_and_sets_are_refused(isa: str) -> None:
    panel, pairs = _native.isa_traits(isa)
    packed = _native.pack(np.ones((panel, 8), np.float32), isa, "float32")
    weight = _native.Weight(packed, panel, 8, "float32", isa)
    assert (weight.rows, weight.cols) == (panel, 8)
    for rows, cols in ((panel + 1, 8), (panel, 12), (0, 8), (panel, -8), (1 << 41, 1 << 31)):
        with pytest.raises(ValueError):
            _native.Weight(packed, rows, cols, "float32", isa)
    program = _native.Program(isa, 8, 8, 16, 4, 4, vocab_size=panel)
    x, y = program.buffer(8, "float32"), program.buffer(panel, "float32")
    program.linear(x, weight, None, "store", y)
    for wrong in (
        lambda: program.linear(y, weight, None, "store", x),
        lambda: program.linear(x, weight, np.zeros(3, np.float32), "store", y),
        lambda: program.linear(x, weight, None, "argmax", y),
        lambda: program.linear(99, weight, None, "store", y),
        lambda: program.linear(-1, weight, None, "store", y),
        lambda: program.norm(x, np.ones(9, np.float32), 1e-5, x),
        lambda: program.norm(x, np.ones(8, np.float32), 1e-5, y),
        lambda: program.add_norm(x, y, np.ones(8, np.float32), 1e-5),
        lambda: program.buffer(0, "float32"),
        lambda: program.buffer(8, "float16"),
        lambda: program.view(x, 1 << 40),
        lambda: program.segment_name(1000),
    ):
        with pytest.raises(ValueError):
            wrong()
    others = [other for other in _native.supported_isas() if _native.isa_traits(other)[0] != panel]
    for other in others:
        foreign = _native.Program(other, 8, 8, 16, 4, 4, vocab_size=panel)
        with pytest.raises(ValueError, match="another instruction set"):
            foreign.linear(foreign.buffer(8, "float32"), weight, None, "store", foreign.buffer(panel, "float32"))


def bits(*token_ids: int) -> Any:
    """A mask of these tokens."""
    row = np.zeros(-(-VOCAB // 32), dtype=np.uint32)
    for token_id in token_ids:
        row[token_id // 32] |= np.uint32(1 << token_id % 32)
    return row


def logits_of(device: Any, step: tuple[Any, ...], rows: list[int]) -> Any:
    """Of the step that has just run."""
    plan = device._recording
    samples = logits_rows(len(rows))
    device._engine.wait(device._engine.submit(plan.program, *step, np.array(rows), samples, first=plan.head_begins))
    return plan.program.view(plan.logits, len(rows))[:, : plan.num_token_ids].copy()


@pytest.mark.parametrize("isa", _native.supported_isas())
def test_a_masked_row_draws_among_its_tokens_and_no_other_row_knows(tmp_path: Path, isa: str) -> None:
    device = made(tmp_path, isa=isa)
    step = inputs([3, 2, 4], [0, 0, 0], [1, 2, 3, 4, 5, 6, 7, 8, 9])
    rows = [2, 4, 8]
    free = run(device, step, rows, draw_row() + draw_row() + draw_row(temperature=1.0, seed=5))[0].tolist()
    logits = logits_of(device, step, [2, 4, 8])
    allowed = [3, 31, 32, 63, 64, 200, VOCAB - 1]
    masks = np.stack([bits(*allowed), bits(17)])
    samples = draw_row(mask=0) + draw_row() + draw_row(temperature=1.0, seed=5, mask=1)
    tokens = device._engine.wait(submit(device, step, rows, samples, masks=masks))[0].tolist()
    assert tokens == [max(allowed, key=lambda i: (logits[0, i], -i)), free[1], 17]
    # Everything allowed is as if there were no mask; nothing allowed gives no token.
    masks = np.stack([bits(*range(VOCAB)), bits()])
    samples = draw_row(mask=1) + draw_row() + draw_row(temperature=1.0, seed=5, mask=0)
    tokens = device._engine.wait(submit(device, step, rows, samples, masks=masks))[0].tolist()
    assert tokens == [-1, free[1], free[2]]


@pytest.mark.parametrize(
    ("mask", "masks"),
    [(0, None), (1, np.zeros((1, 9), np.uint32)), (0, np.zeros((1, 8), np.uint32)), (-2, np.zeros((1, 9), np.uint32))],
)
def test_a_mask_that_is_not_there_or_too_short_is_refused(device: Any, mask: int, masks: Any) -> None:
    with pytest.raises(ValueError, match="mask"):
        submit(device, inputs([3], [0], [1, 2, 3]), [2], draw_row(mask=mask), masks=masks)


def test_log_probabilities_of_a_masked_row_are_of_all_tokens(device: Any) -> None:
    step = inputs([3], [0], [1, 2, 3])
    row = ROW.pack(0.0, 1.0, 0.0, 0, 0, 7, -1, 1, 3, -1, 0)
    tokens, shifts, ranks, found, ids, _ = device._engine.wait(
        submit(device, step, [2], row, masks=np.stack([bits(40, 41)]))
    )
    logits = logits_of(device, step, [2])[0].astype(np.float64)
    assert int(tokens[0]) in (40, 41) and found[0] == 3
    assert ids[0].tolist() == sorted(range(VOCAB), key=lambda i: (-logits[i], i))[:3]
    assert ranks[0] == 1 + int((logits > logits[tokens[0]]).sum())
    assert shifts[0] == pytest.approx(np.log(np.exp(logits - logits.max()).sum()) + logits.max(), abs=1e-4)
