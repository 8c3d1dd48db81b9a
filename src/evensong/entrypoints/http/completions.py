"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from evensong.engine.frontend.input_processor import Prompt
from evensong.entrypoints.http.forms_out import (
    Envelope,
    TokenNames,
    Usage,
    completion_logprobs,
    ending,
    prompt_logprobs_form,
)
from evensong.entrypoints.http.generation import Job, collect_whole, make_choices, merged, respond_stream, respond_whole
from evensong.entrypoints.http.schemas import CompletionForm
from evensong.entrypoints.http.service import service_options
from evensong.entrypoints.http.state import ServerState
from evensong.protocol.errors import RequestError
from evensong.protocol.request_output import CompletionOutput, PromptLogprobs, RequestOutput


async def create_completion(request: Request, state: ServerState, form: CompletionForm, request_id: str) -> Response:
    """The text that follows each prompt; choices are numbered prompt by prompt."""
    engine = state.require_engine(form.model)
    if form.echo and form.logprobs is not None and (form.n or 1) > 1:
        # Each choice would hold the log-probabilities of the whole prompt.
        raise RequestError("echo with logprobs needs n=1", param="n")
    defaults = engine.front.sampling_defaults
    params = await form.resolve(
        defaults,
        max_tokens=form.most_tokens(defaults),
        logprobs=form.logprobs,
        prompt_logprobs=form.num_prompt_logprobs(),
    )
    prompts = _prompts(form.prompt, state.server_config.max_n)
    options: dict[str, Any] = {
        "add_special_tokens": form.add_special_tokens is not False,
        "cache_salt": form.cache_salt,
        **service_options(request, form, engine.config.scheduler.fair_share),
    }
    most = engine.config.scheduler.max_num_queued_reqs
    if len(prompts) * params.n > most:
        raise RequestError(
            f"{len(prompts)} prompts with n={params.n} are more than the {most} requests that may wait", param="n"
        )
    job = Job(engine, form.request_id or request_id, prompts, params, options, only_scores=form.only_scores)
    maker = _ChoiceMaker(form, job)
    if form.stream:
        return await respond_stream(state, job, _chunks(state, form, job, maker))
    return await respond_whole(request, state, job, lambda: _whole(state, job, maker))


def _prompts(prompt: str | list[Any], most: int) -> list[Prompt]:
    """One text, several texts, one list of token ids, or several such lists."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise RequestError("prompt must not be empty", param="prompt")
    if isinstance(prompt[0], int):
        return [prompt]
    if len(prompt) > most:
        raise RequestError(f"at most {most} prompts are allowed in a request, got {len(prompt)}", param="prompt")
    return list(prompt)


class _ChoiceMaker:
    """Makes choice objects; remembers how long the tokens of each choice were, for the text offsets."""

    def __init__(self, form: CompletionForm, job: Job) -> None:
        self._form = form
        self._job = job
        self._names = TokenNames(job.engine.front.texts, as_ids=bool(form.return_tokens_as_token_ids))
        self._offsets: dict[int, int] = {}
        self._shown_prompts: set[int] = set()

    def __call__(self, prompt_index: int, output: RequestOutput, choice: CompletionOutput) -> dict[str, Any]:
        index = prompt_index * self._job.params.n + choice.index
        fields = {"index": index, **self._text(index, output, choice), **ending(choice)}
        if self._form.return_token_ids:
            fields["token_ids"] = choice.token_ids
        if prompt_index not in self._shown_prompts:
            self._shown_prompts.add(prompt_index)
            if self._form.return_token_ids:
                fields["prompt_token_ids"] = output.prompt_token_ids
            if self._form.prompt_logprobs is not None:
                fields["prompt_logprobs"] = prompt_logprobs_form(output.prompt_logprobs, self._form.prompt_logprobs)
        return fields

    def _text(self, index: int, output: RequestOutput, choice: CompletionOutput) -> dict[str, Any]:
        """Text and logprobs. With `echo` the prompt is part of a choice, and comes with its first tokens."""
        text, token_ids = choice.text, choice.token_ids
        positions: PromptLogprobs | None = None if self._form.logprobs is None else [*(choice.logprobs or ())]
        if self._form.echo and index not in self._offsets:
            text = self._prompt_text(output) + text
            token_ids = output.prompt_token_ids + token_ids
            if positions is not None:
                # A request that was ended before its prompt was computed has none.
                unknown: PromptLogprobs = [None] * len(output.prompt_token_ids)
                positions = [*(output.prompt_logprobs or unknown), *positions]
        offset = self._offsets.get(index, 0)
        logprobs = completion_logprobs(positions, token_ids, offset, self._form.logprobs or 0, self._names)
        # Tokens count, not text that was shown: text may be held back, and offsets must not depend on where chunks end.
        self._offsets[index] = offset + sum(len(self._names.texts.text_of(i)) for i in token_ids) if logprobs else 0
        return {"text": text, "logprobs": logprobs}

    def _prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is not None and self._form.truncate_prompt_tokens is None:
            return output.prompt
        return self._names.texts.tokenizer.decode(output.prompt_token_ids, self._form.skip_special_tokens is not False)


def _envelope(state: ServerState, job: Job) -> Envelope:
    fingerprint = job.engine.resources.fingerprint
    return Envelope("text_completion", f"cmpl-{job.request_id}", state.model_name, fingerprint, job.seed)


async def _whole(state: ServerState, job: Job, maker: _ChoiceMaker) -> dict[str, Any]:
    return await collect_whole(job, _envelope(state, job), maker)


async def _chunks(
    state: ServerState, form: CompletionForm, job: Job, maker: _ChoiceMaker
) -> AsyncIterator[dict[str, Any]]:
    envelope, usage = _envelope(state, job), Usage()
    async for index, output in merged(job):
        usage.add(index, output)
        for choice in await make_choices(maker, index, output):
            yield envelope.chunk([choice], form.chunk_usage(usage.form))
    if form.include_usage:
        yield envelope.chunk([], {"usage": usage.form()})
