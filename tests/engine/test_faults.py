"""A user's plain script, without a main guard, and what happens when it is killed, interrupted or simply ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from evensong.utils.sockets import sweep
from tests.engine.launching import eventually, running

ROOT = Path(__file__).resolve().parents[2]
HEAD = """
import os, sys, time
from evensong.config.resolve import resolve
from evensong.engine.client.mp_sync import SyncMPClient
from evensong.utils.sockets import sweep
from tests.engine.launching import request
LAUNCHER = os.environ.get("TEST_LAUNCHER", "tests.engine.launching:open_fake_launch")
print("started", flush=True)
client = SyncMPClient(resolve({"model": "demo"}), LAUNCHER)
client.add_request(request("r", 7))
outputs = []
while not outputs:
    outputs = client.get_output().outputs
print("got", outputs[0].new_token_ids, flush=True)
"""


def start(tmp_path: Path, tail: str, name: str = "script.py", **environment: str) -> subprocess.Popen[str]:
    script = tmp_path / name
    script.write_text(HEAD + tail)
    return subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=tmp_path,
        env={**os.environ, **environment},
        start_new_session=True,
    )


def children_of(process: subprocess.Popen[str]) -> list[int]:
    try:
        return [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def read_until(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if word in line:
            return
    raise AssertionError(f"{word!r} was not printed")


def finish(process: subprocess.Popen[str], timeout: float = 10) -> str:
    """What it still prints; it has ended then."""
    try:
        return process.communicate(timeout=timeout)[0]
    finally:
        process.kill()
        process.wait()


def test_a_script_without_a_main_guard_that_never_says_shutdown(tmp_path: Path, sockets_base: Path) -> None:
    process = start(tmp_path, "")
    assert "got [7]" in finish(process)
    assert process.returncode == 0
    assert not any(sockets_base.iterdir())


def test_a_script_in_a_folder_full_of_misleading_names(tmp_path: Path) -> None:
    """The child must not import what lies in the current folder."""
    (tmp_path / "zmq.py").write_text("raise SystemExit('the wrong zmq')")
    script = "import sys; sys.path.pop(0)\n" + HEAD
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path
    )
    assert "got [7]" in finish(process)


def test_kill_9_of_the_script_leaves_no_process(tmp_path: Path, sockets_base: Path) -> None:
    process = start(tmp_path, "time.sleep(60)")
    read_until(process, "got")
    children = children_of(process)
    assert children
    process.kill()
    assert eventually(lambda: not any(running(pid) for pid in children), 5.0)
    finish(process)
    assert len(list(sockets_base.iterdir())) == 1, "nobody was left to remove it"
    assert "got [7]" in finish(start(tmp_path, ""))
    assert not any(sockets_base.iterdir()), "the next launch sweeps"


def test_ctrl_c_in_the_middle_of_start_up_leaves_nothing(tmp_path: Path, sockets_base: Path) -> None:
    process = start(tmp_path, "", FAKE_CORE="stuck while loading")
    assert eventually(lambda: bool(children_of(process)))
    time.sleep(0.3)
    children = children_of(process)
    process.send_signal(signal.SIGINT)
    output = finish(process)
    assert "KeyboardInterrupt" in output
    assert process.returncode != 0
    assert not any(running(pid) for pid in children)
    assert not any(sockets_base.iterdir())


def test_ctrl_c_while_it_waits_for_outputs_leaves_nothing(tmp_path: Path, sockets_base: Path) -> None:
    process = start(tmp_path, "client.add_request(request('r', 13))\nclient.get_output()")
    read_until(process, "got")
    time.sleep(0.2)
    children = children_of(process)
    process.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in finish(process)
    assert not any(running(pid) for pid in children)
    assert not any(sockets_base.iterdir())


@pytest.mark.parametrize("end", ["sys.exit(3)", "raise ValueError('a bug')", "os._exit(3)"])
def test_however_the_script_ends_the_core_goes(tmp_path: Path, sockets_base: Path, end: str) -> None:
    process = start(tmp_path, "sys.stdin.readline()\n" + end)
    read_until(process, "got")
    children = children_of(process)
    finish(process)
    assert process.returncode != 0
    assert eventually(lambda: not any(running(pid) for pid in children), 5.0)
    # An exit that skips every clean-up leaves the folder to the next launch.
    assert len(sweep(sockets_base)) == ("os._exit" in end)


def test_a_forked_copy_of_the_script_does_not_end_its_core(tmp_path: Path) -> None:
    tail = """
pid = os.fork()
if pid == 0:
    sys.exit(0)
os.waitpid(pid, 0)
client.add_request(request("r", 8))
print("still", client.get_output().outputs[0].new_token_ids, flush=True)
"""
    assert "still [8]" in finish(start(tmp_path, tail))


def test_two_engines_in_one_script(tmp_path: Path) -> None:
    tail = """
other = SyncMPClient(resolve({"model": "demo"}), LAUNCHER)
client.shutdown()
other.add_request(request("r", 9))
print("other", other.get_output().outputs[0].new_token_ids, flush=True)
"""
    assert "other [9]" in finish(start(tmp_path, tail))


def test_kill_9_of_a_script_whose_forked_copy_lives_on_ends_the_core_too(tmp_path: Path, sockets_base: Path) -> None:
    """The copy holds the other end of the core's lifeline open; the core sees that its parent has changed."""
    tail = """
pid = os.fork()
if pid == 0:
    time.sleep(20)
    os._exit(0)
print("forked", pid, flush=True)
time.sleep(60)
"""
    process = start(
        tmp_path,
        tail,
        TEST_LAUNCHER="tests.engine.test_core_process:open_scripted",
        SCRIPTED_CORE='{"step_seconds": 0.0}',
    )
    read_until(process, "forked")
    children = children_of(process)
    titles = {pid: " ".join(psutil.Process(pid).cmdline()) for pid in children}
    (core,) = [pid for pid, title in titles.items() if "evensong:core" in title]
    copies = [pid for pid in children if pid != core]
    assert len(copies) == 1
    try:
        process.kill()
        assert eventually(lambda: not running(core), 5.0)
        assert running(copies[0])
    finally:
        os.kill(copies[0], signal.SIGKILL)
        finish(process)
    # The copy held the folder's lock too, so the folder was its to keep until now.
    assert eventually(lambda: bool(sweep(sockets_base)))
