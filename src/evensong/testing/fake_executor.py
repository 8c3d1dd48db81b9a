"""FakeExecutor: an executor without a model. The next token is a pure function of all tokens before it.

It holds the core to the protocol: slots, block tables and computed counts must agree with the plans, or it fails; so it
does when more steps are in flight than may be, or a plan names a token that no stage can have yet. It keeps a KV cache
of its own, in which a token's entry is its layer group and a digest of all tokens up to it: a block that was freed too
early, shared wrongly or never written is found when a request reads it.
"""

from __future__ import annotations

import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from evensong.executor.base import Executor, FailureCallback
from evensong.protocol.kv_spec import KVCacheConfig, LayerKVSpec, ModelLimits
from evensong.protocol.output import PromptScores, TokenLogprobs
from evensong.protocol.sampling_params import SamplingParams
from evensong.protocol.step import GrammarBitmask, ModelOutput, SchedulerOutput
from evensong.utils.progress import ProgressPage

NextToken = Callable[[list[int]], int]
VOCAB_SIZE = 1000


def scripted_token(token_ids: list[int]) -> int:
    """A token that depends on every token before it; ids below 10 never come (tests use them as EOS and stops)."""
    return 10 + zlib.crc32(repr(token_ids).encode()) % (VOCAB_SIZE - 10)


@dataclass
class _Slot:
    token_ids: list[int]
    block_ids: list[int]
    num_computed: int
    params: SamplingParams
    digests: list[int]
    rows_to_score: range = range(0)
    # The step that sampled its newest token.
    sampled_in: int = -(10**9)

    def score(self, start: int, end: int) -> PromptScores | None:
        """A scripted log-probability for each token that follows one of rows start..end-1 and is asked for."""
        rows = range(max(start, self.rows_to_score.start), min(end, self.rows_to_score.stop))
        values = [-float(1 + self.digests[row] % 7) for row in rows]
        positions = [
            TokenLogprobs([self.token_ids[row + 1]], [value], 1) for row, value in zip(rows, values, strict=True)
        ]
        return PromptScores(rows.start + 1, positions) if rows else None

    def grow_digests(self) -> None:
        """`digests[i]` comes to stand for tokens 0..i, for every token."""
        for token_id in self.token_ids[len(self.digests) :]:
            last = self.digests[-1] if self.digests else 0
            self.digests.append(zlib.crc32(token_id.to_bytes(4, "little"), last))


class _Worker:
    """What is not part of a step: `collective_rpc` reaches it, and `use_idle_time` does one of `idle_pieces`."""

    def __init__(self) -> None:
        self.idle_pieces = 0
        self.tick: Callable[[], object] = bool
        self.asleep: set[str] = set()
        self.forgot = False

    def sleep(self, part: str) -> None:
        self.asleep.add(part)
        self.forgot |= part == "kv_cache"

    def wake_up(self, part: str) -> None:
        self.asleep.discard(part)


class Pipeline:
    """The steps that are in flight: as many as there are stages, and `steps_ahead` more. Fails for one too many."""

    def __init__(self, num_stages: int, steps_ahead: int) -> None:
        self.num_stages = num_stages
        self.size = num_stages + steps_ahead
        self._step_ids: deque[int] = deque()
        self._awaits_sampling = False
        # By step: the oldest one whose result had not been asked for when it came in.
        self._oldest: dict[int, int] = {}

    def begin(self, plan: SchedulerOutput) -> None:
        """A plan comes in."""
        assert not self._awaits_sampling, "a plan comes before the step before it was told to sample"
        assert plan.num_scheduled_tokens, "a step without tokens"
        assert not self._step_ids or plan.step_id == self._step_ids[-1] + 1, "step ids have a gap"
        self._awaits_sampling = True
        self._step_ids.append(plan.step_id)
        self._oldest[plan.step_id] = self._step_ids[0]
        assert len(self._step_ids) <= self.size, "more steps in flight than may be"

    def left_the_stages(self, sampled_in: int, step_id: int) -> bool:
        """Whether a token that one step sampled can be there when another one begins."""
        return sampled_in < self._oldest.get(step_id, step_id) or step_id - sampled_in >= self.num_stages

    def sample(self) -> None:
        """The step that came last is told to sample."""
        assert self._awaits_sampling, "sample_tokens without execute_model"
        self._awaits_sampling = False

    def take(self) -> None:
        """The oldest step's result was asked for."""
        self._step_ids.popleft()


class _Taken(Future[ModelOutput]):
    """A step's result, which leaves the pipeline when it is first asked for."""

    def __init__(self, take: Callable[[], None]) -> None:
        super().__init__()
        self._take: Callable[[], None] | None = take

    def result(self, timeout: float | None = None) -> ModelOutput:
        output = super().result(timeout)
        take, self._take = self._take, None
        if take is not None:
            take()
        return output


class FakeExecutor(Executor):
    """Scripted tokens; `step_seconds` per step; `fail_at_step` raises in that step, as a broken worker would.

    Its model has one layer for each entry of `windows`. As many steps may be in flight as it has stages, and
    `steps_ahead` more.
    """

    def __init__(
        self,
        *,
        next_token: NextToken = scripted_token,
        step_seconds: float = 0.0,
        fail_at_step: int | None = None,
        max_position_embeddings: int = 4096,
        windows: Sequence[int | None] = (None,),
        num_stages: int = 1,
        steps_ahead: int = 1,
    ) -> None:
        self.next_token = next_token
        self.step_seconds = step_seconds
        self.fail_at_step = fail_at_step
        self.max_position_embeddings = max_position_embeddings
        self.windows = tuple(windows)
        self.pipeline = Pipeline(num_stages, steps_ahead)
        self.num_steps = 0
        self.num_computed_tokens = 0
        self.worker = _Worker()
        self.kv_cache: KVCacheConfig | None = None
        self._slots: dict[str, _Slot] = {}
        self._memory: list[tuple[int, int] | None] = []
        # What was executed and not sampled yet, with the log-probabilities of prompts.
        self._step: tuple[SchedulerOutput, dict[str, PromptScores]] | None = None
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._callbacks: list[FailureCallback] = []

    def get_kv_cache_specs(self) -> list[list[LayerKVSpec]]:
        return [[LayerKVSpec(layer, 1, 8, "float32", 4, window) for layer, window in enumerate(self.windows)]]

    def determine_available_memory(self) -> list[int]:
        return [1 << 30]

    def get_model_limits(self) -> ModelLimits:
        return ModelLimits(self.max_position_embeddings, VOCAB_SIZE, "cpu")

    def initialize_from_config(self, kv_cache: KVCacheConfig, max_model_len: int) -> None:
        self.kv_cache = kv_cache
        self._memory = [None] * (kv_cache.num_blocks * kv_cache.block_size)

    def measure_token_rate(self) -> float:
        return 4000.0

    def describe(self) -> dict[str, str]:
        return {"weights": "fake"}

    @property
    def max_concurrent_batches(self) -> int:
        return self.pipeline.size

    def execute_model(self, plan: SchedulerOutput) -> Future[None]:
        self.pipeline.begin(plan)
        return self._thread.submit(self._execute, plan)

    def sample_tokens(self, bitmask: GrammarBitmask | None) -> Future[ModelOutput]:
        self.pipeline.sample()
        output = _Taken(self.pipeline.take)

        def sample() -> None:
            try:
                output.set_result(self._sample())
            except Exception as error:
                output.set_exception(error)

        self._thread.submit(sample)
        return output

    def use_idle_time(self) -> bool:
        self.worker.idle_pieces -= 1
        return self.worker.idle_pieces >= 0

    def collective_rpc(self, method: str, timeout: float | None = None, args: tuple[Any, ...] = ()) -> list[Any]:
        owner = self.worker if hasattr(self.worker, method) else self
        call = None if method.startswith("_") else getattr(owner, method, None)
        if not callable(call):
            raise AttributeError(f"the worker has no method {method!r}")
        return [call(*args)]

    def watch_progress(self, page: ProgressPage) -> None:
        self.worker.tick = page.tick

    def register_failure_callback(self, callback: FailureCallback) -> None:
        self._callbacks.append(callback)

    def fail(self, reason: str) -> None:
        """What a monitor of real workers would report."""
        for callback in self._callbacks:
            callback(reason)

    def shutdown(self) -> None:
        self._thread.shutdown(wait=True)

    def _execute(self, plan: SchedulerOutput) -> None:
        assert not self.worker.asleep, f"a step while {self.worker.asleep} are asleep"
        if self.worker.forgot:
            self.worker.forgot = False
            self._memory = [None] * len(self._memory)
        self.num_steps += 1
        self.worker.tick()
        if self.fail_at_step is not None and self.num_steps >= self.fail_at_step:
            raise RuntimeError(f"the fake worker fails at step {self.num_steps}, as told")
        if self.step_seconds:
            time.sleep(self.step_seconds)
        for request_id in plan.released_request_ids:
            del self._slots[request_id]
        for new in plan.new_requests:
            assert new.request_id not in self._slots, f"{new.request_id} holds a slot already"
            tokens = new.prompt_token_ids + new.output_token_ids
            wanted = 0 if new.params.prompt_logprobs is None else len(new.prompt_token_ids) - 1
            to_score = range(new.prompt_logprobs_delivered, wanted)
            assert new.num_computed_tokens <= to_score.start or not to_score, f"{new.request_id} skips rows to score"
            self._slots[new.request_id] = _Slot(
                tokens, list(new.block_ids), new.num_computed_tokens, new.params, [], to_score
            )
        for source, target in plan.block_copies:
            self._copy_block(source, target)
        cached = plan.cached_requests
        for request_id, blocks, computed in zip(
            cached.request_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            slot = self._slots[request_id]
            slot.block_ids.extend(blocks)
            assert slot.num_computed == computed, f"{request_id}: {slot.num_computed} computed, plan says {computed}"
        self._advance(plan)

    def _copy_block(self, source: int, target: int) -> None:
        """Before anything of the step is written."""
        assert self.kv_cache is not None
        size = self.kv_cache.block_size
        self._memory[target * size : (target + 1) * size] = self._memory[source * size : (source + 1) * size]

    def _advance(self, plan: SchedulerOutput) -> None:
        assert self.kv_cache is not None
        scores: dict[str, PromptScores] = {}
        for request_id, count in plan.num_scheduled_tokens.items():
            slot = self._slots[request_id]
            assert count > 0, f"{request_id} is scheduled for no token"
            start, end = slot.num_computed, slot.num_computed + count
            assert end <= len(slot.token_ids), f"{request_id} computes tokens that do not exist"
            there = end < len(slot.token_ids) or self.pipeline.left_the_stages(slot.sampled_in, plan.step_id)
            assert there, f"{request_id}'s token has not left the last stage"
            rows = len(slot.block_ids) // len(self.kv_cache.groups)
            assert rows * self.kv_cache.block_size >= end, f"{request_id} lacks blocks"
            slot.grow_digests()
            self._write(request_id, slot, start, end)
            if (scored := slot.score(start, end)) is not None:
                scores[request_id] = scored
            slot.num_computed = end
            self.num_computed_tokens += count
            samples = slot.num_computed == len(slot.token_ids)
            assert samples == (request_id in plan.sampling_request_ids), f"{request_id}: sampling disagrees"
        # Attention reads after every row of the step has written.
        for request_id, count in plan.num_scheduled_tokens.items():
            self._read(request_id, self._slots[request_id], self._slots[request_id].num_computed - count)
        self._step = plan, scores

    def _write(self, request_id: str, slot: _Slot, start: int, end: int) -> None:
        """The tokens of positions start..end-1, in every group; the blocks that they and their windows need exist."""
        assert self.kv_cache is not None
        size, num_groups = self.kv_cache.block_size, len(self.kv_cache.groups)
        needed: list[int] = []
        for group, spec in enumerate(self.kv_cache.groups):
            first = _first_seen(start, spec.window) // size
            needed += slot.block_ids[group::num_groups][first : -(-end // size)]
            for place, digest in zip(self._places(slot, group, start, end), slot.digests[start:end], strict=True):
                self._memory[place] = (group, digest)
        assert all(0 <= block < self.kv_cache.num_blocks for block in needed), (
            f"{request_id} lacks a block that it sees"
        )
        assert len(set(needed)) == len(needed), f"{request_id} holds a block twice"

    def _read(self, request_id: str, slot: _Slot, start: int) -> None:
        """All that the queries from `start` on see, in every group."""
        assert self.kv_cache is not None
        for group, spec in enumerate(self.kv_cache.groups):
            first, end = _first_seen(start, spec.window), slot.num_computed
            read = [self._memory[place] for place in self._places(slot, group, first, end)]
            expected = [(group, digest) for digest in slot.digests[first:end]]
            assert read == expected, f"{request_id} reads keys that are not its own"

    def _places(self, slot: _Slot, group: int, start: int, end: int) -> list[int]:
        """Where a group's tokens of positions start..end-1 lie in the cache."""
        assert self.kv_cache is not None
        size, blocks = self.kv_cache.block_size, slot.block_ids[group :: len(self.kv_cache.groups)]
        return [blocks[position // size] * size + position % size for position in range(start, end)]

    def _sample(self) -> ModelOutput:
        assert self._step is not None, "sample_tokens without execute_model"
        (plan, scores), self._step = self._step, None
        sampled: list[list[int]] = []
        logprobs: list[list[TokenLogprobs] | None] = []
        for request_id in plan.sampling_request_ids:
            slot = self._slots[request_id]
            token_id = self.next_token(slot.token_ids)
            slot.token_ids.append(token_id)
            slot.sampled_in = plan.step_id
            sampled.append([token_id])
            wanted = slot.params.num_logprobs is not None
            logprobs.append([TokenLogprobs([token_id, token_id], [-0.5, -0.5], 1)] if wanted else None)
        return ModelOutput(list(plan.sampling_request_ids), sampled, logprobs, prompt_scores=scores)


def _first_seen(position: int, window: int | None) -> int:
    """The first position that a query at `position` sees."""
    return 0 if window is None else max(position - window + 1, 0)
