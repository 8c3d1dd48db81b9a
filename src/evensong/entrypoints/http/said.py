"""What a turn says, in the order in which the model said it: for APIs that answer with a list of items or blocks.

A Delta has places for reasoning, text and calls, but no order among them. So the text is handed to the parser in single
characters: an answer has the same items, however its text was cut on the way here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from evensong.entrypoints.http.forms_out import TokenNames, Usage, chat_logprobs
from evensong.entrypoints.http.generation import merged
from evensong.entrypoints.http.parsers.base import ChoiceParser, Delta, ToolCallDelta
from evensong.entrypoints.http.turn import Turn
from evensong.protocol.errors import EvensongError
from evensong.protocol.request_output import CompletionOutput

# Longer texts are parsed in a thread.
INLINE_CHARACTERS = 4096


class Piece(msgspec.Struct):
    """A stretch of text of one kind: `reasoning`, `content`, or `call`, where `call` says of which one."""

    kind: str
    text: str
    call: ToolCallDelta | None = None


@dataclass
class Said:
    """What is new of an answer; the last one has a finish_reason."""

    pieces: list[Piece]
    usage: Usage
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None


async def what_is_said(turn: Turn) -> AsyncIterator[Said]:
    """The outputs of a turn with one choice as they come. Raises what the engine ends the request with."""
    parser, usage = turn.parser(0), turn.usage()
    names = TokenNames(turn.job.engine.front.texts, as_ids=False, shown=turn.job.options["shown_token_ids"])
    try:
        async for index, output in merged(turn.job):
            usage.add(index, output)
            for choice in output.outputs:
                if parser.plain or len(choice.text) <= INLINE_CHARACTERS:
                    pieces = pieces_of(parser, choice)
                else:
                    pieces = await asyncio.to_thread(pieces_of, parser, choice)
                logprobs = chat_logprobs(choice, turn.job.params, names)
                content = [] if logprobs is None else logprobs["content"]
                yield Said(pieces, usage, content, choice.finish_reason, choice.stop_reason)
    except EvensongError:
        # What the parser holds was said all the same.
        held: list[Piece] = []
        _add(held, parser.finish())
        if held:
            yield Said(held, usage)
        raise


def pieces_of(parser: ChoiceParser, choice: CompletionOutput) -> list[Piece]:
    """What is new of a choice; its end too, where it has one."""
    pieces: list[Piece] = []
    if parser.plain:
        _add(pieces, Delta(content=choice.text))
    else:
        for character in choice.text:
            _add(pieces, parser.push(character))
    if choice.finish_reason is not None:
        _add(pieces, parser.finish())
    return pieces


def _add(pieces: list[Piece], delta: Delta) -> None:
    """Appends what is new; text of the kind that came last grows that piece."""
    found = [Piece("reasoning", delta.reasoning), Piece("content", delta.content)]
    found = [piece for piece in found if piece.text]
    found += [Piece("call", call.arguments, call) for call in delta.tool_calls]
    for piece in found:
        last = pieces[-1] if pieces else None
        same = last is not None and last.kind == piece.kind and (piece.call is None or piece.call.name is None)
        if last is not None and same:
            last.text += piece.text
        else:
            pieces.append(piece)
