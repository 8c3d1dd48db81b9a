"""NativeStep: one step in the native engine's queue, from its submission to the tokens of its rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from evensong.distributed.grid import Rank
from evensong.protocol.output import TokenLogprobs
from evensong.sampling.native_draws import NativeDraws, compose
from evensong.sampling.row import Bitmask, Float32, SamplingRow
from evensong.sampling.sampler import NO_TOKEN, Sampled, sample_row
from evensong.worker.batch import Batch
from evensong.worker.device import NO_MASKS, ROWS_AT_ONCE, DeviceStep, NotFiniteError, StepMark, with_masks
from evensong.worker.native_rows import given_rows, logits_rows, masks_of, row_changes_logits, rows_of
from evensong.worker.recording import Recording


class NativeStep(DeviceStep):
    """Construction submits it; with `eager` it runs up to the sampler, op by op, before that."""

    def __init__(
        self,
        engine: Any,
        recording: Recording,
        draws: NativeDraws,
        batch: Batch,
        rows: Sequence[SamplingRow],
        mark: StepMark,
        rank: Rank,
        eager: bool,
    ) -> None:
        self._engine = engine
        self._recording = recording
        self._draws = draws
        self._rows = rows
        self._mark = mark
        self._rank = rank
        counts = np.array(batch.num_query_tokens, dtype=np.int32)
        starts = np.array(batch.num_computed_tokens, dtype=np.int32)
        self._inputs = counts, starts, batch.block_tables, batch.token_ids
        self._sample_rows = batch.sample_rows
        samples = logits_rows(len(rows)) if mark.deferred else rows_of(rows)
        copies = np.array(batch.block_copies, dtype=np.int32) if batch.block_copies else None
        place = {"bank": mark.bank, "step_id": mark.step_id, "feed_after": mark.feed_after}
        if eager:
            recording.run_eagerly(engine, self._inputs, batch.sample_rows, samples, place, copies)
        self._program = recording.program
        # Where masks may come the step ends with the logits, and `draw` goes on.
        first = engine.submit(
            self._program,
            *self._inputs,
            batch.sample_rows,
            samples,
            first=recording.sampling_begins if eager else 0,
            last=recording.sampling_begins if mark.deferred else None,
            publishes=mark.publishes and not mark.deferred,
            copies=None if eager else copies,
            **place,
        )
        self._tickets = [first]
        self._results: Any = None

    def draw(self, masks: Mapping[int, Bitmask] = NO_MASKS) -> None:
        """The sampler alone, over the logits that the part before it leaves: it follows at once."""
        if not self._rank.is_output:
            return
        self._rows = with_masks(self._rows, masks)
        self._tickets.append(
            self._engine.submit(
                self._program,
                *self._inputs,
                self._sample_rows,
                rows_of(self._rows),
                first=self._recording.sampling_begins,
                masks=masks_of(self._rows),
                bank=self._mark.bank,
                step_id=self._mark.step_id,
                publishes=self._mark.publishes,
            )
        )

    def ready(self) -> bool:
        return not self._tickets or self._engine.ready(self._tickets[-1])

    def wait(self) -> None:
        failure: Exception | None = None
        while self._tickets:
            try:
                self._results = self._engine.wait(self._tickets.pop(0))
            except Exception as error:  # whatever follows fails for that reason, and is waited for too
                failure = failure or error
        if failure is not None:
            raise failure

    def sampled(self, index: int) -> Sampled:
        row = self._rows[index]
        if row_changes_logits(row):
            return sample_row(self._logits_row(index), row, self._draws)
        token_id = int(self._results[0][index])
        if token_id < 0 and row.bitmask is not None:
            return sample_row(self._logits_row(index), row, self._draws)  # which tells why
        if token_id < 0:
            return Sampled(-1, error=NO_TOKEN)
        if row.params.num_logprobs is None:
            return Sampled(token_id)
        asked = row.params.logprob_token_ids or ()
        return Sampled(token_id, self._logprobs(index, token_id, self._results, asked))

    def publish(self, tokens: Mapping[int, int]) -> None:
        slots, token_ids = (np.array(list(part), dtype=np.int64) for part in (tokens, tokens.values()))
        self._program.feed(slots, token_ids)
        self._program.publish(self._mark.step_id)

    def score(self, rows: range, token_ids: Sequence[int], num_best: int) -> list[TokenLogprobs]:
        scores: list[TokenLogprobs] = []
        finite = True
        for first in range(0, len(rows) if self._rank.is_last_stage else 0, ROWS_AT_ONCE):
            part = rows[first : first + ROWS_AT_ONCE]
            tokens = token_ids[first : first + len(part)]
            results = self._run_head(part, given_rows(tokens, num_best))
            if self._rank.is_output:
                # Other ranks do not know, and run the head over all parts.
                finite = finite and bool(np.isfinite(results[1]).all())
                if finite:
                    scores.extend(self._logprobs(index, token_id, results) for index, token_id in enumerate(tokens))
        if not finite:
            raise NotFiniteError
        return scores

    def logits(self, rows: Sequence[int]) -> Float32:
        if self._rank.is_last_stage:
            self._run_head(rows, logits_rows(len(rows)))
        num_token_ids = self._recording.num_token_ids
        if not self._rank.is_output:
            return np.empty((0, num_token_ids), np.float32)
        whole: Float32 = self._program.view(self._recording.logits, len(rows), self._mark.bank)[:, :num_token_ids]
        return whole.copy()

    def _run_head(self, rows: Sequence[int], samples: Any) -> Any:
        """The output head and the sampler once more, over other rows of the step, whose logits are lost."""
        ticket = self._engine.submit(
            self._program,
            *self._inputs,
            np.array(rows, dtype=np.int64),
            samples,
            first=self._recording.head_begins,
            bank=self._mark.bank,
        )
        return self._engine.wait(ticket)

    def _logprobs(self, index: int, token_id: int, results: Any, asked: Sequence[int] = ()) -> TokenLogprobs:
        """Of the token, of the best and of `asked`, in a row of what the sampler has just given."""
        _, shifts, ranks, found, ids, values = results
        shift, rank, best = float(shifts[index]), int(ranks[index]), slice(0, int(found[index]))
        return compose(self._logits_row(index), token_id, shift, rank, ids[index, best], values[index, best], asked)

    def _logits_row(self, index: int) -> Float32:
        recording = self._recording
        rows = self._program.view(recording.logits, index + 1, self._mark.bank)
        row: Float32 = rows[index, : recording.num_token_ids]
        return row
