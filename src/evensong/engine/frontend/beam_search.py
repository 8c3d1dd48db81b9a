"""BeamSearch: one search as a state machine. Whoever drives it runs its requests, however that is done.

Each step asks for the best tokens after every beam: requests of one token, which find their prefixes in the cache. A
beam's tokens travel as output so far, so that a search that was admitted is not turned away by a full queue later on.
The search is a function of the model's log-probabilities alone: ties go to the lower token ids.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from evensong.engine.frontend.detokenizer import TokenTexts
from evensong.engine.frontend.front import FrontEnd
from evensong.engine.frontend.input_processor import ProcessedRequest, Prompt
from evensong.protocol.beam_search import BeamSearchParams, BeamSearchSequence
from evensong.protocol.errors import RequestError
from evensong.protocol.request_output import CompletionOutput, Logprob, RequestOutput
from evensong.protocol.sampling_params import RequestOutputKind, SamplingParams

Position = dict[int, Logprob]


def begin_search(
    front: FrontEnd,
    request_id: str,
    prompt: Prompt,
    params: BeamSearchParams,
    settings: SamplingParams | None = None,
    *,
    width_field: str = "beam_width",
    **options: Any,
) -> BeamSearch:
    """The search of one prompt. Raises RequestError for what cannot be served, naming `width_field` for its width.

    Of `settings` count truncate_prompt_tokens, skip_special_tokens and logprobs; `options` are those of
    InputProcessor.process.
    """
    inputs = front.inputs
    if params.beam_width > inputs.rules.max_n:
        raise RequestError(
            f"{width_field} must be at most {inputs.rules.max_n}, got {params.beam_width}", param=width_field
        )
    plain = msgspec.structs.replace(settings or SamplingParams(), n=1, max_tokens=params.max_tokens)
    source = inputs.process(request_id, prompt, plain, **options)
    num_best = min(max(2 * params.beam_width, plain.logprobs or 0), inputs.num_token_ids)
    return BeamSearch(source, params, front.texts, num_best=num_best)


@dataclass(frozen=True, slots=True)
class _Beam:
    """Output tokens so far, and at each the best tokens of its place."""

    token_ids: tuple[int, ...] = ()
    positions: tuple[Position, ...] = ()
    cum_logprob: float = 0.0
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class BeamSearch:
    """One prompt's search. `source` is the prompt as a request of one choice, with max_tokens fitted to the context.

    `num_best` tokens are asked for after each beam: two for each place, as one of them may be EOS, or more to show.
    """

    def __init__(self, source: ProcessedRequest, params: BeamSearchParams, texts: TokenTexts, *, num_best: int) -> None:
        (self._child,) = source.children
        self.source = source
        self.num_cached_tokens: int | None = None
        self._params = params
        self._texts = texts
        self._eos = frozenset(self._child.eos_token_ids)
        self._max_tokens = min(params.max_tokens, source.params.max_tokens or params.max_tokens)
        self._num_best = num_best
        self._beams: list[_Beam] = [_Beam()]
        self._ended: list[_Beam] = []
        self._depth = 0

    @property
    def done(self) -> bool:
        """True once no beam goes on."""
        return not self._beams

    @property
    def num_beams(self) -> int:
        """How many requests the step has."""
        return len(self._beams)

    def requests(self) -> list[ProcessedRequest]:
        """The step's requests, one a beam: their outputs go to `accept`, in this order."""
        params = SamplingParams(
            temperature=0.0,
            max_tokens=self._depth + 1,
            logprobs=self._num_best,
            ignore_eos=True,
            detokenize=False,
            seed=0,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        return [self._request(index, beam, params) for index, beam in enumerate(self._beams)]

    def accept(self, outputs: Sequence[RequestOutput]) -> None:
        """Takes the step's outputs and goes on to the next."""
        if self.num_cached_tokens is None:
            self.num_cached_tokens = outputs[0].num_cached_tokens
        stopped = next((one.outputs[0] for one in outputs if not one.outputs[0].logprobs), None)
        if stopped is not None:  # aborted, or over its time
            self._end([self._with_end(beam, stopped.finish_reason, stopped.stop_reason) for beam in self._beams])
            return
        self._depth += 1
        goes_on, ended = self._expand([one.outputs[0].logprobs[-1] for one in outputs if one.outputs[0].logprobs])
        self._ended = self._best([*self._ended, *ended])
        self._beams = goes_on
        if self._depth == self._max_tokens:
            self._end([self._with_end(beam, "length", None) for beam in goes_on])

    def choices(self, *, with_logprobs: bool) -> list[CompletionOutput]:
        """The best sequences as choices of an answer, best first: output alone."""
        return [
            CompletionOutput(
                index=index,
                text=self._text([], beam),
                token_ids=list(beam.token_ids),
                cumulative_logprob=beam.cum_logprob if with_logprobs else None,
                logprobs=_own_first(beam) if with_logprobs else None,
                finish_reason=beam.finish_reason,
                stop_reason=beam.stop_reason,
            )
            for index, beam in enumerate(self._ended)
        ]

    def sequences(self) -> list[BeamSearchSequence]:
        """The best sequences with their prompt, best first."""
        prompt = self.source.prompt_token_ids
        return [
            BeamSearchSequence(
                tokens=[*prompt, *beam.token_ids],
                logprobs=_own_first(beam),
                cum_logprob=beam.cum_logprob,
                text=self._text(prompt, beam),
                finish_reason=beam.finish_reason,
                stop_reason=beam.stop_reason,
            )
            for beam in self._ended
        ]

    def _request(self, index: int, beam: _Beam, params: SamplingParams) -> ProcessedRequest:
        child = msgspec.structs.replace(
            self._child,
            request_id=f"{self._child.request_id}-{self._depth}-{index}",
            params=params,
            output_token_ids=list(beam.token_ids),
        )
        return ProcessedRequest(None, self.source.prompt_token_ids, params, [child])

    def _expand(self, positions: Sequence[Position]) -> tuple[list[_Beam], list[_Beam]]:
        """The best beams that go on, and those that EOS ended. Beams are made for survivors only."""
        # All are of one length, so the order of their tokens is that of their parents, and then of the last token.
        order = sorted(range(len(self._beams)), key=lambda index: self._beams[index].token_ids)
        ranks = {index: rank for rank, index in enumerate(order)}
        candidates: list[tuple[float, int, int, int]] = []
        ended: list[_Beam] = []
        for index, (beam, position) in enumerate(zip(self._beams, positions, strict=True)):
            for token_id, entry in position.items():
                total = beam.cum_logprob + entry.logprob
                if token_id in self._eos and not self._params.ignore_eos:
                    ended.append(self._with_end(_longer(beam, token_id, position, total), "stop", token_id))
                else:
                    score = self._score(total, self._depth, token_id)
                    candidates.append((-score, ranks[index], token_id, index))
        best = heapq.nsmallest(self._params.beam_width, candidates)
        return [
            _longer(
                self._beams[index],
                token_id,
                positions[index],
                self._beams[index].cum_logprob + positions[index][token_id].logprob,
            )
            for _, _, token_id, index in best
        ], ended

    def _end(self, beams: Iterable[_Beam]) -> None:
        self._ended = self._best([*self._ended, *beams])
        self._beams = []

    def _best(self, beams: Iterable[_Beam]) -> list[_Beam]:
        def order(beam: _Beam) -> tuple[float, tuple[int, ...]]:
            last = beam.token_ids[-1] if beam.token_ids else -1
            return -self._score(beam.cum_logprob, len(beam.token_ids), last), beam.token_ids

        return sorted(beams, key=order)[: self._params.beam_width]

    def _score(self, cum_logprob: float, num_output_tokens: int, last: int) -> float:
        """vLLM's: EOS does not count as length, whether it ends a sequence or is ignored."""
        length = len(self.source.prompt_token_ids) + num_output_tokens - (last in self._eos)
        return float(cum_logprob / length**self._params.length_penalty)

    def _text(self, prompt_token_ids: Sequence[int], beam: _Beam) -> str:
        token_ids, eos = list(beam.token_ids), ""
        if beam.finish_reason == "stop":
            last = token_ids.pop()
            eos = self._texts.text_of(last) if self._params.include_stop_str_in_output else ""
        skip = self.source.params.skip_special_tokens
        if prompt_token_ids:
            return self._texts.tokenizer.decode([*prompt_token_ids, *token_ids], skip_special_tokens=skip) + eos
        # As the text of any other choice.
        detokenizer = self._texts.detokenizer(skip, self.source.shown_token_ids)
        return "".join(map(detokenizer.push, token_ids)) + detokenizer.finish() + eos

    @staticmethod
    def _with_end(beam: _Beam, finish_reason: str | None, stop_reason: int | str | None) -> _Beam:
        return _Beam(beam.token_ids, beam.positions, beam.cum_logprob, finish_reason, stop_reason)


def _longer(beam: _Beam, token_id: int, position: Position, cum_logprob: float) -> _Beam:
    return _Beam((*beam.token_ids, token_id), (*beam.positions, position), cum_logprob)


def _own_first(beam: _Beam) -> list[Position]:
    """Log-probabilities with the sequence's own token first, as everywhere."""
    return [
        {token_id: position[token_id], **position}
        for token_id, position in zip(beam.token_ids, beam.positions, strict=True)
    ]
