"""The packed linear kernels of every instruction set that runs here: values, and bits however the work is cut."""

from __future__ import annotations

import numpy as np
import pytest

from evensong import _native

ISAS = _native.supported_isas()
KINDS = [(isa, dtype) for isa in ISAS for dtype in ("float32", "bfloat16")]
CHECKSUM = 0x70A3A3392398CA02
# [rows, cols]: odd cols, rows that are no multiple of any panel, one of each, and cols that are cut into blocks.
SHAPES = [(1, 1), (33, 7), (64, 32), (70, 129), (5, 2), (40, 2501)]

each_kind = pytest.mark.parametrize(("isa", "dtype"), KINDS)
each_isa = pytest.mark.parametrize("isa", ISAS)


def rounded(x: np.ndarray) -> np.ndarray:
    """The bits of bfloat16 nearest to float32 values, ties to even; no NaN."""
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def widened(half: np.ndarray) -> np.ndarray:
    return (half.astype(np.uint32) << 16).view(np.float32)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    """Normal float32 values that bfloat16 holds exactly."""
    return widened(rounded(np.random.default_rng([seed, *shape]).standard_normal(shape)))


def bits(x: np.ndarray) -> list[int]:
    return np.ascontiguousarray(x).view(np.uint32 if x.dtype == np.float32 else np.uint16).ravel().tolist()


def packed_width(isa: str) -> int:
    """Outputs in a panel."""
    return _native.packed_size(1, 2, isa, "float32") // 8


def run(weight: np.ndarray, isa: str, dtype: str, x: np.ndarray, epilogue: str = "store", **options: object):
    gated = epilogue in ("silu", "gelu_tanh")
    packed = _native.pack(weight, isa, dtype, gated)
    return _native.linear(packed, *weight.shape, isa, dtype, x, epilogue=epilogue, **options)


def reference(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
    y = x.astype(np.float64) @ weight.T.astype(np.float64)
    return y if bias is None else y + bias


def assert_close(y: np.ndarray, expected: np.ndarray, cols: int, wide: bool = True) -> None:
    scale = max(1.0, np.abs(expected).max())
    tolerance = 4e-7 * (cols + 16) if wide else 2.0**-8
    assert np.abs(y - expected).max() <= tolerance * scale


@each_kind
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("biased", [False, True])
def test_store_is_the_product(isa: str, dtype: str, shape: tuple[int, int], biased: bool) -> None:
    weight, bias = normal(*shape), normal(shape[0], seed=1) if biased else None
    for num_rows in (1, 2, 5, 12, 13, 40):
        x = normal(num_rows, shape[1], seed=2)
        y = run(weight, isa, dtype, x, bias=bias)
        assert_close(y, reference(x, weight, bias), shape[1])
        half = run(weight, isa, dtype, x, bias=bias, out_dtype="bfloat16")
        assert bits(half) == bits(rounded(y))


@each_kind
@pytest.mark.parametrize("shape", [(2, 3), (66, 31), (160, 64)])
def test_gates(isa: str, dtype: str, shape: tuple[int, int]) -> None:
    weight, bias, x = normal(*shape), normal(shape[0], seed=1), normal(9, shape[1], seed=2)
    gate, up = np.split(reference(x, weight, bias), 2, axis=1)
    inner = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
    expected = {"silu": gate / (1 + np.exp(-gate)) * up, "gelu_tanh": gate / 2 * (1 + np.tanh(inner)) * up}
    for epilogue, values in expected.items():
        y = run(weight, isa, dtype, x, epilogue, bias=bias)
        assert_close(y, values, shape[1])
        half = run(weight, isa, dtype, x, epilogue, bias=bias, out_dtype="bfloat16")
        assert bits(half) == bits(rounded(y))


@each_isa
def test_gates_at_their_limits(isa: str) -> None:
    gate = np.array([-1e30, -200.0, -90.0, -0.0, 0.0, 90.0, 200.0, 1e30], dtype=np.float32)
    weight = np.concatenate([gate, np.ones_like(gate)])[:, None]
    for epilogue in ("silu", "gelu_tanh"):
        y = run(weight, isa, "float32", np.ones((1, 1), dtype=np.float32), epilogue)[0]
        assert np.array_equal(y[5:], gate[5:]) and np.array_equal(y[3:5], [0.0, 0.0])
        assert np.all(np.abs(y[:3]) < 1e-35)


@each_kind
def test_gate_and_up_are_those_of_a_plain_weight(isa: str, dtype: str) -> None:
    """A huge positive gate is its own silu, so what is multiplied shows: gate * up of the plain product, bit by bit."""
    half = packed_width(isa) // 2
    weight = np.abs(normal(4 * half, 50)) + 2
    x = np.abs(normal(7, 50, seed=1)) + 1
    plain = run(weight, isa, dtype, x)
    gate, up = plain[:, : 2 * half], plain[:, 2 * half :]
    assert gate.min() > 100
    assert bits(run(weight, isa, dtype, x, "silu")) == bits(gate * up)
    assert bits(run(weight, isa, dtype, x, "gelu_tanh")) == bits(gate * up)


@each_kind
@pytest.mark.parametrize("shape", [(70, 129), (33, 2501)])
@pytest.mark.parametrize("epilogue", ["store", "add", "silu", "gelu_tanh", "argmax"])
def test_a_row_alone_has_the_bits_it_has_among_others(
    isa: str, dtype: str, shape: tuple[int, int], epilogue: str
) -> None:
    rows = shape[0] - (shape[0] % 2)
    weight, x = normal(rows, shape[1]), normal(40, shape[1], seed=2)

    def bits_of(part: np.ndarray) -> list[list[int]]:
        out = np.full((len(part), rows), 0.25, dtype=np.float32) if epilogue == "add" else None
        y = run(weight, isa, dtype, part, epilogue, out=out)
        return [bits(row) for row in (y[0] if epilogue == "argmax" else y)]

    whole = bits_of(x)
    assert [bits_of(x[i : i + 1])[0] for i in range(40)] == whole
    for count in range(2, 40):
        assert bits_of(x[:count]) == whole[:count]


@each_isa
def test_many_rows_have_the_bits_of_few(isa: str) -> None:
    """More rows than one block of them holds."""
    weight, x = normal(48, 700), normal(700, 700, seed=1)
    whole = run(weight, isa, "bfloat16", x)
    assert bits(whole[:3]) == bits(run(weight, isa, "bfloat16", x[:3]))
    assert bits(whole[-5:]) == bits(run(weight, isa, "bfloat16", x[-5:]))
    assert bits(whole[341:350]) == bits(run(weight, isa, "bfloat16", x[341:350]))


@each_kind
@pytest.mark.parametrize("epilogue", ["store", "silu", "argmax"])
def test_parts_make_the_whole_and_touch_nothing_else(isa: str, dtype: str, epilogue: str) -> None:
    rows, cols, num_rows = 330, 65, 31
    gated = epilogue == "silu"
    packed = _native.pack(normal(rows, cols), isa, dtype, gated)
    x = normal(num_rows, cols, seed=1)
    width = rows // 2 if gated else rows
    panel = packed_width(isa) // (2 if gated else 1)
    num_panels = -(-width // panel)

    def part(out: np.ndarray | None, panels: tuple[int, int], span: tuple[int, int]):
        return _native.linear(
            packed, rows, cols, isa, dtype, x, epilogue=epilogue, out=out,
            first_panel=panels[0], last_panel=panels[1], first_row=span[0], last_row=span[1],
        )  # fmt: skip

    whole = part(None, (0, -1), (0, -1))
    if epilogue == "argmax":
        left, right = part(None, (0, 3), (0, -1)), part(None, (3, -1), (0, -1))
        for all_panels, a, b in zip(whole, left, right, strict=True):
            assert np.array_equal(all_panels, np.concatenate([a[:, :3], b[:, 3:]], axis=1))
            assert not a[:, 3:].any() and not b[:, :3].any()
        return
    out = np.full((num_rows, width + 3), 7.0, dtype=np.float32)
    for panels in ((0, 1), (1, 4), (4, num_panels)):
        for span in ((0, 14), (14, 15), (15, num_rows)):
            before = out.copy()
            part(out, panels, span)
            changed = np.zeros(out.shape, dtype=bool)
            changed[span[0] : span[1], panels[0] * panel : min(panels[1] * panel, width)] = True
            assert np.array_equal(out[~changed], before[~changed])
    assert bits(out[:, :width]) == bits(whole)
    assert np.all(out[:, width:] == 7.0)


@each_kind
@pytest.mark.parametrize("shape", SHAPES)
def test_add_is_store_and_a_sum(isa: str, dtype: str, shape: tuple[int, int]) -> None:
    weight, bias, x = normal(*shape), normal(shape[0], seed=1), normal(14, shape[1], seed=2)
    before = normal(14, shape[0] + 2, seed=3)
    out = before.copy()
    run(weight, isa, dtype, x, "add", bias=bias, out=out)
    assert bits(out[:, : shape[0]]) == bits(before[:, : shape[0]] + run(weight, isa, dtype, x, bias=bias))
    assert bits(out[:, shape[0] :]) == bits(before[:, shape[0] :])


@each_kind
@pytest.mark.parametrize("gated", [False, True])
def test_pack_does_not_depend_on_the_source_or_its_parts(isa: str, dtype: str, gated: bool) -> None:
    weight = normal(74, 33)
    packed = _native.pack(weight, isa, dtype, gated)
    assert packed.ctypes.data % 64 == 0
    assert packed.nbytes == _native.packed_size(74, 33, isa, dtype, gated)
    assert np.array_equal(packed, _native.pack(rounded(weight), isa, dtype, gated))
    num_panels = -(-(74 // 2) // (packed_width(isa) // 2)) if gated else -(-74 // packed_width(isa))
    size = packed.nbytes // num_panels
    out = np.full(packed.nbytes, 0xAA, dtype=np.uint8)
    for panel in range(num_panels):
        _native.pack_into(weight, isa, dtype, gated, out[panel * size : (panel + 1) * size], panel, panel + 1)
    assert np.array_equal(out, packed)


@each_isa
def test_pack_rounds_to_the_nearest(isa: str) -> None:
    weight = np.random.default_rng(0).standard_normal((40, 21)).astype(np.float32)
    weight[0, :3] = np.array([0x3F808000, 0x3F818000, 0x7F7FFFFF], dtype=np.uint32).view(np.float32)
    assert np.array_equal(_native.pack(weight, isa, "bfloat16"), _native.pack(rounded(weight), isa, "bfloat16"))
    weight[1, 2] = np.array(0x7F800001, dtype=np.uint32).view(np.float32)
    row = _native.gather(_native.pack(weight, isa, "bfloat16"), 40, 21, isa, "bfloat16", np.array([1]))
    assert np.isnan(row[0, 2]) and not np.isnan(np.delete(row[0], 2)).any()


@each_kind
def test_gather_gives_the_row(isa: str, dtype: str) -> None:
    weight = normal(70, 33)
    ids = np.array([0, 69, 31, 32, 0], dtype=np.int64)
    packed = _native.pack(weight, isa, dtype)
    assert np.array_equal(_native.gather(packed, 70, 33, isa, dtype, ids), weight[ids])
    scaled = _native.gather(packed, 70, 33, isa, dtype, ids, 24.5)
    assert bits(scaled) == bits(weight[ids] * np.float32(24.5))
    for bad in (-1, 70):
        with pytest.raises(ValueError, match="token id"):
            _native.gather(packed, 70, 33, isa, dtype, np.array([bad]))


def expected_best(y: np.ndarray, panel: int, num_columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Each panel's largest value and its lowest index: NaN counts as the largest, as in numpy's argmax."""
    firsts = range(0, y.shape[1], panel)
    y = np.where(np.arange(y.shape[1]) < num_columns, y, -np.inf)
    index = np.stack([first + y[:, first : first + panel].argmax(axis=1) for first in firsts], axis=1)
    return np.take_along_axis(y, index, axis=1), index


@each_kind
@pytest.mark.parametrize("num_columns", [-1, 69, 40, 33, 1])
def test_argmax(isa: str, dtype: str, num_columns: int) -> None:
    weight, x = normal(70, 12), normal(15, 12, seed=1)
    weight[5::3] = weight[4]  # ties
    weight[50:] *= 1000
    y = run(weight, isa, dtype, x)
    best, index = run(weight, isa, dtype, x, "argmax", num_columns=num_columns)
    values, where = expected_best(y, packed_width(isa), 70 if num_columns < 0 else num_columns)
    assert np.array_equal(best, values)
    assert np.array_equal(index, where)


@each_kind
@pytest.mark.parametrize("lane", [0, 3, 9, 20])
def test_argmax_reports_nan(isa: str, dtype: str, lane: int) -> None:
    weight, x = normal(60, 6), normal(3, 6, seed=1)
    weight[lane, 2] = np.nan
    panel = packed_width(isa)
    best, index = run(weight, isa, dtype, x, "argmax")
    assert np.isnan(best[:, lane // panel]).all()
    assert not np.isnan(np.delete(best, lane // panel, axis=1)).any()
    assert np.isnan(run(weight, isa, dtype, x)[:, lane]).all()
    hidden, _ = run(weight, isa, dtype, x, "argmax", num_columns=lane) if lane else (np.zeros(1), None)
    assert not np.isnan(hidden).any()
    assert (index[:, 0] < panel).all()


@each_isa
def test_argmax_of_infinities_and_zeros(isa: str) -> None:
    one = np.ones((1, 1), dtype=np.float32)
    lowest = np.full((20, 1), -np.inf, dtype=np.float32)
    best, index = run(lowest, isa, "float32", one, "argmax")
    assert best[0, 0] == -np.inf and index[0, 0] == 0
    zeros = np.where(np.arange(20) < 3, -1.0, np.where(np.arange(20) % 2, -0.0, 0.0))[:, None].astype(np.float32)
    best, index = run(zeros, isa, "float32", one, "argmax")
    assert best[0, 0] == 0 and index[0, 0] == 3


def test_checksum_sees_every_bit_and_the_order() -> None:
    data = np.random.default_rng(0).integers(0, 256, 64 * 5 + 13, dtype=np.uint8)
    clean = _native.checksum(data)
    seen = {clean}
    for byte in range(len(data)):
        for bit in range(8):
            data[byte] ^= 1 << bit
            seen.add(_native.checksum(data))
            data[byte] ^= 1 << bit
    assert len(seen) == 1 + 8 * len(data)
    for size in (8, 64, 128):
        swapped = data.copy()
        swapped[:size], swapped[size : 2 * size] = data[size : 2 * size], data[:size]
        assert _native.checksum(swapped) not in seen
    assert _native.checksum(data, 1) not in seen
    # Flips of the highest bit in two words of one chain must not cancel.
    for distance in (64, 128, 192):
        both = data.copy()
        both[[7, 7 + distance]] ^= 0x80
        assert _native.checksum(both) != clean


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 1000])
def test_checksum_is_one_for_all_instruction_sets(size: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    values = {_native.checksum(data, 5, isa) for isa in ISAS}
    assert len(values) == 1
    assert _native.checksum(np.append(data, np.uint8(0)), 5) not in values


def test_checksum_keeps_its_value() -> None:
    """Files carry it: a change must be meant."""
    assert _native.checksum(np.arange(100, dtype=np.uint8), 3) == CHECKSUM


@each_isa
def test_read_bytes_reads_them(isa: str) -> None:
    data = np.zeros(1000, dtype=np.uint8)
    assert _native.read_bytes(data, isa) == 0
    for at in (0, 511, 999):
        data[at] = 1
        assert _native.read_bytes(data, isa) > 0
        data[at] = 0


@each_isa
def test_bad_arguments_raise(isa: str) -> None:
    weight, x = normal(32, 8), normal(3, 8)
    packed = _native.pack(weight, isa, "float32")
    good = {"packed": packed, "rows": 32, "cols": 8, "isa": isa, "dtype": "float32", "x": x}
    _native.linear(**good)
    bad = [
        {"packed": packed[:-1]},
        {"rows": 0},
        {"rows": -32},
        {"cols": 9},
        {"isa": "sse9"},
        {"dtype": "f16"},
        {"x": x[:, :7].copy()},
        {"x": x[0]},
        {"x": x.astype(np.float64)},
        {"bias": np.zeros(31, dtype=np.float32)},
        {"bias": np.zeros(32, dtype=np.float64)},
        {"epilogue": "relu"},
        {"epilogue": "add"},
        {"out_dtype": "f64"},
        {"out": np.zeros((2, 32), dtype=np.float32)},
        {"out": np.zeros((3, 31), dtype=np.float32)},
        {"out": np.zeros((3, 32), dtype=np.uint16)},
        {"epilogue": "argmax", "out": np.zeros((3, 32), dtype=np.float32)},
        {"epilogue": "argmax", "num_columns": 33},
        {"first_panel": 9},
        {"last_panel": 9},
        {"first_row": 2, "last_row": 1},
        {"last_row": 4},
    ]
    for change in bad:
        with pytest.raises(ValueError):
            _native.linear(**{**good, **change})
    for call in (
        lambda: _native.pack(normal(3, 4), isa, "float32", True),
        lambda: _native.pack(weight.astype(np.float64), isa, "float32"),
        lambda: _native.pack(weight[0], isa, "float32"),
        lambda: _native.pack_into(weight, isa, "float32", False, packed[:-4].copy()),
        lambda: _native.pack_into(weight, isa, "float32", False, packed, 1, 0),
        lambda: _native.packed_size(4, 0, isa, "float32"),
        lambda: _native.pack_bias(np.zeros(4), isa),
        lambda: _native.pack_bias(np.zeros((2, 2), dtype=np.float32), isa),
        lambda: _native.pack_bias(np.zeros(0, dtype=np.float32), isa),
        lambda: _native.pack_bias(np.zeros(3, dtype=np.float32), isa, gated=True),
        lambda: _native.run_linears([(packed, 32, 8, "store")], isa, "float32", 0),
        lambda: _native.measure_gemm_peak(isa, "float32", 0),
    ):
        with pytest.raises(ValueError):
            call()


@each_kind
def test_benchmark_entries_run(isa: str, dtype: str) -> None:
    packed = _native.pack(normal(64, 8), isa, dtype)
    _native.run_linears([(packed, 64, 8, "store"), (packed, 64, 8, "argmax")], isa, dtype, 5, 1, 2, 2)
    assert _native.measure_gemm_peak(isa, dtype, 0.002) > 1e8
