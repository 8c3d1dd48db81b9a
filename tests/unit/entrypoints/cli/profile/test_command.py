"""`evensong profile`: what it refuses, in one line and before anything starts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from evensong.entrypoints.cli import main as command


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What it says of words that it does not take."""
    assert command.main(["profile", *words]) == 2
    out, err = capsys.readouterr()
    assert not out and len(err.splitlines()) == 1 and err.startswith("evensong profile: ")
    return err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "name a MODEL"),
        (["demo", "--url", "http://127.0.0.1:1"], "one of them"),
        (["demo", "--api-key", "k"], "--api-key goes with --url"),
        (["demo", "--torch-profiler-dir", "d"], "goes to --output"),
        (["--url", "http://127.0.0.1:1", "--output", "t.gz"], "--output goes with MODEL"),
        (["--url", "http://127.0.0.1:1", "--max-num-seqs", "3"], "--max-num-seqs is the server's"),
        (["demo", "--png-ms", "0"], "--png-ms"),
        (["demo", "--num-prompts", "0"], "--num-prompts"),
        (["demo", "--block-size", "0"], "block_size"),
        (["nowhere/to-be-found-7"], "nowhere/to-be-found-7"),
    ],
)
def test_mistakes(capsys: pytest.CaptureFixture[str], tmp_path: Path, words: list[str], said: str) -> None:
    output = ["--output", str(tmp_path / "t.gz")] if words and not words[0].startswith("-") else []
    assert said in refused(capsys, *words, *output)
    assert not list(tmp_path.iterdir())


def test_a_place_that_cannot_be_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path, tmp_path / "file" / "t.gz"):
        assert f"--output: {place} cannot be written" in refused(capsys, "demo", "--output", str(place))
    assert os.listdir(tmp_path) == ["file"]


def test_a_picture_needs_its_library(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "--png needs matplotlib" in refused(capsys, "demo", "--png", "t.png")


def test_nobody_there(capsys: pytest.CaptureFixture[str]) -> None:
    for url in ("http://127.0.0.1:9", "nonsense", "http://"):
        assert command.main(["profile", "--url", url]) == 1
        assert capsys.readouterr().err.startswith(f"evensong profile: no server answers at {url.rstrip('/')}")
