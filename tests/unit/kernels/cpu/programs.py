"""Small native programs made by hand, steps for them, and memory that ranks share."""

from __future__ import annotations

import mmap
import os
import struct
from typing import Any

import numpy as np

from evensong import _native

VOCAB, WIDTH, BLOCK, MAX_ROWS, MAX_SAMPLES = 90, 40, 16, 48, 12
ROW = struct.Struct("=dddqQQqiiii")  # SampleRow of native/src/step.h
LOGITS, DRAW = 0, 1

Array = np.ndarray[Any, Any]


def noise(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def weight_of(matrix: Array, isa: str) -> Any:
    """In float32, so that an embedding gives the rows as they are."""
    return _native.Weight(_native.pack(matrix, isa, "float32"), *matrix.shape, "float32", isa)


def new_program(isa: str, **more: Any) -> Any:
    limits = {"max_rows": MAX_ROWS, "max_samples": MAX_SAMPLES, "max_positions": 256, "num_blocks": 8}
    return _native.Program(isa, **{**limits, "block_size": BLOCK, "num_feed_slots": 8, "vocab_size": VOCAB, **more})


def submit(
    engine: Any, program: Any, tokens: list[int], rows: list[int] | None = None, samples: bytes = b"", **more: Any
) -> int:
    """A step of one sequence in blocks 0..3; a ticket."""
    counts, starts = np.array([len(tokens)], np.int32), np.zeros(1, np.int32)
    tables = [np.arange(4, dtype=np.int32)[None]]
    rows_array, samples_array = np.array(rows or [], np.int64), np.frombuffer(samples, np.uint8)
    ticket: int = engine.submit(
        program, counts, starts, tables, np.array(tokens, np.int64), rows_array, samples_array, **more
    )
    return ticket


def draw(*, slot: int = -1, temperature: float = 0.0, seed: int = 0, mask: int = -1) -> bytes:
    return ROW.pack(temperature, 1.0, 0.0, 0, seed, 7, -1, DRAW, -1, slot, mask)


def logits_only(count: int) -> bytes:
    return ROW.pack(0.0, 1.0, 0.0, 0, 0, 0, -1, LOGITS, -1, -1, -1) * count


def shared_memory(size: int) -> tuple[int, Array]:
    """A file in memory of so many zeros, and a view of it; the caller closes the file."""
    fd = os.memfd_create("links", 0)
    os.ftruncate(fd, size)
    return fd, mapped(fd, size)


def mapped(fd: int, size: int) -> Array:
    return np.frombuffer(mmap.mmap(fd, size), np.uint8)


def memory_of(size: int) -> Array:
    """Shared memory for threads of this process."""
    fd, memory = shared_memory(size)
    os.close(fd)
    return memory
