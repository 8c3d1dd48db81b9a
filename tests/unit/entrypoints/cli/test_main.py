"""The command table: help, unknown commands, errors to exit codes, and what is not imported."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest

from evensong.entrypoints.cli import main as command
from evensong.protocol.errors import ConfigError, EngineDeadError, EngineStartError, RequestError


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ([], 2, "usage: evensong COMMAND"),
        (["serv"], 2, "there is no command 'serv'; did you mean 'serve'?"),
        (["xyzzy"], 2, "there is no command 'xyzzy'"),
        (["--help"], 0, "usage: evensong COMMAND"),
        (["--version"], 0, "evensong 0."),
        (["bench"], 2, "usage: evensong bench serve|latency|throughput|startup"),
        (["bench", "speed"], 2, "there is no benchmark 'speed'"),
        (["bench", "latency", "--num-iters", "0"], 2, "--num-iters must be at least 1"),
        (["bench", "startup", "--num-iters-cold", "-1"], 2, "--num-iters-cold"),
        (["bench", "startup", "--model", "/nowhere"], 2, "/nowhere"),
        (["bench", "throughput", "--num-prompts", "0"], 2, "--num-prompts must be at least 1"),
        (["bench", "throughput", "--block-size", "0"], 2, "block_size must be in 1..1024"),
        (["complete", "--prompt", ""], 2, "there is no prompt"),
        (["complete", "--prompt", "a", "--temperature", "-1"], 2, "temperature must be"),
        (["complete", "--prompt", "a", "--temperature", "nan"], 2, "temperature must be"),
        (["chat", "--seed", str(2**63)], 2, "seed must be"),
        (["chat", "--max-tokens", "0"], 2, "max_tokens must be"),
        (["complete", "--prompt", "a", "--url", "nonsense"], 1, "no server answers at nonsense"),
        (["serve", "--port", "99999"], 2, "--port must be in 0..65535"),
        (["serve", "--shutdown-timeout", "nan"], 2, "--shutdown-timeout must be in"),
    ],
)
def test_commands(words: list[str], code: int, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(words) == code
    output = capsys.readouterr()
    assert says in output.out + output.err
    if "usage" not in says and code:
        assert output.err.count("\n") == 1 and output.out == ""


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("bad"), 2),
        (RequestError("bad"), 2),
        (EngineStartError("bad"), 1),
        (EngineDeadError("bad"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_errors_become_exit_codes(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(arguments: list[str]) -> int:
        assert arguments == ["--flag"]
        raise error

    module = types.ModuleType("failing_command")
    monkeypatch.setattr(module, "run", fail, raising=False)
    monkeypatch.setitem(sys.modules, "failing_command", module)
    monkeypatch.setitem(command.COMMANDS, "fail", ("failing_command", ""))
    assert command.main(["fail", "--flag"]) == code
    assert capsys.readouterr().err == ("" if code == 130 else "evensong fail: bad\n")


def modules(program: str) -> set[str]:
    """Which of the heavy modules a fresh interpreter has after `program`."""
    heavy = "{'torch', 'transformers', 'fastapi', 'uvicorn', 'zmq', 'numpy', 'httpx'}"
    script = f"import sys\n{program}\nprint(*({heavy} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    return set(result.stdout.splitlines()[-1].split())


def test_a_commands_module_is_imported_only_when_it_runs() -> None:
    assert modules("from evensong.entrypoints.cli.main import main; main(['--help'])") == set()


def test_no_torch_and_no_framework_where_none_is_needed() -> None:
    assert not modules("import evensong.entrypoints.cli.serve_command") & {"torch", "transformers", "fastapi"}
    assert not modules("import evensong.entrypoints.cli.chat") & {"torch", "transformers", "fastapi"}
    assert not modules("import evensong.entrypoints.http.process") & {"torch", "transformers"}


TALKER = """
import sys, types
from evensong.entrypoints.cli import main

def run(arguments):
    while True:
        sys.stdout.write("x" * 1000)
        sys.stdout.flush()

sys.modules["talker"] = types.SimpleNamespace(run=run)
main.COMMANDS["talk"] = ("talker", "")
sys.exit(main.main(["talk"]))
"""


def test_a_reader_that_leaves_is_no_traceback() -> None:
    with subprocess.Popen([sys.executable, "-c", TALKER], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.read(5)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(30) == 1
