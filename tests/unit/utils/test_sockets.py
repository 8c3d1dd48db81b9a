"""Folders of sockets: private, short, swept when their owner is gone."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from evensong.utils.sockets import MAX_SOCKET_PATH, PREFIX, LaunchFolder, candidate_bases, sweep


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def test_a_folder_is_private_and_removed(base: Path) -> None:
    folder = LaunchFolder()
    assert folder.path.parent == base
    assert folder.path.name == PREFIX + folder.launch_id
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    (folder.path / "requests-0").touch()
    assert folder.address("requests-0") == f"ipc://{folder.path}/requests-0"
    folder.remove()
    assert not folder.path.exists()
    folder.remove()


def test_a_permissive_umask_opens_nothing(base: Path) -> None:
    before = os.umask(0)
    try:
        folder = LaunchFolder()
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    folder.remove()


def test_a_living_launch_is_not_swept_and_a_dead_one_is(base: Path) -> None:
    alive = LaunchFolder()
    code = "import os; from evensong.utils.sockets import LaunchFolder; LaunchFolder(); os._exit(0)"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert len(list(base.iterdir())) == 2
    swept = sweep(base)
    assert len(swept) == 1
    assert list(base.iterdir()) == [alive.path]
    alive.remove()


def test_a_users_own_folder_is_never_swept(base: Path) -> None:
    """Whatever its name begins with."""
    kept = [base / f"{PREFIX}{name}" for name in ("cache-k6qk9exl", "0badcafe1", "0BADCAFE", "0badcaf", "")]
    for folder in kept:
        folder.mkdir(mode=0o700)
    assert sweep(base) == [] and all(folder.exists() for folder in kept)


def test_the_next_launch_sweeps(base: Path) -> None:
    dead = base / f"{PREFIX}0badcafe"
    dead.mkdir(mode=0o700)
    (dead / "handshake").touch()
    folder = LaunchFolder()
    assert not dead.exists()
    folder.remove()


def test_what_is_not_a_launch_folder_is_left_alone(base: Path) -> None:
    precious = base / "precious"
    precious.mkdir(mode=0o700)
    (base / f"{PREFIX}link").symlink_to(precious)
    (base / f"{PREFIX}file").touch()
    (base / f"{PREFIX}open").mkdir(mode=0o755)
    (base / "other").mkdir(mode=0o700)
    assert sweep(base) == []
    assert len(list(base.iterdir())) == 5


def test_a_base_that_is_too_long_for_a_socket_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 90)
    long.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    assert long not in candidate_bases()
    folder = LaunchFolder()
    assert len(str(folder.path / ("s" * 20))) <= MAX_SOCKET_PATH
    folder.remove()


@pytest.mark.parametrize("value", ["", "relative/path", "/nonexistent"])
def test_a_useless_runtime_folder_is_passed_over(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", value)
    assert candidate_bases()[0] != Path(value)


def test_a_forked_copy_removes_nothing(base: Path) -> None:
    folder = LaunchFolder()
    real = os.getpid()
    os.getpid = lambda: real + 1
    try:
        folder.remove()
    finally:
        os.getpid = lambda: real
    assert folder.path.exists()
    folder.remove()
    assert not folder.path.exists()
