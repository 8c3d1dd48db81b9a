"""Chained hashes of full blocks: equal hashes mean equal tokens from position 0 on.

The root is seeded by the engine's fingerprint and the request's salt, so that neither another model's blocks nor
another tenant's can be hit. BLAKE2b (RFC 7693) with 256 bits: a wrong hit would be a collision of the hash itself.
"""

from __future__ import annotations

import array
from collections.abc import Sequence
from hashlib import blake2b

DIGEST_BYTES = 32


def root_hash(fingerprint: str, cache_salt: str | None) -> bytes:
    """The parent of a sequence's first block."""
    salt = b"\x00" if cache_salt is None else b"\x01" + cache_salt.encode("utf-8", "surrogatepass")
    return blake2b(fingerprint.encode() + b"\x00" + salt, digest_size=DIGEST_BYTES).digest()


def block_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The hash of a full block that follows `parent`."""
    return blake2b(parent + array.array("i", token_ids).tobytes(), digest_size=DIGEST_BYTES).digest()


def extend_hashes(hashes: list[bytes], root: bytes, token_ids: Sequence[int], block_size: int) -> None:
    """Appends to `hashes` those of the full blocks of `token_ids` that it lacks."""
    parent = hashes[-1] if hashes else root
    for start in range(len(hashes) * block_size, len(token_ids) - block_size + 1, block_size):
        parent = block_hash(parent, token_ids[start : start + block_size])
        hashes.append(parent)
