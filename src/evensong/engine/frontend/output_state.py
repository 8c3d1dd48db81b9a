"""One choice's output as it grows: tokens checked for order, text, stop strings, log-probabilities."""

from __future__ import annotations

from evensong.engine.frontend.detokenizer import TokenTexts
from evensong.engine.frontend.logprobs import TokenGap, to_logprobs
from evensong.engine.frontend.stop_strings import StopStrings
from evensong.protocol.output import EngineCoreOutput, FinishReason, TokenLogprobs
from evensong.protocol.request import EngineCoreRequest
from evensong.protocol.request_output import CompletionOutput, SampleLogprobs


class ChoiceState:
    """Accepts a choice's tokens from the core, each exactly once, and holds the output so far."""

    def __init__(
        self, index: int, request: EngineCoreRequest, texts: TokenTexts, shown: frozenset[int] = frozenset()
    ) -> None:
        params = request.params
        self.index = index
        self.request = request
        self.text = ""
        # Those that it came with are here already; their log-probabilities are with whoever sent them.
        self.token_ids = list(request.output_token_ids)
        self.logprobs: SampleLogprobs | None = None if params.num_logprobs is None else []
        self.cumulative_logprob = 0.0
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.num_violations = 0
        self._texts = texts
        self._detokenizer = texts.detokenizer(params.skip_special_tokens, shown) if params.detokenize else None
        self._include_stop = params.include_stop_str_in_output
        self._stops = StopStrings(params.stop_strings, self._include_stop)
        self._sent_text = 0
        self._sent_tokens = len(self.token_ids)

    @property
    def finished(self) -> bool:
        """True once the choice has its last token."""
        return self.finish_reason is not None

    def accept(self, output: EngineCoreOutput) -> int:
        """Takes what is new in `output`; returns the number of new tokens.

        Of a token at an index that is here already, only a difference is noted. Raises TokenGap.
        """
        ids = output.new_token_ids
        if len(ids) == 1 and output.start == len(self.token_ids) and output.finish_reason is None:
            # Nearly all of them. What follows would do the same.
            self._append(ids[0], output.new_logprobs[0] if output.new_logprobs else None, hidden=False)
            return 1
        if output.start > len(self.token_ids):
            raise TokenGap(f"token {len(self.token_ids)} is missing, {output.start} came")
        known = len(self.token_ids) - output.start
        for old, new in zip(self.token_ids[output.start :], ids, strict=False):
            self.num_violations += old != new
        logprobs = output.new_logprobs or []
        count = 0
        for offset in range(known, len(ids)):
            ends = output.finish_reason is not None and offset == len(ids) - 1
            # The token that ended it (EOS, a stop id) has no text, unless asked for; one that merely was the last has.
            hidden = ends and output.finish_reason is FinishReason.STOP and not self._include_stop
            self._append(ids[offset], logprobs[offset] if logprobs else None, hidden)
            count += 1
            if self.finished:
                return count
        if output.finish_reason is not None:
            self._finish(str(output.finish_reason), output.stop_reason)
        return count

    def _append(self, token_id: int, logprobs: TokenLogprobs | None, hidden: bool) -> None:
        self.token_ids.append(token_id)
        if self.logprobs is not None and logprobs is not None:
            self.logprobs.append(to_logprobs(logprobs, self._texts))
            self.cumulative_logprob += logprobs.logprobs[0]
        if self._detokenizer is None or hidden:
            return
        text = self._detokenizer.push(token_id)
        if not self._stops.any:
            self.text += text
            return
        self.text += self._stops.push(text, may_stop=self._may_stop())
        if self._stops.matched is not None:
            self.finish_reason, self.stop_reason = "stop", self._stops.matched

    def _finish(self, reason: str, stop_reason: int | str | None) -> None:
        if self._detokenizer is not None:
            self.text += self._stops.push(self._detokenizer.finish(), may_stop=self._may_stop())
            if self._stops.matched is not None:
                reason, stop_reason = "stop", self._stops.matched
            else:
                self.text += self._stops.finish()
        self.finish_reason, self.stop_reason = reason, stop_reason

    def _may_stop(self) -> bool:
        """False until more than min_tokens tokens are here."""
        return len(self.token_ids) > self.request.params.min_tokens

    def output(self, *, delta: bool) -> CompletionOutput:
        """The choice as users see it: whole, or what came since the last call with `delta`."""
        text_from = self._sent_text if delta else 0
        tokens_from = self._sent_tokens if delta else 0
        if delta:
            self._sent_text, self._sent_tokens = len(self.text), len(self.token_ids)
        output = CompletionOutput(
            self.index,
            self.text[text_from:],
            self.token_ids[tokens_from:],
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            seed=self.request.params.seed,
        )
        if self.logprobs is not None:
            output.cumulative_logprob = self.cumulative_logprob
            output.logprobs = self.logprobs[max(tokens_from - len(self.request.output_token_ids), 0) :]
        return output
