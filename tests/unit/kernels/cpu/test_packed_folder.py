"""The folder of packed weights keeps what was used last."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from evensong.kernels.cpu.packed_file import open_packed, packed_key, packed_path
from evensong.kernels.cpu.packed_folder import KEEP_OF_A_MODEL, prune
from evensong.kernels.cpu.packed_writer import PackedWriter

KEY = packed_key({})


def commit(path: Path) -> None:
    with PackedWriter(path, KEY) as writer:
        writer.commit()


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def filled(folder: Path, ages: dict[str, float], size: int = 1000) -> None:
    folder.mkdir(exist_ok=True)
    for name, days in ages.items():
        (folder / name).write_bytes(bytes(size))
        os.utime(folder / name, times=(0, time.time() - days * 86400))


def test_prune_keeps_what_was_used_last(tmp_path: Path) -> None:
    folder = tmp_path / "packed"
    filled(folder, {"a.bin": 1, "b.bin": 2, "c.bin": 3, "d.bin": 40, "new.bin": 50, "note.txt": 99})
    prune(folder, keep_bytes=3000, keep_days=60, fresh=folder / "new.bin")
    assert files(folder) == ["a.bin", "b.bin", "new.bin", "note.txt"]
    prune(folder, keep_bytes=10, keep_days=60, fresh=folder / "new.bin")
    assert files(folder) == ["new.bin", "note.txt"]


def test_prune_keeps_some_of_each_model(tmp_path: Path) -> None:
    """Every build of the kernels packs anew."""
    folder = tmp_path / "packed"
    builds = {f"demo-{key}.bin": float(key) for key in range(KEEP_OF_A_MODEL + 3)}
    filled(folder, builds | {"demo-2-0.bin": 20, "other-1.bin": 25})
    prune(folder, fresh=folder / f"demo-{KEEP_OF_A_MODEL + 2}.bin")
    kept = [f"demo-{key}.bin" for key in (*range(KEEP_OF_A_MODEL - 1), KEEP_OF_A_MODEL + 2)]
    assert files(folder) == sorted([*kept, "demo-2-0.bin", "other-1.bin"])


def test_parts_of_a_model_do_not_push_each_other_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENSONG_CACHE", str(tmp_path))
    paths = [packed_path("demo", f"{part:064}", f"{part}of9") for part in range(1, 10)]
    paths.append(packed_path("demo", f"{0:064}"))
    filled(tmp_path / "packed", {path.name: 1.0 for path in paths})
    prune(tmp_path / "packed", fresh=paths[0])
    assert files(tmp_path / "packed") == sorted(path.name for path in paths)


def test_prune_by_age_and_use(tmp_path: Path) -> None:
    folder = tmp_path / "packed"
    commit(folder / "used.bin")
    filled(folder, {"idle.bin": 31, "fresh.bin": 29})
    os.utime(folder / "used.bin", times=(0, 0))
    assert open_packed(folder / "used.bin", KEY) is not None
    (folder / "gone.bin.lock").touch()
    (folder / "fresh.bin.lock").touch()
    prune(folder)
    assert files(folder) == ["fresh.bin", "fresh.bin.lock", "used.bin"]


def test_a_commit_prunes(tmp_path: Path) -> None:
    path = tmp_path / "packed" / "model.bin"
    filled(path.parent, {"old.bin": 31})
    kept = (path.parent / "old.bin").open("rb")
    commit(path)
    assert files(path.parent) == ["model.bin"]
    with kept:
        assert len(kept.read()) == 1000  # who has it open keeps it
