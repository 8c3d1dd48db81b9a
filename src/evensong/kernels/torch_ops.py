"""The elementwise and per-row ops in plain torch, each arranged so that a row's bits depend on that row alone.

Two habits of torch's CPU loops matter. The last elements of a loop that do not fill a vector are computed by scalar
code, which agrees with the vector code for +, -, *, /, sqrt and (measured) exp and log, but not for sigmoid or silu;
and a thread's share of a flattened tensor may end anywhere. So only exactly rounded operations run on shapes whose
split is not under control, and no multiply is left next to an add inside one kernel, where a compiler may fuse them.
"""

from __future__ import annotations

import math

import torch

# torch hands a thread at least this many elements (at::internal::GRAIN_SIZE).
_GRAIN = 32768
_VECTOR_ELEMENTS = 64
_GELU_SCALE = math.sqrt(2 / math.pi)
_GELU_CUBIC = 0.044715


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, in float32. x [rows, hidden] -> the same shape in `dtype`.

    Zhang and Sennrich, Root Mean Square Layer Normalization, 2019.
    """
    wide = x.float()
    scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scale.square_().mul_(1.0 / x.shape[-1]).add_(eps).rsqrt_()
    return torch.mul(wide, scale).mul_(weight).to(dtype)


def rotary(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotates each head in place; the two halves of a head are the pairs' components.

    heads [rows, num_heads, head_dim]; cos, sin [rows, 1, head_dim], where sin's first half is negated, so that
    x cos + swap_halves(x) sin is the rotation. Su et al., RoFormer, 2021.
    """
    swapped = heads.roll(heads.shape[-1] // 2, -1).mul_(sin)
    heads.mul_(cos).add_(swapped)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up for gate_up [rows, 2 * width] -> [rows, width]."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    gate, up = gate_up[:, :width], gate_up[:, width:]
    if width % _VECTOR_ELEMENTS or width > _GRAIN:
        # 1 / (1 + exp(-x)) from operations whose vector tails equal their bodies; a little slower.
        divisor = gate.float().neg().exp_().add_(1.0)
        return torch.div(gate, divisor).to(gate.dtype).mul_(up)
    bounds = whole_vector_splits(rows, width, torch.get_num_threads())
    if len(bounds) == 2:
        return torch.nn.functional.silu(gate).mul_(up)
    parts = [torch.nn.functional.silu(gate[a:b]) for a, b in zip(bounds, bounds[1:], strict=False)]
    return torch.cat(parts).mul_(up)


def gelu_tanh_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gelu(gate) * up, gelu by its tanh formula, for gate_up [rows, 2 * width] -> [rows, width].

    x / (1 + exp(-2u)) is x (1 + tanh(u)) / 2, from operations whose vector tails equal their bodies. Hendrycks and
    Gimpel, Gaussian Error Linear Units, 2016.
    """
    width = gate_up.shape[1] // 2
    gate, up = gate_up[:, :width], gate_up[:, width:]
    x = gate.float()
    divisor = (x * x).mul_(x).mul_(_GELU_CUBIC).add_(x).mul_(-2 * _GELU_SCALE).exp_().add_(1.0)
    return torch.div(x, divisor).to(gate.dtype).mul_(up)


def whole_vector_splits(rows: int, width: int, threads: int) -> list[int]:
    """Row bounds 0, .., rows such that torch, splitting each part over `threads`, cuts between whole vectors only.

    `width` is a multiple of the vector length and at most one grain. A part either stays below the size that torch
    splits, or gives each thread the same number of whole rows.
    """
    if threads == 1 or rows * width <= _GRAIN or (threads == 2 and width % (2 * _VECTOR_ELEMENTS) == 0):
        return [0, rows]
    per_thread = -(-_GRAIN // width)
    even = rows - rows % (threads * per_thread)
    single = _GRAIN // width
    bounds = [0] if even == 0 else [0, even]
    while bounds[-1] < rows:
        bounds.append(min(bounds[-1] + single, rows))
    return bounds


def embedding(token_ids: torch.Tensor, table: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows of table [vocab, hidden] for token_ids [rows] int64, in `dtype`."""
    return table.index_select(0, token_ids).to(dtype)


def write_kv(cache: torch.Tensor, slots: torch.Tensor, kv: torch.Tensor) -> None:
    """Stores kv [rows, row_width] at `slots` [rows] int64 of cache [num_slots + 1, row_width], in the cache's dtype."""
    cache.index_copy_(0, slots, kv.to(cache.dtype))
