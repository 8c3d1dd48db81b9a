"""Beam search over HTTP: a Job whose choices are the best sequences, all of them at the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from evensong.engine.async_llm import AsyncLLM, RequestStream
from evensong.engine.frontend.beam_search import BeamSearch, begin_search
from evensong.engine.frontend.input_processor import Prompt
from evensong.entrypoints.http.generation import Job
from evensong.entrypoints.http.schemas import GenerationForm
from evensong.protocol.beam_search import BeamSearchParams
from evensong.protocol.errors import RequestError
from evensong.protocol.request_output import RequestOutput
from evensong.protocol.sampling_params import SamplingParams

# Field -> values with which it asks for nothing; any other would change the answer and is not honoured by a search.
_NOT_IN_A_SEARCH: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
    "frequency_penalty": (None, 0),
    "logit_bias": (None, {}),
    "logprob_token_ids": (None, []),
    "min_tokens": (None, 0),
    "presence_penalty": (None, 0),
    "prompt_logprobs": (None,),
    "repetition_detection": (None, {}),
    "repetition_penalty": (None, 1),
    "response_format": (None, {"type": "text"}),
    "stop": (None, []),
    "stop_token_ids": (None, []),
    "structured_outputs": (None,),
    "thinking_token_budget": (None,),
    "vllm_xargs": (None, {}),
}


def check_beam_fields(form: GenerationForm) -> None:
    """Raises RequestError for a field that means nothing with, or without, use_beam_search."""
    if not form.use_beam_search:
        if form.length_penalty not in (None, 1):
            raise RequestError("length_penalty means nothing without use_beam_search", param="length_penalty")
        return
    for name, nothing in _NOT_IN_A_SEARCH.items():
        if getattr(form, name) not in nothing:
            raise RequestError(f"{name} cannot be used with use_beam_search", param=name)


def make_job(
    form: GenerationForm,
    engine: AsyncLLM,
    request_id: str,
    prompts: list[Prompt],
    params: SamplingParams,
    options: dict[str, Any],
) -> Job:
    """A search where the form asks for one. Raises RequestError for settings that do not go with it."""
    if not form.use_beam_search:
        return Job(engine, request_id, prompts, params, options)
    beams = BeamSearchParams(
        beam_width=params.n,
        max_tokens=engine.front.inputs.max_model_len if params.max_tokens is None else params.max_tokens,
        ignore_eos=params.ignore_eos,
        temperature=params.temperature,
        length_penalty=1.0 if form.length_penalty is None else form.length_penalty,
        include_stop_str_in_output=params.include_stop_str_in_output,
    )
    return BeamJob(engine, request_id, prompts, params, options, beams=beams)


@dataclass
class BeamJob(Job):
    """Runs the searches of all prompts side by side, step by step."""

    beams: BeamSearchParams = field(kw_only=True)
    searches: list[BeamSearch] = field(default_factory=list)

    @property
    def is_plain(self) -> bool:
        """The streams are of single steps."""
        return False

    async def start(self) -> None:
        """The first step of every search is admitted; raises what one was refused with, and leaves nothing running."""
        self.searches = await asyncio.to_thread(self._begin)
        await self._step(self.searches)

    async def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """One output a prompt, once its search is over."""
        going = list(enumerate(self.searches))
        while going:
            results = iter([await _last(stream) for stream in self.streams])
            for _, search in going:
                search.accept([next(results) for _ in range(search.num_beams)])
            for index, search in going:
                if search.done:
                    yield index, self._output(search)
            going = [(index, search) for index, search in going if not search.done]
            if going:
                await self._step([search for _, search in going])

    @property
    def seed(self) -> int | None:
        """Nothing is drawn."""
        return None

    def _begin(self) -> list[BeamSearch]:
        return [
            begin_search(self.engine.front, name, prompt, self.beams, self.params, width_field="n", **self.options)
            for name, prompt in zip(self.names(), self.prompts, strict=True)
        ]

    async def _step(self, searches: list[BeamSearch]) -> None:
        requests = [request for search in searches for request in search.requests()]
        await self._start_all([self.engine.start(one, one.params, self.request_id) for one in requests])

    def _output(self, search: BeamSearch) -> RequestOutput:
        source = search.source
        return RequestOutput(
            request_id=self.request_id,
            prompt=source.prompt,
            prompt_token_ids=source.prompt_token_ids,
            outputs=search.choices(with_logprobs=self.params.logprobs is not None),
            finished=True,
            num_cached_tokens=search.num_cached_tokens,
            params=self.params,
        )


async def _last(stream: RequestStream) -> RequestOutput:
    """A request of one token gives one output."""
    async for output in stream:
        last = output
    return last
