"""Mutations: of bytes, and of what a file says (which bytes alone seldom reach, since lengths must fit)."""

from __future__ import annotations

import json
import random
import struct
from typing import Any

from tests.fuzz import make_seeds as seeds

_NUMBERS = (0, 1, 2, 3, 4, 7, 8, 31, 32, 33, 255, 256, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1)
_FLOATS = (0.0, -0.0, 1.0, -1.5, 1e38, float("inf"), float("-inf"), float("nan"))
_STRINGS = ("", "x", "a b", "none", "linear", "yarn", "longrope", "llama", "gpt2", "ä", "\n", "\0", "%s{}", "a" * 300)
_JSON: tuple[Any, ...] = (
    None,
    True,
    False,
    -1,
    0,
    1,
    4,
    2**63,
    2**64,
    10**30,
    0.5,
    1e400,
    "",
    "F32",
    [],
    {},
    [1],
    "\n",
)


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    """`data` with a few bytes changed, left out, repeated or put in, numbers of 4 and 8 bytes among them, or cut."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at, length = rng.randrange(len(out) + 1), rng.choice((1, 2, 4, 8, 16))
        number = rng.choice(_NUMBERS) & (2 ** (8 * min(length, 8)) - 1)
        change = rng.randrange(6)
        if change == 0 and at < len(out):
            out[at] ^= 1 << rng.randrange(8)
        elif change == 1:
            out[at : at + length] = rng.randbytes(length)
        elif change == 2:
            out[at : at + min(length, 8)] = number.to_bytes(min(length, 8), "little")
        elif change == 3:
            del out[at : at + length]
        elif change == 4:
            out[at:at] = out[at : at + length]
        else:
            del out[at:]
    return bytes(out)


def mutate_gguf(rng: random.Random) -> bytes:
    """A sound file about an unsound model: values of other kinds, tensors of other shapes."""
    values, tensors = rng.choice(seeds.models())
    for _ in range(rng.choice((1, 1, 2, 3))):
        key = rng.choice((*values, "general.alignment", "split.count", "llama.rope.scaling.type", "llama.expert_count"))
        if rng.random() < 0.2:
            values.pop(key, None)
        else:
            values[key] = _gguf_value(rng, values.get(key))
    if rng.random() < 0.5:
        name = rng.choice((*tensors, "rope_freqs.weight", "rope_factors_long.weight", "output.weight", "blk.0.x"))
        shape = tuple(rng.choice((1, 2, 4, 8, 32)) for _ in range(rng.randint(1, 4)))
        tensors[name] = (rng.choice(("F32", "F16", "BF16")), shape)
    return seeds.gguf_bytes(values, tensors)


def _gguf_value(rng: random.Random, old: Any) -> tuple[Any, Any]:
    kind = rng.choice(
        (seeds.U8, seeds.I32, seeds.U32, seeds.U64, seeds.I64, seeds.F32, seeds.BOOL, seeds.STRING, "array")
    )
    if kind == "array":
        if old and isinstance(old[0], tuple) and rng.random() < 0.7:  # another length
            return old[0], list(old[1])[: rng.randrange(len(old[1]) + 1)] * rng.choice((1, 2))
        item = rng.choice((seeds.U32, seeds.F32, seeds.STRING))
        return (seeds.ARRAY, item), [_gguf_scalar(rng, item) for _ in range(rng.randrange(6))]
    return kind, _gguf_scalar(rng, kind)


def _gguf_scalar(rng: random.Random, kind: int) -> Any:
    if kind == seeds.STRING:
        return rng.choice(_STRINGS)
    if kind == seeds.BOOL:
        return rng.random() < 0.5
    if kind == seeds.F32:
        value = rng.choice(_FLOATS)
        return value if abs(value) < 3e38 or value in (float("inf"), float("-inf")) or value != value else 0.0
    size = {seeds.U8: 1, seeds.I32: 4, seeds.U32: 4, seeds.U64: 8, seeds.I64: 8}[kind]
    number = rng.choice(_NUMBERS) & (2 ** (8 * size) - 1)
    return number - 2 ** (8 * size) if kind in (seeds.I32, seeds.I64) and number >= 2 ** (8 * size - 1) else number


def mutate_header(data: bytes, rng: random.Random) -> bytes:
    """A safetensors file whose header says something else, in JSON or nearly so, and has the length that it says."""
    length = int.from_bytes(data[:8], "little")
    text, rest = data[8 : 8 + length], data[8 + length :]
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        header = None
    if isinstance(header, dict) and rng.random() < 0.7:
        text = json.dumps(_mutate_json(header, rng)).encode()
        if rng.random() < 0.1:  # a name twice
            text = text[:-1] + b"," + text[1:]
    else:
        text = mutate_bytes(text, rng)
    return struct.pack("<Q", len(text)) + text + rest


def _mutate_json(value: Any, rng: random.Random) -> Any:
    if rng.random() < 0.15:
        return rng.choice(_JSON)
    if isinstance(value, dict) and value:
        key = rng.choice([*value])
        if rng.random() < 0.15:
            return {(rng.choice(_STRINGS) if k == key else k): v for k, v in value.items()}
        return {**value, key: _mutate_json(value[key], rng)}
    if isinstance(value, list) and value:
        at = rng.randrange(len(value))
        return [*value[:at], _mutate_json(value[at], rng), *value[at + 1 :]][: rng.choice((99, 99, 99, at))]
    if isinstance(value, int):
        return value + rng.choice((-1, 1, 2, 4, 2**32, 2**64, -value))
    return rng.choice(_JSON)


def mutated(target: str, data: bytes, rng: random.Random) -> bytes:
    """One mutation of `data`, an input of the target "gguf" or "safetensors"; for GGUF perhaps of another seed."""
    if target == "gguf" and rng.random() < 0.5:
        made = mutate_gguf(rng)
        return mutate_bytes(made, rng) if rng.random() < 0.2 else made
    if target == "safetensors" and rng.random() < 0.7:
        return mutate_header(data, rng)
    return mutate_bytes(data, rng)
