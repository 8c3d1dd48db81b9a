"""Packed weights on disk: one file that every process of the host maps read-only, so that they share its pages.

Layout: a header of one page, tensors at page-aligned offsets, a table of them in JSON at the end. The header's digest
covers the table; the table has a checksum of each tensor. A file is written under another name and renamed when it is
whole (packed_writer.py), so what has the name has always been whole once.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import re
import struct
import zlib
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from evensong.sources.cache import cache_dir
from evensong.utils.logging import get_logger

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Float32 = np.ndarray[Any, np.dtype[np.float32]]
# (bytes, seed) -> a number below 2**64; lets other threads run meanwhile.
Checksum = Callable[[Bytes, int], int]

FORMAT_VERSION = 1
HEADER_BYTES = 4096
ALIGNMENT = 64
_MAGIC = b"evenpack"
# magic, version, -, key, bytes of the file, offset and bytes of the table, digest of all that and the table
_HEADER = struct.Struct("<8sII32sQQQ16s")
_MAX_TABLE = 64 << 20
_SEED = 0

logger = get_logger(__name__)


def crc32(data: Bytes, seed: int) -> int:
    """A checksum from the standard library, for where no faster one is at hand."""
    return zlib.crc32(data.data, seed)


def packed_key(parts: Mapping[str, Any]) -> str:
    """64 hex digits that name what was packed and how; `parts` must hold all that the bytes depend on, as JSON."""
    text = json.dumps({"format": FORMAT_VERSION, **parts}, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=32).hexdigest()


def packed_path(model: str, key: str, part: str = "") -> Path:
    """Where the packed weights of a model with this key are kept; `part`: which of a model that several ranks share."""
    prefix = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(model).name).strip(".-")[:40] or "model"
    # Each part counts as a model of its own where old files are removed.
    return cache_dir() / "packed" / f"{prefix}{'.' * bool(part)}{part}-{key[:16]}.bin"


@dataclass(frozen=True)
class TensorMeta:
    """What a tensor is: `rows` outputs, `cols` inputs before padding. kind "plain": float32 values as they are."""

    rows: int
    cols: int
    dtype: str
    gated: bool = False
    kind: str = "packed"


@dataclass(frozen=True, eq=False)
class Entry:
    """A tensor: the fields of its TensorMeta, and its bytes, a read-only view of the mapping aligned to 64 bytes."""

    rows: int
    cols: int
    dtype: str
    gated: bool
    kind: str
    data: Bytes

    def floats(self) -> Float32:
        """A plain entry's values [rows, cols], or [cols] where it has one row. Read-only."""
        assert self.kind == "plain", "packed bytes are no plain values"
        values: Float32 = self.data.view(np.float32)
        return values if self.rows == 1 else values.reshape(self.rows, self.cols)


@dataclass(frozen=True)
class Record:
    """A line of the table."""

    name: str
    meta: TensorMeta
    offset: int
    nbytes: int
    checksum: int = 0


class DamagedError(OSError):
    """A file that is not what was written."""


class PackedFile:
    """Tensors by name. `path`: None where they are in memory only, because no file could be kept."""

    def __init__(self, path: Path | None, records: list[Record], views: list[Bytes], extra: dict[str, Any]) -> None:
        self.path = path
        self.extra = extra
        self._checksums = {record.name: record.checksum for record in records}
        self._entries = {
            record.name: Entry(**asdict(record.meta), data=view) for record, view in zip(records, views, strict=True)
        }

    @property
    def names(self) -> list[str]:
        """All tensors, in the order in which they were added."""
        return list(self._entries)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.data.nbytes for entry in self._entries.values())

    def entry(self, name: str) -> Entry:
        """The tensor of that name. Raises KeyError."""
        return self._entries[name]

    def verify(self, checksum: Checksum = crc32, threads: int = 1, used: Used | None = None) -> bool:
        """Whether all bytes are those that were written; reads them all, or those of the tensors that are used.

        A file with others is removed.
        """
        names = self.names if used is None else sorted(used(self))
        found = _checksums([self._entries[name].data for name in names], checksum, threads)
        for name, value in zip(names, found, strict=True):
            if value != self._checksums[name]:
                _remove_damaged(self.path, f"the bytes of {name} are others than were written")
                return False
        return True

    def close(self) -> None:
        """Forgets all tensors. The mapping goes with the last view of it."""
        self._entries = {}
        self._checksums = {}


# Names of the tensors that will be used.
Used = Callable[[PackedFile], Collection[str]]


def open_packed(
    path: Path, key: str, checksum: Checksum | None = None, threads: int = 1, used: Used | None = None
) -> PackedFile | None:
    """The packed weights in `path`; None where there are none with this key. A damaged file is removed.

    With `checksum`, every tensor is verified, which reads the whole file, or only those that are used.
    """
    try:
        file = map_packed(path, key)
    except DamagedError as error:
        _remove_damaged(path, str(error))
        return None
    except OSError:
        return None
    if file is None or (checksum is not None and not file.verify(checksum, threads, used)):
        return None
    try:
        os.utime(path)  # the time of last use, for prune
    except OSError:
        pass
    return file


def map_packed(path: Path, key: str) -> PackedFile | None:
    """Like open_packed, but raises OSError and, for damage, DamagedError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(handle).st_size
        header = os.pread(handle, _HEADER.size, 0)
        if size < HEADER_BYTES or header[:8] != _MAGIC:
            raise DamagedError("it is not a file of packed weights")
        _, version, _, stored_key, file_bytes, table_offset, table_bytes, digest = _HEADER.unpack(header)
        if version != FORMAT_VERSION:
            return None
        if file_bytes != size or table_bytes > _MAX_TABLE or table_offset + table_bytes != size:
            raise DamagedError(f"it has {size} bytes, {file_bytes} were written")
        table = os.pread(handle, table_bytes, table_offset)
        if _digest(header, table) != digest:
            raise DamagedError("its header or its table has changed")
        if stored_key.hex() != key:
            return None
        records, extra = _parse_table(table, table_offset)
        whole = mmap.mmap(handle, size, mmap.MAP_SHARED, mmap.PROT_READ)
        # What is not in the page cache comes there in large folios, whatever the disk's read-ahead.
        advise(whole, "MADV_HUGEPAGE")
    finally:
        os.close(handle)
    data = np.frombuffer(whole, np.uint8)
    views = [data[record.offset : record.offset + record.nbytes] for record in records]
    return PackedFile(path, records, views, extra)


def advise(memory: mmap.mmap, name: str) -> None:
    """Advice about all of the memory, where the system knows it by this name and heeds it."""
    with contextlib.suppress(OSError):
        if (advice := getattr(mmap, name, None)) is not None:
            memory.madvise(advice)


def header_and_table(key: str, records: list[Record], extra: dict[str, Any], table_offset: int) -> tuple[bytes, bytes]:
    """What a file of these records starts with, and what it ends with at `table_offset`."""
    lines = [[r.name, asdict(r.meta), r.offset, r.nbytes, r.checksum] for r in records]
    table = json.dumps({"tensors": lines, "extra": extra}).encode()
    fields = (_MAGIC, FORMAT_VERSION, 0, bytes.fromhex(key), table_offset + len(table), table_offset, len(table))
    digest = _digest(_HEADER.pack(*fields, bytes(16)), table)
    return _HEADER.pack(*fields, digest), table


def with_checksums(records: list[Record], views: list[Bytes], checksum: Checksum, threads: int) -> list[Record]:
    """The records with the checksums of their bytes."""
    values = _checksums(views, checksum, threads)
    return [Record(r.name, r.meta, r.offset, r.nbytes, value) for r, value in zip(records, values, strict=True)]


def _checksums(views: list[Bytes], checksum: Checksum, threads: int) -> list[int]:
    if threads == 1:
        return [checksum(view, _SEED) for view in views]
    with ThreadPoolExecutor(max_workers=threads, thread_name_prefix="checksum") as pool:
        return list(pool.map(lambda view: checksum(view, _SEED), views))


def _digest(header: bytes, table: bytes) -> bytes:
    return hashlib.blake2b(header[:-16] + table, digest_size=16).digest()


def _parse_table(table: bytes, end: int) -> tuple[list[Record], dict[str, Any]]:
    """The table's records, all of whose bytes lie before `end`."""
    try:
        values = json.loads(table)
        records = [Record(name, TensorMeta(**meta), *rest) for name, meta, *rest in values["tensors"]]
        extra = values["extra"]
        for record in records:
            start, nbytes = record.offset, record.nbytes
            if start % ALIGNMENT or not HEADER_BYTES <= start < start + nbytes <= end:
                raise ValueError(f"{record.name} at {start}")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedError(f"its table cannot be used: {error!r:.200}") from error
    return records, extra


def _remove_damaged(path: Path | None, reason: str) -> None:
    if path is None:
        logger.warning("the packed weights in memory are damaged: %s", reason)
        return
    logger.warning("the packed weights in %s are damaged and are removed: %s", path, reason)
    try:
        path.unlink(missing_ok=True)
    except OSError:
        pass  # it stays, and is found damaged again
