"""Whether a model's files hold the tensors that the model has, before anything is allocated for one of them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping

from evensong.protocol.errors import ConfigError
from evensong.sources.gguf_file import GGML_TYPES
from evensong.sources.weights import TensorEntry, Weights

_BLOCKS = {name: (block, block_bytes) for name, block, block_bytes in GGML_TYPES.values()}


def check_tensors(
    expected: Mapping[str, tuple[int, ...]], weights: Weights | Mapping[str, TensorEntry], ignored: Collection[str] = ()
) -> None:
    """Compares names and shapes that a model expects with those of its files; reads no tensor.

    `ignored`: tensors that the files may hold and that the model does not use. Raises one ConfigError that names the
    first tensor, in the model's order, that is missing, has another shape or other than the bytes of its shape, and
    says how many more there are; surplus tensors come last.
    """
    problems = _problems(expected, weights)
    first = next(problems, None)
    if first is not None:
        more = sum(1 for _ in problems)
        if more:
            first += f"; {more} more tensor{'s are' if more > 1 else ' is'} missing or not as expected"
        raise ConfigError(first)
    surplus = sorted(set(weights) - set(expected) - set(ignored))
    if surplus:
        many = f"{len(surplus)} tensors" if len(surplus) > 1 else "1 tensor"
        raise ConfigError(f"the model's files hold {many} that the model does not have, such as {surplus[0]!r:.200}")


def _problems(expected: Mapping[str, tuple[int, ...]], weights: Mapping[str, TensorEntry]) -> Iterator[str]:
    for name, shape in expected.items():
        entry = weights.get(name)
        if entry is None:
            yield f"the model's files hold no tensor {name}"
        elif entry.shape != tuple(shape):
            yield f"the tensor {name} has shape {list(entry.shape)}, expected {list(shape)}"
        elif (reason := _inconsistent(entry)) is not None:
            yield f"the tensor {name} {reason}"


def _inconsistent(entry: TensorEntry) -> str | None:
    """What keeps an entry from being read, or None."""
    if entry.dtype not in _BLOCKS:
        return f"is of type {entry.dtype!r:.40}, not supported"
    block, block_bytes = _BLOCKS[entry.dtype]
    values = math.prod(entry.shape)
    if values <= 0 or entry.shape[-1] % block:
        return f"of type {entry.dtype} has shape {list(entry.shape)}, which is not one of blocks of {block}"
    needed = values // block * block_bytes
    if entry.data.nbytes != needed:
        return f"has {entry.data.nbytes} bytes, {needed} are those of {entry.dtype} {list(entry.shape)}"
    if entry.rotary_heads and (entry.rotary_heads < 0 or entry.shape[0] % (2 * entry.rotary_heads)):
        return f"has {entry.shape[0]} rows, which are not {entry.rotary_heads} heads"
    return None
