"""Packed weights on disk: what is written is what every process maps, and nothing else is ever taken for it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import signal
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evensong.kernels.cpu import packed_writer
from evensong.kernels.cpu.packed_file import (
    HEADER_BYTES,
    Bytes,
    PackedFile,
    TensorMeta,
    header_and_table,
    open_packed,
    packed_key,
    packed_path,
)
from evensong.kernels.cpu.packed_writer import PackedWriter, open_or_pack

KEY = packed_key({"source": "a", "isa": "avx2"})
META = TensorMeta(rows=100, cols=33, dtype="bfloat16", gated=True)
# Sizes below, at and above a page, and none of them round.
SIZES = {"a": 1, "b": 4096, "c": 9001, "d": 65537}


def content(name: str) -> Bytes:
    return np.random.default_rng(ord(name)).integers(0, 256, SIZES[name], dtype=np.uint8)


def pack(writer: PackedWriter) -> dict[str, Any]:
    for name, nbytes in SIZES.items():
        writer.add(name, nbytes, META)[:] = content(name)
    writer.add_plain("norm", np.arange(5, dtype=np.float32))
    writer.add_plain("table", np.arange(6, dtype=np.float32).reshape(2, 3))
    return {"note": [1, "ä"]}


def written(path: Path, key: str = KEY) -> PackedFile:
    with PackedWriter(path, key) as writer:
        return writer.commit(pack(writer))


def check_content(file: PackedFile) -> None:
    assert file.names == [*SIZES, "norm", "table"] and file.extra == {"note": [1, "ä"]}
    for name in SIZES:
        entry = file.entry(name)
        assert (entry.rows, entry.cols, entry.dtype, entry.gated, entry.kind) == (100, 33, "bfloat16", True, "packed")
        assert np.array_equal(entry.data, content(name)) and entry.data.ctypes.data % 64 == 0
        assert not entry.data.flags.writeable and entry.data.base is not None
        with pytest.raises(ValueError, match="read-only"):
            entry.data[0] = 0
    assert np.array_equal(file.entry("norm").floats(), np.arange(5, dtype=np.float32))
    assert np.array_equal(file.entry("table").floats(), np.arange(6, dtype=np.float32).reshape(2, 3))
    assert not file.entry("norm").floats().flags.writeable
    assert file.num_bytes == sum(SIZES.values()) + 44
    assert file.verify() and file.verify(threads=3)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "packed" / "model.bin"


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.WARNING, "evensong")
    return lambda: [record.getMessage() for record in caplog.records]


def files(folder: Path) -> list[str]:
    """What lies in the folder beside its lock."""
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def test_what_is_written_is_read(path: Path, warnings: Callable[[], list[str]]) -> None:
    assert open_packed(path, KEY) is None
    made = written(path)
    check_content(made)
    assert made.path == path and files(path.parent) == ["model.bin"]
    read = open_packed(path, KEY)
    assert read is not None
    made.close()
    assert made.names == []
    check_content(read)
    view = read.entry("c").data
    read.close()
    assert np.array_equal(view, content("c"))  # the mapping lives as long as a view of it
    assert warnings() == []


def test_a_file_without_tensors_and_one_whose_plain_values_are_no_array_of_rows(path: Path) -> None:
    with PackedWriter(path, KEY) as writer:
        file = writer.commit()
    assert file.names == [] and file.extra == {} and file.verify()
    with PackedWriter(path, packed_key({})) as writer:
        writer.add_plain("row", np.ones((1, 4), np.float64)[:, ::2])
        file = writer.commit()
    assert np.array_equal(file.entry("row").floats(), [1, 1]) and file.entry("row").dtype == "float32"


@pytest.mark.parametrize(("name", "nbytes"), [("x", 0), ("x", -1), ("a", 1)])
def test_no_bytes_and_names_that_are_there_are_refused(path: Path, name: str, nbytes: int) -> None:
    with PackedWriter(path, KEY) as writer:
        writer.add("a", 1, META)
        with pytest.raises(ValueError, match=f"tensor {name}"):
            writer.add(name, nbytes, META)
    assert files(path.parent) == []


def test_the_key_holds_all_that_it_is_made_of() -> None:
    parts: dict[str, Any] = {"source": "s", "isa": "i", "mode": ["a", 1]}
    assert packed_key(parts) == packed_key(dict(reversed(parts.items()))) and len(packed_key(parts)) == 64
    others = [{**parts, "isa": "j"}, {**parts, "mode": ["a", 2]}, {"source": "s", "isa": "i"}]
    assert len({packed_key(other) for other in [parts, *others]}) == 4


@pytest.mark.parametrize(
    ("model", "prefix"),
    [
        ("demo", "demo"),
        ("org/Name-1.5B", "Name-1.5B"),
        ("/a/b/m.gguf", "m.gguf"),
        ("..", "model"),
        ("ä b", "b"),
        ("", "model"),
    ],
)
def test_the_path_names_model_and_key(model: str, prefix: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EVENSONG_CACHE", str(tmp_path))
    assert packed_path(model, KEY) == tmp_path / "packed" / f"{prefix}-{KEY[:16]}.bin"


SMAPS = """
import re, sys
sys.path[:0] = {paths!r}
from pathlib import Path
from evensong.kernels.cpu.packed_file import open_packed
file = open_packed(Path({path!r}), {key!r})
total = sum(int(file.entry(name).data.sum()) for name in file.names)
print("ready", total, flush=True)
sys.stdin.readline()
text = Path("/proc/self/smaps").read_text()
inode = str(Path({path!r}).stat().st_ino)
for block in re.split(r"\\n(?=[0-9a-f]+-[0-9a-f]+ )", text):
    if block.split()[4] == inode:
        print(block.replace("\\n", ";"), flush=True)
"""


def test_two_processes_share_the_pages_of_one_file(path: Path) -> None:
    """Both have read all of it, and none of it is either's own."""
    with PackedWriter(path, KEY) as writer:
        writer.add("big", 8 << 20, META)[:] = 7
        writer.commit().close()
    program = SMAPS.format(paths=sys.path, path=str(path), key=KEY)
    command = [sys.executable, "-c", program]
    with contextlib.ExitStack() as stack:
        children = [
            stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
            for _ in range(2)
        ]
        assert all(child.stdout and child.stdout.readline() == f"ready {7 * (8 << 20)}\n" for child in children)
        reports = []
        for child in children:  # one after the other: both have the pages mapped while each looks
            assert child.stdin and child.stdout
            child.stdin.write("\n")
            child.stdin.flush()
            reports.append(child.stdout.readline())
        for child in children:
            child.kill()
    for report in reports:
        sizes = {name: int(kib) for name, kib in re.findall(r"(\w+): +(\d+) kB", report)}
        assert " r--s " in report.split(";")[0]
        # A page of the header or the table that the other has not mapped counts as private, but not as anonymous.
        assert sizes["Anonymous"] == 0, report
        assert sizes["Shared_Clean"] + sizes["Shared_Dirty"] >= 8 << 10
    assert len({report.split()[4] for report in reports}) == 1  # the inode


def places(path: Path) -> list[int]:
    """Lengths to which a file may be cut: nothing, in the header, at each tensor's ends, in the table, by one byte."""
    size = path.stat().st_size
    table = struct.unpack_from("<Q", path.read_bytes(), 56)[0]
    tensors = [at + step for at in range(HEADER_BYTES, size, 4096) for step in (-1, 0, 1)]
    return sorted({0, 1, 7, 8, 12, 50, 87, 88, 89, *tensors, table - 1, table, table + 1, size - 2, size - 1})


def test_a_truncated_file_is_removed(path: Path, warnings: Callable[[], list[str]]) -> None:
    written(path)
    whole = path.read_bytes()
    cuts = [place for place in places(path) if place < len(whole)]
    assert len(cuts) > 30
    for number, place in enumerate(cuts, 1):
        path.write_bytes(whole[:place])
        assert open_packed(path, KEY) is None, place
        assert not path.exists() and len(warnings()) == number and "damaged" in warnings()[-1]
    path.write_bytes(whole + b"\0")
    assert open_packed(path, KEY) is None and not path.exists()
    check_content(written(path))


def test_any_flipped_byte_of_header_and_table_is_seen_at_once(path: Path) -> None:
    written(path)
    whole = path.read_bytes()
    table = struct.unpack_from("<Q", whole, 56)[0]
    for place in [*range(88), *range(table, len(whole), 7)]:
        damaged = bytearray(whole)
        damaged[place] ^= 0x10
        path.write_bytes(damaged)
        assert open_packed(path, KEY) is None, place
        # Another version is another program's; the rest is damage.
        assert path.exists() == (8 <= place < 12), place
    path.write_bytes(whole)
    assert open_packed(path, KEY) is not None


@pytest.mark.parametrize("threads", [1, 3])
def test_a_flipped_byte_of_a_tensor_is_seen_when_verified(
    path: Path, threads: int, warnings: Callable[[], list[str]]
) -> None:
    written(path)
    whole = bytearray(path.read_bytes())
    place = whole.index(content("c").tobytes()) + 9000
    whole[place] ^= 1
    path.write_bytes(whole)
    file = open_packed(path, KEY)
    assert file is not None and not file.verify(zlib_seeded, threads)
    assert not path.exists() and len(warnings()) == 1 and "bytes of c" in warnings()[0]
    path.write_bytes(whole)
    assert open_packed(path, KEY, zlib_seeded, threads) is None and not path.exists()


@pytest.mark.parametrize("removable", [True, False])
def test_damaged_weights_are_packed_anew(
    path: Path, removable: bool, monkeypatch: pytest.MonkeyPatch, warnings: Callable[[], list[str]]
) -> None:
    written(path)
    whole = bytearray(path.read_bytes())
    whole[whole.index(content("c").tobytes())] ^= 1
    path.write_bytes(whole)
    if not removable:  # as in a folder that may only be read

        def refuse(*_: Any, **__: Any) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(Path, "unlink", refuse)
        monkeypatch.setattr(packed_writer.tempfile, "mkstemp", refuse)
    file = open_or_pack(path, KEY, pack, zlib_seeded, threads=2)
    check_content(file)
    assert (file.path == path) == removable and "bytes of c" in warnings()[0]
    assert (path.read_bytes() == bytes(whole)) != removable


def zlib_seeded(data: Bytes, seed: int) -> int:
    return zlib.crc32(data.data, seed)


def test_any_checksum_of_64_bits_is_kept(path: Path) -> None:
    def checksum(data: Bytes, seed: int) -> int:
        return 2**64 - 1 - len(data)

    with PackedWriter(path, KEY) as writer:
        writer.commit(pack(writer), checksum, threads=2)
    assert open_packed(path, KEY, checksum) is not None
    assert open_packed(path, KEY, zlib_seeded) is None  # other bytes, as far as one can tell


def test_another_key_leaves_the_file_and_its_own_writer_replaces_it(
    path: Path, warnings: Callable[[], list[str]]
) -> None:
    first, other = written(path), packed_key({"source": "b"})
    assert open_packed(path, other) is None and path.exists()
    written(path, other)
    assert open_packed(path, KEY) is None and open_packed(path, other) is not None
    check_content(first)  # its mapping is of the old file
    assert warnings() == []


def test_a_table_that_lies_is_damage_although_its_digest_holds(path: Path, warnings: Callable[[], list[str]]) -> None:
    """Places outside the file, or no table at all: a view must never reach beyond the mapping."""
    meta = {"rows": 1, "cols": 1, "dtype": "float32", "gated": False, "kind": "plain"}
    lines: list[Any] = [["x", meta, 4096, 1 << 40, 0], ["x", meta, 0, 4, 0], ["x", meta, 4097, 4, 0]]
    lines += [["x", meta, -64, 4, 0], ["x", meta, 4096, 0, 0], ["x", {}, 4096, 4, 0], ["x", meta, "4096", 4, 0], [], 1]
    path.parent.mkdir()
    for number, line in enumerate(lines, 1):
        header, table = forged({"tensors": [line], "extra": {}})
        path.write_bytes(header.ljust(8192, b"\0") + table)
        assert open_packed(path, KEY) is None, line
        assert len(warnings()) == number and not path.exists()


def forged(values: Any) -> tuple[bytes, bytes]:
    with pytest.MonkeyPatch.context() as patch:
        dumps = packed_writer.header_and_table.__globals__["json"].dumps
        patch.setattr("evensong.kernels.cpu.packed_file.json.dumps", lambda _: dumps(values))
        return header_and_table(KEY, [], {}, 8192)


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_without_write_permission(path: Path, warnings: Callable[[], list[str]]) -> None:
    path.parent.mkdir(mode=0o500)
    check_in_memory(written(path), warnings)


def test_a_folder_that_cannot_be_made(tmp_path: Path, warnings: Callable[[], list[str]]) -> None:
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "model.bin"
    check_in_memory(written(path), warnings)
    check_content(open_or_pack(path, KEY, pack))


def check_in_memory(file: PackedFile, warnings: Callable[[], list[str]], *, sealed: bool = True) -> None:
    check_content(file)
    assert file.path is None
    assert len(warnings()) == 1 and "cannot be kept" in warnings()[0], warnings()
    handle = memory_file()
    assert (handle is not None) == sealed
    if handle is not None:
        seals = fcntl.fcntl(handle, fcntl.F_GET_SEALS)
        assert seals & fcntl.F_SEAL_WRITE and seals & fcntl.F_SEAL_SHRINK and seals & fcntl.F_SEAL_GROW
        line = next(x for x in Path("/proc/self/maps").read_text().splitlines() if "memfd:evensong-model" in x)
        assert " r--" in line  # shared from Linux 6.7 on; a private mapping that cannot be written is the same


def memory_file() -> int | None:
    """The descriptor of the writer's file in memory, if there is one."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the folder itself
            if "memfd:evensong-model" in os.readlink(f"/proc/self/fd/{name}"):
                return int(name)
    return None


def full_disk(monkeypatch: pytest.MonkeyPatch, free: int, memory: int | None = None) -> None:
    """Files have room for `free` writes in all, memory for `memory`. What comes then is cut short, and refused."""
    real = os.pwrite
    room = {False: free, True: memory}

    def write(handle: int, data: Any, offset: int) -> int:
        kind = "memfd:" in os.readlink(f"/proc/self/fd/{handle}")
        left = room[kind]
        if left == 0:
            room[kind] = -1
            return real(handle, data[: len(data) // 2], offset)
        if left == -1:
            raise OSError(errno.ENOSPC, "No space left on device")
        room[kind] = None if left is None else left - 1
        return real(handle, data, offset)

    monkeypatch.setattr(os, "pwrite", write)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors of `pack` are written one at a time, but for the last two; then come table and header."""
    monkeypatch.setattr(packed_writer, "_PIECE_BYTES", 1)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("free", range(7))
def test_a_disk_that_is_full_at_any_write(
    path: Path, free: int, monkeypatch: pytest.MonkeyPatch, warnings: Callable[[], list[str]]
) -> None:
    full_disk(monkeypatch, free)
    check_in_memory(written(path), warnings)
    assert files(path.parent) == []


@pytest.mark.usefixtures("small_pieces")
def test_a_disk_with_just_enough_room(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full_disk(monkeypatch, 7, 0)
    check_content(written(path))
    assert files(path.parent) == ["model.bin"]


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize(("free", "memory"), [(0, 0), (3, 0), (3, 2), (0, 3), (2, 5), (6, 6)])
def test_neither_disk_nor_memory_file_has_room(
    path: Path, free: int, memory: int, monkeypatch: pytest.MonkeyPatch, warnings: Callable[[], list[str]]
) -> None:
    full_disk(monkeypatch, free, memory)
    check_in_memory(written(path), warnings, sealed=False)
    assert files(path.parent) == []


def test_small_tensors_are_written_in_one_piece(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page cache keeps what comes in small writes in small folios."""
    real, sizes = os.pwrite, []

    def write(handle: int, data: Any, offset: int) -> int:
        sizes.append(len(data))
        return real(handle, data, offset)

    monkeypatch.setattr(os, "pwrite", write)
    written(path)
    assert len(sizes) == 3 and sizes[0] > sum(SIZES.values())  # then table and header
    with PackedWriter(path.with_name("other.bin"), KEY) as writer:
        for name in range(5):
            writer.add(str(name), 9 << 20, META)[:] = name
        file = writer.commit()
    assert sizes[3:-2] == [9 << 20] * 5
    assert [file.entry(str(name)).data[-1] for name in range(5)] == [0, 1, 2, 3, 4]


def test_memory_that_is_used_again_is_zero(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_writer, "_PIECE_BYTES", 10000)
    with PackedWriter(path, KEY) as writer:
        writer.add("a", 9000, META)[:] = 1
        writer.add("b", 10, META)[3] = 5
        writer.add("c", 5000, META)[4999] = 6
        file = writer.commit()
    assert file.entry("b").data.tolist() == [0, 0, 0, 5, 0, 0, 0, 0, 0, 0]
    assert not file.entry("c").data[:4999].any()
    assert not any(path.read_bytes()[HEADER_BYTES + 9000 : HEADER_BYTES + 3 * 4096])


@pytest.mark.parametrize("call", ["pwrite", "replace", "ftruncate"])
def test_a_disk_that_is_full_at_the_end(
    path: Path, call: str, monkeypatch: pytest.MonkeyPatch, warnings: Callable[[], list[str]]
) -> None:
    real = getattr(os, call)

    def fails(where: Any, *rest: Any) -> Any:
        if isinstance(where, int) and "memfd:" in os.readlink(f"/proc/self/fd/{where}"):
            return real(where, *rest)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, fails)
    check_in_memory(written(path), warnings)
    assert files(path.parent) == []


def test_a_system_without_files_in_memory(
    path: Path, monkeypatch: pytest.MonkeyPatch, warnings: Callable[[], list[str]]
) -> None:
    monkeypatch.delattr(os, "memfd_create")
    full_disk(monkeypatch, 2)
    check_in_memory(written(path), warnings, sealed=False)


def test_a_view_that_is_still_held_does_not_stop_the_commit(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full_disk(monkeypatch, 0)
    with PackedWriter(path, KEY) as writer:
        held = writer.add("a", 1, META)
        held[:] = 5
        file = writer.commit()
    assert memory_file() is not None
    held[:] = 6
    assert file.path is None and file.entry("a").data[0] == 5 and file.verify()


def test_what_is_not_committed_leaves_nothing(path: Path) -> None:
    with pytest.raises(KeyError), PackedWriter(path, KEY) as writer:
        pack(writer)
        assert len(files(path.parent)) == 1
        raise KeyError
    assert files(path.parent) == []
    writer = PackedWriter(path, KEY)  # nor does one that is simply forgotten
    writer.add("a", 1, META)
    del writer
    assert files(path.parent) == [] and open_packed(path, KEY) is None


KILLED = """
import sys, time
sys.path[:0] = {paths!r}
from pathlib import Path
from evensong.kernels.cpu.packed_file import TensorMeta
from evensong.kernels.cpu.packed_writer import PackedWriter
writer = PackedWriter(Path({path!r}), {key!r})
writer.add("a", 100000, TensorMeta(1, 1, "float32"))[:] = 1
print("writing", flush=True)
time.sleep(60)
"""


def test_a_killed_writer_leaves_nothing_that_is_taken_for_whole_and_is_swept(path: Path) -> None:
    program = KILLED.format(paths=sys.path, path=str(path), key=KEY)
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout and child.stdout.readline() == "writing\n"
        written(path.with_name("other.bin"))
        assert len(files(path.parent)) == 2  # one that lives is not swept
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert open_packed(path, KEY) is None
    assert [name for name in files(path.parent) if name.endswith(".part")]
    check_content(written(path))
    assert files(path.parent) == ["model.bin", "other.bin"]


def test_writers_at_once_end_with_one_file_that_all_have_mapped(path: Path) -> None:
    barrier = threading.Barrier(4)
    made: list[PackedFile] = []

    def write() -> None:
        with PackedWriter(path, KEY) as writer:
            extra = pack(writer)
            barrier.wait()
            made.append(writer.commit(extra))

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 4 and files(path.parent) == ["model.bin"]
    for file in made:
        check_content(file)
    inode = str(path.stat().st_ino)
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    assert sum(fields[4] == inode for fields in maps) == 4


def test_those_who_come_at_once_pack_once(path: Path) -> None:
    packed = []

    def slow(writer: PackedWriter) -> dict[str, Any]:
        packed.append(1)
        time.sleep(0.1)
        return pack(writer)

    files_made: list[PackedFile] = []
    threads = [threading.Thread(target=lambda: files_made.append(open_or_pack(path, KEY, slow))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(packed) == 1 and len(files_made) == 4
    for file in files_made:
        check_content(file)
