"""Writes a file of packed weights, tensor by tensor, in large pieces: nothing of it lies in a process's own heap.

Large pieces because of the page cache: Linux keeps what one write brings in large folios, which need few entries of the
processor's TLB. What is written through a mapping lies there page by page, and reading it takes a quarter longer.

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
    Used,
    advise,
    crc32,
    header_and_table,
    map_packed,
    open_packed,
    with_checksums,
)
from evensong.kernels.cpu.packed_folder import LOCK_NAME, PART_SUFFIX, prune, sweep
from evensong.sources.cache import locked
from evensong.utils.logging import get_logger

# What one write takes at least, if there is so much: several of the largest folios.
_PIECE_BYTES = 16 << 20
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


class _Pieces:
    """The bytes of an open file: what has been written, and a piece on its way there, in memory of its own."""

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self._begin = self._end = 0  # of the piece, in the file
        self._piece = np.empty(0, np.uint8)

    def grow(self, offset: int, nbytes: int) -> Bytes:
        """A view of new zeros, at `offset` or more after the last."""
        if offset + nbytes - self._begin > len(self._piece):
            self.write()
            self._begin = self._end = offset
            if nbytes > len(self._piece):
                # Not the heap's: it goes back to the system with its last view.
                self._piece = np.frombuffer(_anonymous(max(nbytes, _PIECE_BYTES)), np.uint8)
        view = self._piece[offset - self._begin : offset + nbytes - self._begin]
        self._piece[self._end - self._begin : offset + nbytes - self._begin] = 0
        self._end = offset + nbytes
        return view

    def write(self) -> None:
        """Brings the piece into the file. Where that fails, it is still here."""
        _write_all(self._handle, self._piece[: self._end - self._begin].data, self._begin)

    def views(self, records: list[Record]) -> list[Bytes]:
        """Of written tensors from the file, and of those of the piece from memory."""
        size = os.fstat(self._handle).st_size
        whole = np.frombuffer(mmap.mmap(self._handle, 0, mmap.MAP_SHARED, mmap.PROT_READ) if size else b"", np.uint8)
        parts = [
            (self._piece, r.offset - self._begin) if r.offset >= self._begin else (whole, r.offset) for r in records
        ]
        return [part[at : at + record.nbytes] for (part, at), record in zip(parts, records, strict=True)]

    def write_frame(self, key: str, records: list[Record], extra: dict[str, Any]) -> None:
        """The rest of the piece, and header and table around the tensors."""
        self.write()
        self._piece, self._begin, self._end = np.empty(0, np.uint8), self._end, self._end
        end = max((record.offset + record.nbytes for record in records), default=HEADER_BYTES)
        offset = -(-end // 8) * 8
        header, table = header_and_table(key, records, extra, offset)
        os.ftruncate(self._handle, offset)
        _write_all(self._handle, memoryview(table), offset)
        _write_all(self._handle, memoryview(header), 0)


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
        pieces = _Pieces(self._handle)
        self.grow, self.views, self._write_frame = pieces.grow, pieces.views, pieces.write_frame

    def finish(self, path: Path, key: str, records: list[Record], extra: dict[str, Any]) -> PackedFile:
        self._write_frame(key, records, extra)
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
        pieces = _Pieces(self._handle)
        self.grow, self.views, self._write_frame = pieces.grow, pieces.views, pieces.write_frame

    def finish(self, path: Path, key: str, records: list[Record], extra: dict[str, Any]) -> PackedFile:
        self._write_frame(key, records, extra)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
        fcntl.fcntl(self._handle, fcntl.F_ADD_SEALS, seals)
        # Opened anew, for reading only: older kernels map a sealed file shared in no other way.
        file = map_packed(Path(f"/proc/self/fd/{self._handle}"), key)
        self.discard()
        assert file is not None
        file.path = None
        return file


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

    A view that `add` gave must be filled before the next call, and not be used from then on: what it shows may be
    written then, and its memory is used again.
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
        """The file as all others see it from now on; `extra` must be JSON."""

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
    path: Path,
    key: str,
    pack: Callable[[PackedWriter], dict[str, Any]],
    checksum: Checksum = crc32,
    threads: int = 1,
    used: Used | None = None,
) -> PackedFile:
    """The packed weights in `path`, written first where they are not there: `pack` adds tensors and gives `extra`.

    Processes that start at once wait for the one that packs, and map its file. What was there is verified, all of it or
    what will be used, and where it is damaged packed anew.
    """
    file = open_packed(path, key, checksum, threads, used)
    if file is not None:
        return file
    with _packing(path):
        file = open_packed(path, key, checksum, threads, used)
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


def _anonymous(nbytes: int) -> mmap.mmap:
    """New memory, in huge pages where the system gives them."""
    memory = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    advise(memory, "MADV_HUGEPAGE")
    return memory


def _write_all(handle: int, data: memoryview, offset: int) -> None:
    while len(data):
        written = os.pwrite(handle, data, offset)
        data, offset = data[written:], offset + written


def _close(handle: int, part: Path | None) -> None:
    """The file without its name, if it still has that, then its lock and itself."""
    if part is not None:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
    os.close(handle)
