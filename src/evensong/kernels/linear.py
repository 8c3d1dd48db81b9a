"""Matrix products whose output rows do not depend on how many rows are computed together.

The contract is one tile of `TILE_ROWS` rows, the last one padded. Libraries pick another kernel, and with it another
order of summation, for another number of rows; a row count may replace the tile only where start-up proved, for the
very weight shape, that every row comes out with the same bits (`RowProver`).
"""

from __future__ import annotations

import contextlib
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch

TILE_ROWS = 16
_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 128)
# Worth their trials only where products are fast: there a prompt's rows come in steps of this many.
_SIZES_BFLOAT16 = (*_SIZES, 192, 256, 320, 384, 448, 512)
# A weight as large as an output head is multiplied with few rows, and each trial of it takes milliseconds.
_SIZES_LARGE = (1, 2, 4, 8, 16, 32, 64)
_LARGE_ELEMENTS = 1 << 24
# Different outputs of a trial weight; more repeat them.
_TRIAL_OUTPUTS = 256
# Above this many rows a remainder is cut rather than padded, unless the padding is a small share: one more call, and
# the copy that joins the pieces, cost less.
_PAD_BELOW = 64
_PAD_SHARE = 8


class RowPlan:
    """Which row counts may be multiplied at once, and how any other count is cut into them."""

    def __init__(self, proven: tuple[int, ...]) -> None:
        """`proven` are row counts whose rows equal the tile's, bit by bit; the tile itself always belongs to them."""
        self.proven = tuple(sorted({*proven, TILE_ROWS}))
        self._pieces: dict[int, tuple[int, ...]] = {size: (size,) for size in self.proven}

    def pieces(self, rows: int) -> tuple[int, ...]:
        """Proven sizes that cover `rows` rows in order; only the last may reach beyond them, and is then padded."""
        found = self._pieces.get(rows)
        if found is None:
            found = self._pieces[rows] = self._cut(rows)
        return found

    def _cut(self, rows: int) -> tuple[int, ...]:
        pieces: list[int] = []
        while rows > 0:
            fitting = [size for size in self.proven if size <= rows]
            covering = [size for size in self.proven if size >= rows]
            if covering and (rows <= _PAD_BELOW or not fitting or covering[0] - rows <= rows // _PAD_SHARE):
                pieces.append(covering[0])
                break
            pieces.append(fitting[-1])
            rows -= fitting[-1]
        return tuple(pieces)


class Linear(ABC):
    """y = x W^T + b for x [rows, in_features]; every output row is the same alone and among others."""

    def __init__(self, plan: RowPlan, bias: torch.Tensor | None) -> None:
        self.plan = plan
        self.bias = bias

    @abstractmethod
    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """x W^T in one library call."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in_features] -> [rows, out_features] in the dtype of x."""
        rows = x.shape[0]
        pieces = self.plan.pieces(rows)
        if len(pieces) == 1 and pieces[0] == rows:
            y = self.multiply(x)
        else:
            y = self._multiply_pieces(x, pieces)
        return y if self.bias is None else y.add_(self.bias)

    def _multiply_pieces(self, x: torch.Tensor, pieces: tuple[int, ...]) -> torch.Tensor:
        outputs: list[torch.Tensor] = []
        start = 0
        for size in pieces:
            part = x[start : start + size]
            if part.shape[0] < size:
                padding = (0, 0, 0, size - part.shape[0])
                outputs.append(self.multiply(torch.nn.functional.pad(part, padding))[: part.shape[0]])
            else:
                outputs.append(self.multiply(part))
            start += size
        return torch.cat(outputs) if outputs else x.new_empty(0, self.out_features)

    @property
    @abstractmethod
    def out_features(self) -> int:
        """Columns of the output."""


class PackedLinear(Linear):
    """The weight in oneDNN's blocked layout, made once; only that copy is kept."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, plan: RowPlan) -> None:
        super().__init__(plan, bias)
        self._out_features = weight.shape[0]
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), TILE_ROWS)

    @property
    def out_features(self) -> int:
        """Columns of the output."""
        return self._out_features

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """x W^T in one library call."""
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, None, "none", [], "")
        return y


class PlainLinear(Linear):
    """The weight as it is, for devices and builds without oneDNN."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, plan: RowPlan) -> None:
        super().__init__(plan, bias)
        self._weight = weight.contiguous()

    @property
    def out_features(self) -> int:
        """Columns of the output."""
        return int(self._weight.shape[0])

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """x W^T in one library call."""
        return torch.nn.functional.linear(x, self._weight)


# (weight [out, in], bias, plan) to a product.
MakeLinear = Callable[[torch.Tensor, torch.Tensor | None, RowPlan], Linear]


class AnyRows(RowPlan):
    """No cutting at all: for backends that do not promise row invariance."""

    def __init__(self) -> None:
        super().__init__(())

    def pieces(self, rows: int) -> tuple[int, ...]:
        """The whole, whatever it is."""
        return (rows,)


class RowProver:
    """Finds, once for each weight shape, the row counts that give the tile's bits; shared by all layers of a model.

    `results` are the bits that the tiles gave: a machine that sums in another order gives others.
    """

    def __init__(self) -> None:
        self._plans: dict[tuple[Any, ...], RowPlan] = {}
        self.results: list[bytes] = []

    def plan(self, make: MakeLinear, weight: torch.Tensor) -> RowPlan:
        """The plan for weights like `weight` in what `make` makes of them. Some milliseconds for each new shape."""
        key = (make, *weight.shape, weight.dtype, torch.get_num_threads())
        if key not in self._plans:
            self._plans[key], result = _prove(make, weight)
            self.results.append(bits_of(result))
        return self._plans[key]


def _prove(make: MakeLinear, weight: torch.Tensor) -> tuple[RowPlan, torch.Tensor]:
    """Trial products, each row at every place of a tile; the plan, and what the tile gave."""
    large = weight.numel() > _LARGE_ELEMENTS
    sizes = _SIZES_LARGE if large else _SIZES_BFLOAT16 if weight.dtype is torch.bfloat16 else _SIZES
    trial, tile = cancelling_operands(weight.shape[0], weight.shape[1], weight.dtype)
    linear = make(trial, None, RowPlan(()))
    x = tile.repeat(-(-sizes[-1] // TILE_ROWS), 1)
    expected = linear.multiply(tile)
    return RowPlan(tuple(size for size in sizes if _rows_equal(linear.multiply(x[:size]), expected))), expected


def cancelling_operands(out_features: int, in_features: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight [out, in] and a tile of rows [TILE_ROWS, in] whose exact products are all zero.

    Every term comes a second time with the other sign, in another place. What a library returns is then its rounding
    errors alone, and they tell the order in which it summed. Of an ordinary sum a bfloat16 result keeps too few bits:
    another order shows in one of some thousand results.
    """
    generator = torch.Generator().manual_seed(in_features)
    half = in_features // 2
    place = torch.randperm(half, generator=generator)

    def twice(rows: int, sign: int) -> torch.Tensor:
        values = torch.randn(rows, half, generator=generator).to(dtype)
        return torch.cat([values, sign * values[:, place], values.new_zeros(rows, in_features - 2 * half)], dim=1)

    weight = twice(min(out_features, _TRIAL_OUTPUTS), 1)
    return weight.repeat(-(-out_features // len(weight)), 1)[:out_features], twice(TILE_ROWS, -1)


def bits_of(result: torch.Tensor) -> bytes:
    """A short digest of a tensor's bits."""
    return hashlib.blake2b(result.contiguous().view(torch.uint8).numpy().tobytes(), digest_size=16).digest()


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Runs the block's torch calls on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _rows_equal(y: torch.Tensor, tile: torch.Tensor) -> bool:
    return all(torch.equal(part, tile[: part.shape[0]]) for part in torch.split(y, TILE_ROWS))
