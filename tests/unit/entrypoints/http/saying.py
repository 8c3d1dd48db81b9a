"""What writers are given: the text of a model, cut anywhere, as `what_is_said` hands it on."""

from __future__ import annotations

from evensong.entrypoints.http.forms_out import Usage
from evensong.entrypoints.http.said import Said, pieces_of
from evensong.protocol.request_output import CompletionOutput
from tests.unit.entrypoints.http.talking_parser import MarkedParser


def said(text: str, cut: int, finish: str = "stop", stop_reason: str | None = None) -> list[Said]:
    """`text` in pieces of `cut` characters; one token a character."""
    parser, usage = MarkedParser(), Usage()
    usage.prompt_tokens, usage.cached_tokens = 20, 16
    parts = [text[start : start + cut] for start in range(0, len(text), cut)] or [""]
    all_said = []
    for index, part in enumerate(parts):
        usage.completion_tokens += len(part)
        last = index == len(parts) - 1
        choice = CompletionOutput(0, part, [1] * len(part), finish_reason=finish if last else None)
        all_said.append(Said(pieces_of(parser, choice), usage, [], choice.finish_reason, stop_reason if last else None))
    return all_said
