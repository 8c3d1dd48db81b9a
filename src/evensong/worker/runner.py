"""Runner: turns plans into steps of the device and its results into tokens. The only writer of the slots.

Steps are started ahead of results. A step's tokens reach the next one through the device (its feed table): a slot has a
placeholder for its newest token until this rank *settles* the step, that is, waits for it and learns its tokens. Ranks
that sample nothing keep their placeholders: each is read once, by a step of the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from evensong.distributed.grid import ALONE, Rank
from evensong.protocol.kv_spec import KVCacheConfig
from evensong.protocol.step import GrammarBitmask, ModelOutput, SchedulerOutput
from evensong.sampling.processors import NO_PROCESSORS, Processors
from evensong.sampling.row import Bitmask
from evensong.sampling.sampler import Sampled
from evensong.worker.batch import Batch, build_batch
from evensong.worker.device import BANKS, NO_MASKS, Device, DeviceStep, StepMark, num_probe_blocks
from evensong.worker.prompt_scores import Wanted, score_prompts, wanted_scores
from evensong.worker.slots import Slot, SlotTable


@dataclass
class _Step:
    """A step in flight. `run` is None for a plan without tokens. `slots` are those of its sampled rows.

    Once it is settled there is an output, or a failure.
    """

    plan: SchedulerOutput
    run: DeviceStep | None
    slots: list[Slot]
    wanted: list[Wanted]
    publishes: bool
    drawn: bool
    output: ModelOutput | None = None
    failure: Exception | None = None
    settled: bool = False


class Runner:
    """One device and its requests. `execute` and `sample` alternate, one of each a step; `take` gives the results."""

    def __init__(
        self,
        device: Device,
        kv_cache: KVCacheConfig,
        processors: Processors = NO_PROCESSORS,
        rank: Rank = ALONE,
    ) -> None:
        self._device = device
        self._kv_cache = kv_cache
        self._slots = SlotTable(len(kv_cache.groups), processors)
        self._is_output = rank.is_output
        # Those whose results were not taken, oldest first.
        self._steps: deque[_Step] = deque()

    @property
    def num_in_flight(self) -> int:
        """Steps whose results were not taken."""
        return len(self._steps)

    def execute(self, plan: SchedulerOutput) -> None:
        """Starts the forward pass of `plan` behind those before, and the sampling of its rows.

        Settles older steps first, where that is needed: which ones follows from the plans alone, so that all ranks
        submit the same to their devices, in one order.
        """
        self._settle_before()
        self._slots.apply(plan)
        batch = build_batch(plan, self._slots)
        wanted = wanted_scores(plan, self._slots)
        for request_id, count in plan.num_scheduled_tokens.items():
            self._slots[request_id].num_computed_tokens += count
        slots = [self._slots[request_id] for request_id in plan.sampling_request_ids]
        # Before the rows are made, which look at the arrays that the slots have from then on.
        for slot in slots:
            slot.append_unknown(plan.step_id)
        rows = [slot.sampling_row() for slot in slots]
        # Tokens are there in the order of steps: one whose rows Python samples is told of by Python, and those behind.
        publishes = self._is_output and not any(row.changes_logits for row in rows)
        publishes &= all(step.settled or step.publishes for step in self._steps)
        mark = StepMark(plan.step_id, batch.feed_after, plan.awaits_bitmask, publishes)
        run = self._device.start(batch, rows, mark) if len(batch.token_ids) else None
        self._steps.append(_Step(plan, run, slots, wanted, publishes, drawn=not plan.awaits_bitmask))

    def sample(self, bitmask: GrammarBitmask | None = None) -> None:
        """The rows of the plan that was started last may be sampled now; `bitmask` allows some tokens alone."""
        step = self._steps[-1]
        if not step.drawn and step.run is not None:
            step.run.draw(_masks(step.plan.sampling_request_ids, bitmask))
        step.drawn = True

    def output_ready(self) -> bool:
        """Whether `take` would return at once; False while nothing is in flight."""
        if not self._steps:
            return False
        step = self._steps[0]
        return step.settled or (step.drawn and (step.run is None or step.run.ready()))

    def take(self) -> ModelOutput | None:
        """Waits for the oldest step in flight; None where this rank samples nothing. Raises what the step raised."""
        step = self._steps[0]
        self._settle(step)
        self._steps.popleft()
        if step.failure is not None:
            raise step.failure
        return step.output

    def warm_up(self, num_tokens: int) -> None:
        """A step over one sequence of up to PROBE_TOKENS tokens, in blocks of its own: harmless between any steps."""
        first = self._kv_cache.num_blocks
        blocks = np.arange(first, first + num_probe_blocks(self._kv_cache.block_size), dtype=np.int32)
        batch = Batch(
            token_ids=np.zeros(num_tokens, dtype=np.int64),
            num_query_tokens=[num_tokens],
            num_computed_tokens=[0],
            block_tables=[np.tile(blocks, (len(self._kv_cache.groups), 1))],
            sample_rows=np.empty(0, dtype=np.int64),
        )
        self._device.start(batch, []).wait()

    def _settle_before(self) -> None:
        """What must be over before another step starts.

        All but the last one, since a new step takes the logits' memory of the one before that. The last one too where
        it scores prompts, from hidden states that would be overwritten, or where the device takes no placeholders.
        """
        unsettled = [step for step in self._steps if not step.settled]
        for step in unsettled[: len(unsettled) - BANKS + 1]:
            self._settle(step)
        if unsettled and (unsettled[-1].wanted or not self._device.runs_ahead):
            self._settle(unsettled[-1])

    def _settle(self, step: _Step) -> None:
        """Waits for a step, whose output or failure is kept until it is taken."""
        if step.settled:
            return
        assert step.drawn, "a step was not told to sample"
        try:
            step.output = self._result(step)
        except Exception as error:
            step.failure = error
        step.settled = True

    def _result(self, step: _Step) -> ModelOutput | None:
        output = ModelOutput(list(step.plan.sampling_request_ids), [], [])
        if step.run is None:
            return output if self._is_output else None
        step.run.wait()
        if self._is_output:
            self._learn(step, step.run, output)
        scores, errors = score_prompts(step.run, step.wanted) if step.wanted else ({}, {})
        output.prompt_scores = scores
        output.errors = errors | output.errors
        return output if self._is_output else None

    def _learn(self, step: _Step, run: DeviceStep, output: ModelOutput) -> None:
        """Takes the tokens of a step's rows into the slots and the output, and publishes them."""
        fed: dict[int, int] = {}
        for index, (request_id, slot) in enumerate(zip(output.request_ids, step.slots, strict=True)):
            if slot.ended:
                # It got no token in a step before: what it would go on with is for nobody.
                result = Sampled(-1, exhausted=True)
            else:
                result = run.sampled(index)
            _note(request_id, result, output)
            if not output.sampled_token_ids[-1]:
                slot.ended = True
                continue
            slot.learn(step.plan.step_id, result.token_id)
            # A slot that was given up since may have left its place in the table to another request.
            if self._slots.get(request_id) is slot:
                fed[slot.feed_slot] = result.token_id
        if not step.publishes:
            run.publish(fed)


def _note(request_id: str, result: Sampled, output: ModelOutput) -> None:
    tokens = [] if result.error is not None or result.exhausted else [result.token_id]
    if result.error is not None:
        output.errors[request_id] = result.error
    elif result.exhausted:
        output.exhausted.append(request_id)
    output.sampled_token_ids.append(tokens)
    output.logprobs.append([result.logprobs] if tokens and result.logprobs is not None else None)


def _masks(request_ids: Sequence[str], bitmask: GrammarBitmask | None) -> Mapping[int, Bitmask]:
    """The masks of the rows that sample, by index."""
    if bitmask is None or not bitmask.request_ids:
        return NO_MASKS
    words = np.frombuffer(bitmask.words, dtype=np.uint32).reshape(len(bitmask.request_ids), -1)
    of_request = dict(zip(bitmask.request_ids, words, strict=True))
    return {index: of_request[name] for index, name in enumerate(request_ids) if name in of_request}
