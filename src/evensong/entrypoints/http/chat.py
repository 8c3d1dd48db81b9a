"""POST /v1/chat/completions."""

from __future__ import annotations

import functools
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from evensong.entrypoints.http.forms_out import Envelope, TokenNames, chat_logprobs, ending, prompt_logprobs_form
from evensong.entrypoints.http.generation import Job, collect_whole, respond_whole
from evensong.entrypoints.http.parsers.base import ChoiceParser, Delta, ToolCallDelta, joined
from evensong.entrypoints.http.schemas import ChatForm
from evensong.entrypoints.http.state import ServerState
from evensong.entrypoints.http.streaming import respond_stream
from evensong.entrypoints.http.turn import Turn, prepare_turn
from evensong.protocol.request_output import CompletionOutput, RequestOutput


async def create_chat_completion(request: Request, state: ServerState, form: ChatForm, request_id: str) -> Response:
    """The assistant's next message."""
    turn = await prepare_turn(request, state, form, request_id)
    if form.stream:
        return await respond_stream(request, state, turn.job, _Chunks(state, turn))
    return await respond_whole(request, state, turn.job, lambda: _whole(state, turn))


def _envelope(state: ServerState, kind: str, job: Job) -> Envelope:
    fingerprint = job.engine.resources.fingerprint
    return Envelope(kind, f"chatcmpl-{job.request_id}", state.model_name, fingerprint, job.seed)


class _ChoiceMaker:
    """Makes the choices of whole answers and of chunks."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn
        self._form = turn.form
        self._names = TokenNames(
            turn.job.engine.front.texts,
            as_ids=bool(self._form.return_tokens_as_token_ids),
            shown=turn.job.options["shown_token_ids"],
        )
        self._parsers: dict[int, ChoiceParser] = {}
        self._ended: set[int] = set()
        self.prompt_logprobs: list[dict[str, Any] | None] | None = None

    def whole(self, _: int, output: RequestOutput, choice: CompletionOutput) -> dict[str, Any]:
        """A choice of an answer that is not streamed."""
        parser = self._parser(choice.index)
        return self._fields(output, choice, {"message": _message(parser.whole(choice.text))}, parser)

    def delta(self, _: int, output: RequestOutput, choice: CompletionOutput) -> dict[str, Any]:
        """What is new of a choice."""
        parser = self._parser(choice.index)
        found = parser.push(choice.text)
        if choice.finish_reason is not None:
            self._ended.add(choice.index)
            found = joined(found, parser.finish())
        return self._fields(output, choice, {"delta": _delta_form(found, parser)}, parser)

    def held(self) -> list[dict[str, Any]]:
        """What parsers keep of choices that have no end: it was said all the same."""
        choices = []
        for index, parser in self._parsers.items():
            delta = {} if parser.plain or index in self._ended else _delta_form(parser.finish(), parser)
            if delta:
                choices.append({"index": index, "delta": delta, "logprobs": None, "finish_reason": None})
        return choices

    def says_something(self, choice: dict[str, Any]) -> bool:
        """False for a chunk's choice that only shows that its text is still being read."""
        asked = self._form.logprobs or self._form.return_token_ids
        return bool(choice["delta"] or choice["finish_reason"] or asked)

    def _parser(self, index: int) -> ChoiceParser:
        if index not in self._parsers:
            self._parsers[index] = self._turn.parser(index)
        return self._parsers[index]

    def _fields(
        self, output: RequestOutput, choice: CompletionOutput, content: dict[str, Any], parser: ChoiceParser
    ) -> dict[str, Any]:
        if output.prompt_logprobs is not None and self.prompt_logprobs is None:
            self.prompt_logprobs = prompt_logprobs_form(output.prompt_logprobs, self._form.prompt_logprobs or 0)
        logprobs = chat_logprobs(choice, self._turn.job.params, self._names)
        fields = {"index": choice.index, **content, "logprobs": logprobs, **ending(choice)}
        fields["finish_reason"] = self._turn.finish_reason(choice.finish_reason, parser)
        if self._form.return_token_ids:
            fields["token_ids"] = choice.token_ids
        return fields

    def take_prompt_logprobs(self) -> dict[str, Any]:
        """The field of the response or chunk that has them: each is given once."""
        taken, self.prompt_logprobs = self.prompt_logprobs, None
        return {} if taken is None else {"prompt_logprobs": taken}


def _message(said: Delta) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": said.content, "refusal": None}
    if said.tool_calls:
        message["content"] = said.content or None
        message["tool_calls"] = [_call_form(call) for call in said.tool_calls]
    # Both names have been vLLM's; clients read either.
    return message | _reasoning_form(said.reasoning)


def _delta_form(said: Delta, parser: ChoiceParser) -> dict[str, Any]:
    delta = _reasoning_form(said.reasoning)
    if said.content or parser.plain:
        delta["content"] = said.content
    if said.tool_calls:
        delta["tool_calls"] = [{"index": call.index, **_call_form(call)} for call in said.tool_calls]
    return delta


def _reasoning_form(reasoning: str) -> dict[str, Any]:
    return {"reasoning": reasoning, "reasoning_content": reasoning} if reasoning else {}


def _call_form(call: ToolCallDelta) -> dict[str, Any]:
    """A call; of one that is known already only what its arguments gained."""
    if call.name is None:
        return {"function": {"arguments": call.arguments}}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


async def _whole(state: ServerState, turn: Turn) -> dict[str, Any]:
    job, maker = turn.job, _ChoiceMaker(turn)
    response = await collect_whole(job, _envelope(state, "chat.completion", job), maker.whole, turn.usage())
    response |= maker.take_prompt_logprobs()
    if turn.form.return_token_ids:
        first = job.streams[0].state
        prompt_token_ids = [] if first is None else first.processed.prompt_token_ids
        # vLLM's clients read it beside the choices.
        response["prompt_token_ids"] = response["choices"][0]["prompt_token_ids"] = prompt_token_ids
    return response


class _Chunks:
    """The events of a streamed chat."""

    def __init__(self, state: ServerState, turn: Turn) -> None:
        self._state = state
        self._form = turn.form
        self._job = turn.job
        self._maker = _ChoiceMaker(turn)
        self._usage = turn.usage()
        self._opened = False

    @functools.cached_property
    def _envelope(self) -> Envelope:
        """Made when the job has started: before that it has no seed."""
        return _envelope(self._state, "chat.completion.chunk", self._job)

    def of(self, prompt_index: int, output: RequestOutput) -> list[bytes]:
        """An event for each choice that says something; the first output opens all choices."""
        events = []
        if not self._opened:
            # Not before there is something to say: clients take the first chunk's time for that of the first token.
            self._opened = True
            events = [self._event(opening, more) for opening, more in _openings(self._form, self._job)]
        self._usage.add(prompt_index, output)
        for choice in output.outputs:
            form = self._maker.delta(prompt_index, output, choice)
            more = self._maker.take_prompt_logprobs()
            if more or self._maker.says_something(form):
                events.append(self._event(form, more))
        return events

    def held(self) -> list[bytes]:
        """What parsers keep: it was said all the same."""
        return [self._event(choice, {}) for choice in self._maker.held()]

    def last(self) -> list[bytes]:
        """The usage, where it was asked for."""
        return [self._envelope.event([], {"usage": self._usage.form()})] if self._form.include_usage else []

    def _event(self, choice: dict[str, Any], more: dict[str, Any]) -> bytes:
        return self._envelope.event([choice], more | self._form.chunk_usage(self._usage.form))


def _openings(form: ChatForm, job: Job) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The first chunk of each choice, and what stands beside its choices."""
    pairs: list[tuple[dict[str, Any], dict[str, Any]]] = []
    first = job.streams[0].state
    for index in range(job.params.n):
        delta = {"role": "assistant", "content": ""}
        prompt: dict[str, Any] = {}
        if form.return_token_ids and index == 0 and first is not None:
            prompt = {"prompt_token_ids": first.processed.prompt_token_ids}
        pairs.append(({"index": index, "delta": delta, "logprobs": None, "finish_reason": None} | prompt, prompt))
    return pairs
