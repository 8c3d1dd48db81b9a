"""The verb table: every call that reaches past a front end into the engine core, declared once.

LLM, AsyncLLM and the HTTP routes take theirs from here; only verbs in `VERBS` can be called.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

PauseMode = Literal["abort", "wait", "keep"]
WakeTag = Literal["weights", "kv_cache"]
# The worker's methods that `collective_rpc` may call: they read and change nothing.
WorkerMethod = Literal["describe", "determine_available_memory", "get_model_limits", "get_rank", "measure_token_rate"]


class Arg(msgspec.Struct, frozen=True):
    """An argument of a verb: its type, and its default where it has one."""

    name: str
    type: Any
    default: Any = msgspec.UNSET

    @property
    def required(self) -> bool:
        """True for an argument without a default."""
        return self.default is msgspec.UNSET


class Route(msgspec.Struct, frozen=True):
    """How a verb is reached over HTTP. Arguments come in the query, or as a JSON object where `body` is set.

    The answer is `{key: result}`, where `kind` is the result's JSON type; where `done` is set it is `{key: done}`.
    """

    method: Literal["GET", "POST"]
    key: str
    done: str = ""
    body: bool = False
    kind: Literal["boolean", "array"] = "boolean"


class Verb(msgspec.Struct, frozen=True):
    """A control verb: its name, its arguments, one line that says what it does, its route, other names of it."""

    name: str
    params: tuple[Arg, ...]
    doc: str
    route: Route | None = None
    aliases: tuple[str, ...] = ()

    @property
    def args(self) -> tuple[str, ...]:
        """The names of its arguments."""
        return tuple(arg.name for arg in self.params)


_TIMEOUT = Arg("timeout", float | None, None)
_MODE = Arg("mode", PauseMode, "abort")

VERBS: dict[str, Verb] = {
    verb.name: verb
    for verb in (
        Verb(
            "abort_requests",
            (Arg("request_ids", list[str]),),
            "Ends requests by internal id; unknown ids are ignored.",
        ),
        Verb(
            "pause",
            (_MODE, Arg("clear_cache", bool, True), _TIMEOUT),
            "Stops scheduling: running requests end (abort), finish first (wait) or stop where they are (keep).",
            Route("POST", "status", "paused"),
            ("pause_generation",),
        ),
        Verb(
            "resume",
            (),
            "Ends a pause: requests that were kept or that waited go on.",
            Route("POST", "status", "resumed"),
            ("resume_generation",),
        ),
        Verb("is_paused", (), "True while scheduling is stopped.", Route("GET", "is_paused")),
        Verb(
            "sleep",
            (Arg("level", Literal[0, 1, 2], 1), _MODE, _TIMEOUT),
            "Pauses; level 1 gives the KV cache's memory back to the system, level 2 the weights' too.",
            Route("POST", "status", "asleep"),
        ),
        Verb(
            "wake_up",
            (Arg("tags", list[WakeTag] | None, None), _TIMEOUT),
            "Takes back what sleep gave up (all, or the parts in tags) and, once all is there, ends the pause.",
            Route("POST", "status", "awake"),
        ),
        Verb("is_sleeping", (), "True while memory is given up.", Route("GET", "is_sleeping")),
        Verb(
            "reset_prefix_cache",
            (Arg("reset_running_requests", bool, False),),
            "Forgets every cached block; False, with nothing changed, while requests hold some. With "
            "reset_running_requests they give theirs up and are computed again.",
            Route("POST", "success"),
        ),
        Verb("check_kv_cache", (), "Proves the KV cache's invariants; returns block counts: total, free, owned."),
        Verb(
            "collective_rpc",
            (Arg("method", WorkerMethod), _TIMEOUT, Arg("args", list[Any] | None, None)),
            "Calls a worker method by name on every rank.",
            Route("POST", "results", body=True, kind="array"),
        ),
        Verb(
            "start_profile",
            (Arg("profile_prefix", str | None, None),),
            "Starts the profiler of every rank.",
            Route("POST", "status", "profiling"),
        ),
        Verb(
            "stop_profile",
            (),
            "Stops the profiler and writes one trace of all ranks to --torch-profiler-dir; the answer names it.",
            Route("POST", "traces", kind="array"),
        ),
        Verb(
            "get_supported_tasks",
            (),
            "What the loaded model can do, e.g. generate.",
            Route("GET", "tasks", kind="array"),
        ),
        Verb("is_scheduler_empty", (), "True when no request waits or runs.", Route("GET", "is_scheduler_empty")),
    )
}
