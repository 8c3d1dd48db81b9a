"""RequestState: one user request with its choices (n), and where its outputs go (spec F2, F6)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from evensong.engine.frontend.detokenizer import TokenTexts
from evensong.engine.frontend.input_processor import ProcessedRequest
from evensong.engine.frontend.logprobs import PromptLogprobState
from evensong.engine.frontend.output_state import ChoiceState
from evensong.protocol.output import PromptScores
from evensong.protocol.request_output import RequestMetrics, RequestOutput
from evensong.protocol.sampling_params import RequestOutputKind


class Sink(Protocol):
    """Who waits for a request."""

    def admitted(self) -> None:
        """Every choice has a place in the core's queue."""

    def changed(self, state: RequestState) -> None:
        """There is something new to take from `state`."""

    def failed(self, error: Exception) -> None:
        """The request ends with an error."""


class RequestState:
    """Choices in order of index; the request is finished once all of them are."""

    def __init__(self, request_id: str, processed: ProcessedRequest, texts: TokenTexts, sink: Sink) -> None:
        self.request_id = request_id
        self.processed = processed
        self.choices = [
            ChoiceState(index, child, texts, processed.shown_token_ids)
            for index, child in enumerate(processed.children)
        ]
        self.sink = sink
        self.metrics = RequestMetrics(processed.children[0].arrival_time)
        # W3C Trace Context of whoever sent it.
        self.trace_headers: Mapping[str, str] = {}
        self.num_cached_tokens: int | None = None
        self.num_to_admit = len(self.choices)
        self._prompt = None
        if processed.params.prompt_logprobs is not None:
            self._prompt = PromptLogprobState(len(processed.prompt_token_ids), texts)
        self._changed: set[int] = set()
        self._num_open = len(self.choices)
        self._sent_final = False

    @property
    def kind(self) -> RequestOutputKind:
        """Which part of the output each RequestOutput carries."""
        return self.processed.params.output_kind

    @property
    def finished(self) -> bool:
        """True once every choice has its last token."""
        return self._num_open == 0

    @property
    def open_ids(self) -> list[str]:
        """Internal ids of the choices that have not finished."""
        return [choice.request.request_id for choice in self.choices if not choice.finished]

    def accept_prompt_scores(self, scores: PromptScores) -> int:
        """Takes log-probabilities of the prompt; returns how many of those that are here already differ."""
        return 0 if self._prompt is None else self._prompt.accept(scores)

    def mark_changed(self, choice: ChoiceState, num_new_tokens: int, now: float) -> None:
        """Notes that a choice has something new, or its end, and when; of what has ended nothing more comes."""
        if num_new_tokens and self.metrics.first_token_time is None:
            self.metrics.first_token_time = now
        self._changed.add(choice.index)
        if choice.finish_reason is not None:
            self._num_open -= 1
            if self._num_open == 0:
                self.metrics.finished_time = now

    def take(self) -> RequestOutput | None:
        """The next RequestOutput, with everything since the last one merged; None when there is nothing to show."""
        if not self._changed or self._sent_final:
            return None
        finished, kind = self._num_open == 0, self.processed.params.output_kind
        if kind is RequestOutputKind.FINAL_ONLY and not finished:
            return None
        prompt = self._prompt
        if prompt is not None and not prompt.complete and not finished:
            return None  # another choice is ahead of the one that computes the prompt's log-probabilities
        delta = kind is RequestOutputKind.DELTA
        shown = [c for c in self.choices if not delta or c.index in self._changed]
        self._changed.clear()
        self._sent_final = finished
        if delta:
            self._prompt = None
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.processed.prompt,
            prompt_token_ids=self.processed.prompt_token_ids,
            outputs=[choice.output(delta=delta) for choice in shown],
            finished=finished,
            num_cached_tokens=self.num_cached_tokens,
            params=self.processed.params,
            metrics=self.metrics,
            prompt_logprobs=prompt.positions if prompt is not None and prompt.complete else None,
        )
