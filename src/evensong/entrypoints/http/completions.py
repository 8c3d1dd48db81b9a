"""POST /v1/completions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from evensong.engine.frontend.input_processor import Prompt
from evensong.entrypoints.http.beam_search import check_beam_fields, make_job
from evensong.entrypoints.http.forms_out import (
    Envelope,
    TextOffsets,
    TokenNames,
    Usage,
    completion_logprobs,
    ending,
    prompt_logprobs_form,
)
from evensong.entrypoints.http.generation import Job, collect_whole, respond_whole
from evensong.entrypoints.http.schemas import CompletionForm
from evensong.entrypoints.http.service import service_options
from evensong.entrypoints.http.state import ServerState
from evensong.entrypoints.http.streaming import respond_stream
from evensong.protocol.errors import RequestError
from evensong.protocol.request_output import CompletionOutput, RequestOutput

# Log-probabilities of prompts that the choices of one request may repeat, where there are several.
MAX_ECHOED_LOGPROBS = 400_000


async def create_completion(request: Request, state: ServerState, form: CompletionForm, request_id: str) -> Response:
    """The text that follows each prompt; choices are numbered prompt by prompt."""
    engine = state.require_engine(form.model)
    check_beam_fields(form)
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
    if form.use_beam_search and form.echo and form.logprobs is not None:
        raise RequestError("echo with logprobs cannot be used with use_beam_search", param="echo")
    job = make_job(form, engine, form.request_id or request_id, prompts, params, options)
    job.grammar_of = form.grammar_of
    job.check = _check_of(form)
    maker = _ChoiceMaker(form, job)
    if form.stream:
        return await respond_stream(request, state, job, _Chunks(state, form, job, maker))
    return await respond_whole(request, state, job, lambda: _whole(state, job, maker))


def _check_of(form: CompletionForm) -> Callable[[Job], None] | None:
    """What can only be refused once the prompts' lengths are known: a long echo, repeated in many choices."""
    if not form.echo or form.logprobs is None:
        return None
    per_token = form.logprobs + 1

    def check(job: Job) -> None:
        echoed = job.num_prompt_tokens * job.params.n * per_token
        if job.params.n > 1 and echoed > MAX_ECHOED_LOGPROBS:
            raise RequestError(
                f"echo would repeat {job.num_prompt_tokens} tokens, with {per_token} log-probabilities each, in "
                f"{job.params.n} choices: over {MAX_ECHOED_LOGPROBS} log-probabilities",
                param="n",
            )

    return check


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


@dataclass
class _Echo:
    """A prompt as its choices repeat it; `num_left` of them have still to."""

    text: str
    logprobs: dict[str, Any] | None
    num_left: int


class _ChoiceMaker:
    """Makes choice objects; remembers where the text of each choice has got to, and what each prompt's echo holds."""

    def __init__(self, form: CompletionForm, job: Job) -> None:
        self._form = form
        self._job = job
        self._names = TokenNames(job.engine.front.texts, as_ids=bool(form.return_tokens_as_token_ids))
        self._skip = form.skip_special_tokens is not False
        # Nothing beside the text was asked for.
        asked = (form.logprobs, form.prompt_logprobs, form.echo or None, form.return_token_ids or None)
        self._plain = all(one is None for one in asked)
        self._offsets: dict[int, TextOffsets] = {}
        self._shown_prompts: set[int] = set()
        self._echoes: dict[int, _Echo] = {}

    def __call__(self, prompt_index: int, output: RequestOutput, choice: CompletionOutput) -> dict[str, Any]:
        index = prompt_index * self._job.params.n + choice.index
        if self._plain:
            return {"index": index, "text": choice.text, "logprobs": None, **ending(choice)}
        fields = {"index": index, **self._text(prompt_index, output, choice), **ending(choice)}
        if self._form.return_token_ids:
            fields["token_ids"] = choice.token_ids
        if prompt_index not in self._shown_prompts:
            self._shown_prompts.add(prompt_index)
            if self._form.return_token_ids:
                fields["prompt_token_ids"] = output.prompt_token_ids
            if self._form.prompt_logprobs is not None:
                fields["prompt_logprobs"] = prompt_logprobs_form(output.prompt_logprobs, self._form.prompt_logprobs)
        return fields

    def _text(self, prompt_index: int, output: RequestOutput, choice: CompletionOutput) -> dict[str, Any]:
        """Text and logprobs. With `echo` the prompt is part of a choice, and comes with its first tokens."""
        index = prompt_index * self._job.params.n + choice.index
        echo = self._echo(prompt_index, output) if self._form.echo and index not in self._offsets else None
        # Tokens count, not text that was shown: text may be held back, and offsets must not depend on where chunks end.
        offsets = self._offsets.setdefault(index, TextOffsets(self._names.texts, self._skip, echo.text if echo else ""))
        text = choice.text if echo is None else echo.text + choice.text
        if self._form.logprobs is None:
            return {"text": text, "logprobs": None}
        starts = offsets.of(choice.token_ids)
        logprobs = completion_logprobs(
            choice.logprobs or [], choice.token_ids, starts, self._form.logprobs, self._names
        )
        if echo is not None and echo.logprobs is not None:
            logprobs = {name: [*echo.logprobs[name], *own] for name, own in logprobs.items()}
        return {"text": text, "logprobs": logprobs}

    def _echo(self, prompt_index: int, output: RequestOutput) -> _Echo:
        """What a choice repeats of its prompt: made once, and let go with the last choice."""
        echo = self._echoes.get(prompt_index)
        if echo is None:
            echo = self._echoes[prompt_index] = _Echo(self._prompt_text(output), None, self._job.params.n)
            if self._form.logprobs is not None:
                token_ids = output.prompt_token_ids
                # A request that was ended before its prompt was computed has none.
                positions = output.prompt_logprobs or [None] * len(token_ids)
                starts = TextOffsets(self._names.texts, self._skip).of(token_ids)
                echo.logprobs = completion_logprobs(positions, token_ids, starts, self._form.logprobs, self._names)
        echo.num_left -= 1
        if echo.num_left == 0:
            del self._echoes[prompt_index]
        return echo

    def _prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is not None and self._form.truncate_prompt_tokens is None:
            return output.prompt
        return self._names.texts.tokenizer.decode(output.prompt_token_ids, self._skip)


def _envelope(state: ServerState, job: Job) -> Envelope:
    fingerprint = job.engine.resources.fingerprint
    return Envelope("text_completion", f"cmpl-{job.request_id}", state.model_name, fingerprint, job.seed)


async def _whole(state: ServerState, job: Job, maker: _ChoiceMaker) -> dict[str, Any]:
    return await collect_whole(job, _envelope(state, job), maker)


class _Chunks:
    """The events of a streamed completion."""

    def __init__(self, state: ServerState, form: CompletionForm, job: Job, maker: _ChoiceMaker) -> None:
        self._state = state
        self._form = form
        self._job = job
        self._make_choice = maker
        self._usage = Usage()

    @functools.cached_property
    def _envelope(self) -> Envelope:
        """Made when the job has started: before that it has no seed."""
        return _envelope(self._state, self._job)

    def of(self, prompt_index: int, output: RequestOutput) -> list[bytes]:
        """An event for each choice that has something new."""
        self._usage.add(prompt_index, output)
        more = self._form.chunk_usage(self._usage.form)
        return [
            self._envelope.event([self._make_choice(prompt_index, output, choice)], more) for choice in output.outputs
        ]

    def held(self) -> list[bytes]:
        """Nothing is ever kept back here."""
        return []

    def last(self) -> list[bytes]:
        """The usage, where it was asked for."""
        return [self._envelope.event([], {"usage": self._usage.form()})] if self._form.include_usage else []
