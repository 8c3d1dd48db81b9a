"""collect-env: it tells, hides secrets, and survives whatever is missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import evensong
from evensong.entrypoints.cli import collect_env
from evensong.entrypoints.cli import main as command


def test_text_and_json_hold_the_same_parts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("EVENSONG_API_KEY", "s3cret")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert command.main(["collect-env", "--json"]) == 0
    text = capsys.readouterr().out
    report = json.loads(text)
    assert report["evensong"]["version"] == evensong.__version__
    assert report["torch"]["version"] and isinstance(report["torch"]["threads"], int)
    assert report["cpu"]["usable"] >= 1 and report["memory"]["limit"].endswith("GiB")
    assert report["environment"]["OMP_NUM_THREADS"] == "3" and "s3cret" not in text
    assert report["packages"]["msgspec"]
    shown = collect_env.as_text(report)
    assert all(f"{name}:" in shown for name in report) and "s3cret" not in shown


def test_secrets_and_strangers_are_not_shown() -> None:
    variables = {"HF_TOKEN": "a", "EVENSONG_API_KEY": "", "EVENSONG_PROXY": "http://u:pw@host/x", "HOME": "/root"}
    assert collect_env.masked(variables | {"KMP_BLOCKTIME": "0"}) == {
        "EVENSONG_API_KEY": "",
        "EVENSONG_PROXY": "http://(not shown)@host/x",
        "HF_TOKEN": "(set, not shown)",
        "KMP_BLOCKTIME": "0",
    }


def test_nothing_that_is_missing_fails_the_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(collect_env, "TORCH_PROGRAM", "raise RuntimeError('broken install')")
    monkeypatch.setattr(collect_env, "PACKAGES", ("no-such-package", "numpy"))

    def no(*_: object, **__: object) -> None:
        raise PermissionError("no")

    for name in ("freedesktop_os_release", "libc_ver"):
        monkeypatch.setattr(f"platform.{name}", no)
    monkeypatch.setattr(Path, "read_text", no)
    assert command.main(["collect-env", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert "broken install" in report["torch"] and report["system"].startswith("not known (PermissionError")
    assert "no-such-package" not in report["packages"]
    assert collect_env.as_text(report)


def test_outside_a_checkout_there_is_no_commit(tmp_path: Path) -> None:
    assert collect_env._commit(tmp_path / "site-packages" / "evensong") is None
