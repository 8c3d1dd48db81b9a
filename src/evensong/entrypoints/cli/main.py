"""The command `evensong`: a table of verbs. A verb's module is imported only when it runs."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Sequence

import evensong
from evensong.protocol.errors import ConfigError, EngineDeadError, EngineStartError, RequestError

FAILURE, USAGE, INTERRUPTED = 1, 2, 130

# verb -> (module with `run(arguments) -> exit code`, one line)
COMMANDS: dict[str, tuple[str, str]] = {
    "serve": ("evensong.entrypoints.cli.serve_command", "serve a model over the OpenAI HTTP API"),
    "chat": ("evensong.entrypoints.cli.chat", "chat in the terminal, with a server or a model of its own"),
    "complete": ("evensong.entrypoints.cli.complete", "continue a text, with a server or a model of its own"),
    "bench": ("evensong.entrypoints.cli.bench.command", "measure: bench serve|latency|throughput|startup"),
    "profile": (
        "evensong.entrypoints.cli.profile.command",
        "trace all ranks under load: a Chrome trace and its figures",
    ),
    "run-batch": ("evensong.entrypoints.cli.run_batch", "answer an OpenAI batch file with a model of its own"),
    "collect-env": ("evensong.entrypoints.cli.collect_env", "what a bug report needs to know of this machine"),
}


def usage() -> str:
    """What `evensong --help` says."""
    lines = ["usage: evensong COMMAND [ARGUMENTS]", ""]
    lines += [f"  {name:<13}{text}" for name, (_, text) in COMMANDS.items()]
    lines += [
        "",
        "MODEL is a folder, a .gguf file, a name on the hub (org/name, org/name:Q4_K_M), or demo.",
        "`evensong COMMAND --help` lists a command's flags.",
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit code: 0 done, 1 failure, 2 usage, 130 interrupted."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words and words[0] in ("-h", "--help", "help"):
        sys.stdout.write(f"{usage()}\n")
        return 0
    if words and words[0] in ("-V", "--version", "version"):
        sys.stdout.write(f"evensong {evensong.__version__}\n")
        return 0
    if not words or words[0] not in COMMANDS:
        return _unknown(words)
    module = importlib.import_module(COMMANDS[words[0]][0])
    try:
        code: int = module.run(words[1:])
    except (ConfigError, RequestError) as error:
        return _complain(words[0], error, USAGE)
    except (EngineStartError, EngineDeadError) as error:
        return _complain(words[0], error, FAILURE)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has gone; what is still buffered must not fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILURE
    return code


def _unknown(words: list[str]) -> int:
    if words:
        close = difflib.get_close_matches(words[0], COMMANDS, n=1, cutoff=0.5)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        sys.stderr.write(f"evensong: there is no command {words[0]!r}{hint}\n")
    else:
        sys.stderr.write(f"{usage()}\n")
    return USAGE


def _complain(command: str, error: Exception, code: int) -> int:
    sys.stderr.write(f"evensong {command}: {error}\n")
    return code


if __name__ == "__main__":
    raise SystemExit(main())
