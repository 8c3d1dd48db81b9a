"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from evensong.entrypoints.http.beam_search import make_job
from evensong.entrypoints.http.forms_out import Envelope, TokenNames, Usage, chat_logprobs, ending, prompt_logprobs_form
from evensong.entrypoints.http.generation import Job, collect_whole, make_choices, merged, respond_stream, respond_whole
from evensong.entrypoints.http.schemas import ChatForm
from evensong.entrypoints.http.service import service_options
from evensong.entrypoints.http.state import ServerState
from evensong.entrypoints.http.templates import render_prompt
from evensong.protocol.request_output import CompletionOutput, RequestOutput


async def create_chat_completion(request: Request, state: ServerState, form: ChatForm, request_id: str) -> Response:
    """The assistant's next message."""
    engine = state.require_engine(form.model)
    defaults = engine.front.sampling_defaults
    params = await form.resolve(
        defaults,
        max_tokens=form.most_tokens(defaults),
        logprobs=form.num_logprobs(),
        prompt_logprobs=form.prompt_logprobs,
    )
    prompt = await render_prompt(state, engine.front.inputs.chat_template, form.messages, form)
    options: dict[str, Any] = {
        # The template writes the special tokens itself, unless the caller knows better.
        "add_special_tokens": bool(form.add_special_tokens),
        "cache_salt": form.cache_salt,
        **service_options(request, form, engine.config.scheduler.fair_share),
    }
    job = make_job(form, engine, form.request_id or request_id, [prompt], params, options)
    if form.stream:
        return await respond_stream(state, job, _chunks(state, form, job))
    return await respond_whole(request, state, job, lambda: _whole(state, form, job))


def _envelope(state: ServerState, kind: str, job: Job) -> Envelope:
    fingerprint = job.engine.resources.fingerprint
    return Envelope(kind, f"chatcmpl-{job.request_id}", state.model_name, fingerprint, job.seed)


class _ChoiceMaker:
    """Makes the choices of whole answers and of chunks."""

    def __init__(self, form: ChatForm, job: Job) -> None:
        self._form = form
        self._params = job.params
        self._names = TokenNames(job.engine.front.texts, as_ids=bool(form.return_tokens_as_token_ids))
        self.prompt_logprobs: list[dict[str, Any] | None] | None = None

    def whole(self, _: int, output: RequestOutput, choice: CompletionOutput) -> dict[str, Any]:
        """A choice of an answer that is not streamed."""
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        return self._fields(output, choice, {"message": message})

    def delta(self, _: int, output: RequestOutput, choice: CompletionOutput) -> dict[str, Any]:
        """What is new of a choice."""
        return self._fields(output, choice, {"delta": {"content": choice.text}})

    def _fields(self, output: RequestOutput, choice: CompletionOutput, content: dict[str, Any]) -> dict[str, Any]:
        if output.prompt_logprobs is not None and self.prompt_logprobs is None:
            self.prompt_logprobs = prompt_logprobs_form(output.prompt_logprobs, self._form.prompt_logprobs or 0)
        logprobs = chat_logprobs(choice, self._params, self._names)
        fields = {"index": choice.index, **content, "logprobs": logprobs, **ending(choice)}
        if self._form.return_token_ids:
            fields["token_ids"] = choice.token_ids
        return fields

    def take_prompt_logprobs(self) -> dict[str, Any]:
        """The field of the response or chunk that has them: each is given once."""
        taken, self.prompt_logprobs = self.prompt_logprobs, None
        return {} if taken is None else {"prompt_logprobs": taken}


async def _whole(state: ServerState, form: ChatForm, job: Job) -> dict[str, Any]:
    maker = _ChoiceMaker(form, job)
    response = await collect_whole(job, _envelope(state, "chat.completion", job), maker.whole)
    response |= maker.take_prompt_logprobs()
    if form.return_token_ids:
        first = job.streams[0].state
        prompt_token_ids = [] if first is None else first.processed.prompt_token_ids
        # vLLM's clients read it beside the choices.
        response["prompt_token_ids"] = response["choices"][0]["prompt_token_ids"] = prompt_token_ids
    return response


async def _chunks(state: ServerState, form: ChatForm, job: Job) -> AsyncIterator[dict[str, Any]]:
    envelope, usage, maker = _envelope(state, "chat.completion.chunk", job), Usage(), _ChoiceMaker(form, job)
    openings = _openings(form, job)
    async for prompt_index, output in merged(job):
        # Not before there is something to say: clients take the first chunk's time for that of the first token.
        for opening, more in openings:
            yield envelope.chunk([opening], more | form.chunk_usage(usage.form))
        openings = []
        usage.add(prompt_index, output)
        for choice in await make_choices(maker.delta, prompt_index, output):
            yield envelope.chunk([choice], maker.take_prompt_logprobs() | form.chunk_usage(usage.form))
    if form.include_usage:
        yield envelope.chunk([], {"usage": usage.form()})


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
