"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from evensong.entrypoints.http.forms_out import Envelope, Usage, chat_logprobs, ending
from evensong.entrypoints.http.generation import Job, collect_whole, merged, respond_stream, respond_whole
from evensong.entrypoints.http.schemas import ChatForm
from evensong.entrypoints.http.service import service_options
from evensong.entrypoints.http.state import ServerState
from evensong.protocol.request_output import CompletionOutput, RequestOutput


async def create_chat_completion(request: Request, state: ServerState, form: ChatForm, request_id: str) -> Response:
    """The assistant's next message."""
    engine = state.require_engine(form.model)
    # Without a limit a chat answer may fill the context, as with the peers.
    max_tokens = form.max_tokens if form.max_completion_tokens is None else form.max_completion_tokens
    params = form.sampling_params(max_tokens, form.num_logprobs())
    template = engine.front.inputs.chat_template
    generation_prompt = form.add_generation_prompt is not False
    prompt = await asyncio.to_thread(template.render, form.messages, add_generation_prompt=generation_prompt)
    # The template writes the special tokens itself.
    options: dict[str, Any] = {"add_special_tokens": False, "cache_salt": form.cache_salt, **service_options(form)}
    job = Job(engine, request_id, [prompt], params, options)
    if form.stream:
        return await respond_stream(state, job, _chunks(state, form, job))
    return await respond_whole(request, state, job, lambda: _whole(state, form, job))


def _envelope(state: ServerState, kind: str, job: Job) -> Envelope:
    fingerprint = job.engine.resources.fingerprint
    return Envelope(kind, f"chatcmpl-{job.request_id}", state.model_name, fingerprint, job.seed)


async def _whole(state: ServerState, form: ChatForm, job: Job) -> dict[str, Any]:
    def make_choice(_: int, output: RequestOutput, choice: CompletionOutput) -> dict[str, Any]:
        logprobs = chat_logprobs(choice.logprobs, form.top_logprobs or 0, job.engine.front.texts)
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        fields = {"index": choice.index, "message": message, "logprobs": logprobs, **ending(choice)}
        if form.return_token_ids:
            fields["token_ids"] = choice.token_ids
        return fields

    envelope = _envelope(state, "chat.completion", job)
    response = await collect_whole(job, envelope, make_choice)
    if form.return_token_ids:
        first = job.streams[0].state
        prompt_token_ids = [] if first is None else first.processed.prompt_token_ids
        # vLLM's clients read it beside the choices.
        response["prompt_token_ids"] = response["choices"][0]["prompt_token_ids"] = prompt_token_ids
    return response


async def _chunks(state: ServerState, form: ChatForm, job: Job) -> AsyncIterator[dict[str, Any]]:
    envelope, usage = _envelope(state, "chat.completion.chunk", job), Usage()
    first = job.streams[0].state
    for index in range(job.params.n):
        opening: dict[str, Any] = {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        if form.return_token_ids and index == 0 and first is not None:
            opening["prompt_token_ids"] = first.processed.prompt_token_ids
        more = {name: opening[name] for name in ("prompt_token_ids",) if name in opening}
        yield envelope.chunk([opening], more | form.chunk_usage(usage.form))
    async for prompt_index, output in merged(job):
        usage.add(prompt_index, output)
        for choice in output.outputs:
            fields = {
                "index": choice.index,
                "delta": {"content": choice.text},
                "logprobs": chat_logprobs(choice.logprobs, form.top_logprobs or 0, job.engine.front.texts),
                **ending(choice),
            }
            if form.return_token_ids:
                fields["token_ids"] = choice.token_ids
            yield envelope.chunk([fields], form.chunk_usage(usage.form))
    if form.include_usage:
        yield envelope.chunk([], {"usage": usage.form()})
