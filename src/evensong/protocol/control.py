"""The verb table: every call that reaches past a front end into the engine core, declared once.

LLM, AsyncLLM and the HTTP routes take theirs from here; only verbs in `VERBS` can be called.
"""

from __future__ import annotations

import msgspec


class Verb(msgspec.Struct, frozen=True):
    """A control verb: its name, the names of its arguments, and one line that says what it does."""

    name: str
    args: tuple[str, ...]
    doc: str


VERBS: dict[str, Verb] = {
    verb.name: verb
    for verb in (
        Verb("abort_requests", ("request_ids",), "Ends requests by internal id; unknown ids are ignored."),
        Verb("reset_prefix_cache", (), "Forgets every cached block that no request holds; True when all were free."),
        Verb("check_kv_cache", (), "Proves the KV cache's invariants; returns block counts: total, free, owned."),
        Verb("collective_rpc", ("method", "timeout", "args"), "Calls a worker method by name on every rank."),
        Verb("get_supported_tasks", (), "What the loaded model can do, e.g. generate."),
        Verb("is_scheduler_empty", (), "True when no request waits or runs."),
    )
}
