"""Writes a file of packed weights, tensor by tensor, into shared mappings: nothing of it lies in a process's own heap.

Where no file can be kept (a folder that cannot be written, a full disk), the tensors go to a file in memory, sealed
when it is whole, and where the system has none to anonymous shared memory.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from evensong.kernels.cpu.packed_file import (
    HEADER_BYTES,
    Bytes,
    Checksum,
    Float32,
    PackedFile,
    Record,
    TensorMeta,
    crc32,
    header_and_table,
    map_packed,
    open_packed,
    with_checksums,
)
from evensong.kernels.cpu.packed_folder import LOCK_NAME, PART_SUFFIX, prune, sweep
from evensong.sources.cache import locked
from evensong.utils.logging import get_logger

# Linux 5.1: no new writable mappings; those that are still there stay (linux/fcntl.h).
_F_SEAL_FUTURE_WRITE = 0x10
_T = TypeVar("_T")

logger = get_logger(__name__)


class _Store(Protocol):
    """Where a writer's tensors lie. Every method may raise OSError."""

    def grow(self, offset: int, nbytes: int) -> Bytes:
        """A writable view of new zeros."""

    def views(self, records: list[Record]) -> list[Bytes]:
        """What was written."""

    def finish(self, path: Path, key: str, records: list[Record], extra: dict[str, Any]) -> PackedFile:
        """All tensors, read-only."""

    def discard(self) -> None:
        """Gives back what it holds; may be called twice."""


class _FileStore:
    """An open file under a name of its own, in the folder of `path`, until it is whole."""

    def __init__(self, path: Path) -> None:
        folder = path.parent
        # Under the lock, a sweep does not come between the file's making and its own lock.
        with locked(folder / LOCK_NAME):
            sweep(folder)
            self._handle, name = tempfile.mkstemp(dir=folder, prefix=f".{path.name}.", suffix=PART_SUFFIX)
            self.discard = weakref.finalize(self, _close, self._handle, Path(name))
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._part = Path(name)

    def grow(self, offset: int, nbytes: int) -> Bytes:
        return _grow(self._handle, offset, nbytes)

    def views(self, records: list[Record]) -> list[Bytes]:
        return _views(self._handle, records)

    def finish(self, path: Path, key: str, records: list[Record], extra: dict[str, Any]) -> PackedFile:
        _write_frame(self._handle, key, records, extra)
        with locked(path.parent / LOCK_NAME):
            # Another writer may have been quicker: all share its pages.
            file = open_packed(path, key)
            if file is None:
                os.replace(self._part, path)
                prune(path.parent, fresh=path)
                file = map_packed(path, key)
        self.discard()
        if file is None:
            raise OSError(f"{path} was replaced")
        return file


class _MemoryStore:
    """A memfd with the same layout."""

    def __init__(self, name: str) -> None:
        self._handle = os.memfd_create(f"evensong-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.discard = weakref.finalize(self, _close, self._handle, None)

    def grow(self, offset: int, nbytes: int) -> Bytes:
        return _grow(self._handle, offset, nbytes)

    def views(self, records: list[Record]) -> list[Bytes]:
        return _views(self._handle, records)

    def finish(self, path: Path, key: str, records: list[Record], extra: dict[str, Any]) -> PackedFile:
        _write_frame(self._handle, key, records, extra)
        self._seal()
        # Opened anew, for reading only: older kernels map a sealed file shared in no other way.
        file = map_packed(Path(f"/proc/self/fd/{self._handle}"), key)
        self.discard()
        assert file is not None
        file.path = None
        return file

    def _seal(self) -> None:
        sizes = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
        try:
            fcntl.fcntl(self._handle, fcntl.F_ADD_SEALS, sizes | fcntl.F_SEAL_WRITE)
        except OSError:  # somebody still holds a view that `add` gave
            fcntl.fcntl(self._handle, fcntl.F_ADD_SEALS, sizes | _F_SEAL_FUTURE_WRITE)


class _AnonymousStore:
    """One anonymous mapping a tensor, shared with children of a fork."""

    def __init__(self) -> None:
        self._views: dict[int, Bytes] = {}

    def grow(self, offset: int, nbytes: int) -> Bytes:
        self._views[offset] = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
        return self._views[offset]

    def views(self, records: list[Record]) -> list[Bytes]:
        return [self._views[record.offset] for record in records]

    def finish(self, path: Path, key: str, records: list[Record], extra: dict[str, Any]) -> PackedFile:
        views = self.views(records)
        for view in views:
            view.flags.writeable = False
        return PackedFile(None, records, views, extra)

    def discard(self) -> None:
        self._views.clear()


class PackedWriter:
    """Tensors on their way into `path`. Use it as a context: what is not committed leaves nothing behind.

    A view that `add` gave must be filled before the next call: it may be copied then, if the disk is full. It holds a
    file descriptor until it is dropped.
    """

    def __init__(self, path: Path, key: str) -> None:
        self._path = path
        self._key = key
        self._records: list[Record] = []
        self._end = HEADER_BYTES
        try:
            self._store: _Store = _FileStore(path)
        except OSError as error:
            self._store = self._in_memory(error)

    def __enter__(self) -> PackedWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._store.discard()

    def add(self, name: str, nbytes: int, meta: TensorMeta) -> Bytes:
        """`nbytes` zeros, page-aligned, to be filled. Raises ValueError for a name that is there, or no bytes."""
        if nbytes <= 0 or any(record.name == name for record in self._records):
            raise ValueError(f"the packed tensor {name} has {nbytes} bytes, or is there twice")
        page = mmap.ALLOCATIONGRANULARITY
        offset = -(-self._end // page) * page
        view = self._stored(lambda store: store.grow(offset, nbytes))
        self._records.append(Record(name, meta, offset, nbytes))
        self._end = offset + nbytes
        return view

    def add_plain(self, name: str, values: Float32) -> None:
        """A float32 array [cols] or [rows, cols] as it is: norm weights, biases."""
        flat = np.ascontiguousarray(values, np.float32)
        rows, cols = flat.shape if flat.ndim == 2 else (1, flat.size)
        view = self.add(name, flat.nbytes, TensorMeta(rows, cols, "float32", kind="plain"))
        view[:] = flat.reshape(-1).view(np.uint8)

    def commit(self, extra: dict[str, Any] | None = None, checksum: Checksum = crc32, threads: int = 1) -> PackedFile:
        """The file as all others see it from now on; `extra` must be JSON. Views that `add` gave must not be used."""

        def finish(store: _Store) -> PackedFile:
            # No name for the views: a memfd is sealed when nobody can write it any more.
            records = with_checksums(self._records, store.views(self._records), checksum, threads)
            return store.finish(self._path, self._key, records, extra or {})

        return self._stored(finish)

    def _stored(self, action: Callable[[_Store], _T]) -> _T:
        """What `action` gives on the store, or after an OSError on the next kind of store, with all tensors in it."""
        while True:
            try:
                return action(self._store)
            except OSError as error:
                if isinstance(self._store, _AnonymousStore):
                    raise
                other = self._in_memory(error)
                try:
                    self._copy_to(other)
                except OSError:
                    other = _AnonymousStore()
                    self._copy_to(other)
                self._store.discard()
                self._store = other

    def _in_memory(self, error: OSError) -> _Store:
        """The next kind of store after the one that gave `error`."""
        store = getattr(self, "_store", None)
        if not isinstance(store, _MemoryStore):
            logger.warning(
                "packed weights cannot be kept in %s (%s): every process has its own, packed anew at each start",
                self._path.parent,
                error.strerror or error,
            )
            # Not on every system, and not in every sandbox.
            with contextlib.suppress(OSError, AttributeError):
                return _MemoryStore(self._path.stem)
        return _AnonymousStore()

    def _copy_to(self, other: _Store) -> None:
        for record, view in zip(self._records, self._store.views(self._records), strict=True):
            other.grow(record.offset, record.nbytes)[:] = view


def open_or_pack(
    path: Path, key: str, pack: Callable[[PackedWriter], dict[str, Any]], checksum: Checksum = crc32, threads: int = 1
) -> PackedFile:
    """The packed weights in `path`, written first where they are not there: `pack` adds tensors and gives `extra`.

    Processes that start at once wait for the one that packs, and map its file. What was there is not verified here.
    """
    file = open_packed(path, key)
    if file is not None:
        return file
    with _packing(path):
        file = open_packed(path, key)
        if file is not None:
            return file
        with PackedWriter(path, key) as writer:
            extra = pack(writer)
            return writer.commit(extra, checksum, threads)


@contextlib.contextmanager
def _packing(path: Path) -> Iterator[None]:
    """Holds this file's packing lock, where the folder can be written."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            stack.enter_context(locked(path.with_name(path.name + ".lock")))
        yield


def _grow(handle: int, offset: int, nbytes: int) -> Bytes:
    # Blocks are taken now: a disk that is full when a mapped page is written ends the process with SIGBUS.
    os.posix_fallocate(handle, offset, nbytes)
    return np.frombuffer(mmap.mmap(handle, nbytes, offset=offset), np.uint8)


def _views(handle: int, records: list[Record]) -> list[Bytes]:
    if not records:
        return []
    whole = np.frombuffer(mmap.mmap(handle, 0, mmap.MAP_SHARED, mmap.PROT_READ), np.uint8)
    return [whole[record.offset : record.offset + record.nbytes] for record in records]


def _write_frame(handle: int, key: str, records: list[Record], extra: dict[str, Any]) -> None:
    """Puts header and table around the tensors."""
    end = max((record.offset + record.nbytes for record in records), default=HEADER_BYTES)
    offset = -(-end // 8) * 8
    header, table = header_and_table(key, records, extra, offset)
    os.ftruncate(handle, offset)
    _write_all(handle, table, offset)
    _write_all(handle, header, 0)


def _write_all(handle: int, data: bytes, offset: int) -> None:
    while data:
        written = os.pwrite(handle, data, offset)
        data, offset = data[written:], offset + written


def _close(handle: int, part: Path | None) -> None:
    """The file without its name, if it still has that, then its lock and itself."""
    if part is not None:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
    os.close(handle)
