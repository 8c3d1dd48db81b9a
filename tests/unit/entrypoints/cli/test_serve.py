"""What `evensong serve` prints when it is ready can be pasted as it stands."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from evensong.entrypoints.cli.serve import own_command, ready_lines


def test_the_program_is_named_as_a_shell_here_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "my env" / "evensong"
    program.parent.mkdir()
    program.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sys.argv", [str(program), "serve"])
    assert shlex.split(own_command()) == [str(program)]
    monkeypatch.setenv("PATH", str(program.parent))
    assert own_command() == "evensong"


def test_the_curl_line_is_a_request() -> None:
    title, chat, curl = ready_lines("http://127.0.0.1:8000", "demo", with_key=False)
    assert "demo" in title and chat.endswith("chat --url http://127.0.0.1:8000/v1")
    words = shlex.split(curl.split(":", 1)[1])
    assert json.loads(words[-1])["model"] == "demo" and words[1].endswith("/v1/chat/completions")
    assert "$EVENSONG_API_KEY" in ready_lines("http://h", "demo", with_key=True)[2]
