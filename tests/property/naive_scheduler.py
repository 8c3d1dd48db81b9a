"""The scheduler and its KV cache said naively, with lists and searches: what a plan is, which blocks it takes."""

from __future__ import annotations

from dataclasses import dataclass, field

from evensong.protocol.request import EngineCoreRequest
from evensong.scheduler.budget import SchedulerLimits
from evensong.scheduler.scheduler import MAX_STEPS_BEHIND_A_WRITER
from evensong.testing.fake_executor import scripted_token

# Which layer group's keys of which tokens.
Prefix = tuple[int, str | None, tuple[int, ...]]
Windows = tuple[int | None, ...]


@dataclass(eq=False)
class Job:
    source: EngineCoreRequest
    tokens: list[int]
    computed: int = 0
    published: int = 0
    patience: int = 0
    table: list[int] = field(default_factory=list)

    def ends(self, max_model_len: int) -> bool:
        params, made = self.source.params, len(self.tokens) - len(self.source.prompt_token_ids)
        stops = set(params.stop_token_ids or []) | (set() if params.ignore_eos else set(self.source.eos_token_ids))
        stopped = made >= params.min_tokens and self.tokens[-1] in stops
        return stopped or made == params.max_tokens or len(self.tokens) >= max_model_len


class NaiveScheduler:
    def __init__(
        self, limits: SchedulerLimits, num_blocks: int, block_size: int, caching: bool, windows: Windows = (None,)
    ) -> None:
        self.limits, self.size, self.caching, self.windows = limits, block_size, caching, windows
        self.longest_chunk = limits.max_num_batched_tokens
        self.free, self.refs = list(range(num_blocks)), [0] * num_blocks
        self.content: dict[int, Prefix] = {}
        self.waiting: list[Job] = []
        self.num_back = 0  # waiting[:num_back] came back; they go ahead of new ones
        self.running: list[Job] = []
        self.turn = 0
        self.started: set[str] = set()

    def add(self, source: EngineCoreRequest) -> None:
        job = Job(source, source.prompt_token_ids + source.output_token_ids)
        back = source.attempt > 0 or bool(source.output_token_ids)
        self.waiting.insert(self.num_back if back else len(self.waiting), job)
        self.num_back += back

    def remove(self, request_id: str) -> None:
        for job in [j for j in self.running + self.waiting if j.source.request_id == request_id]:
            self._unqueue(job) if job in self.waiting else self._stop(job)

    def plan(self) -> dict[str, int]:
        plan: dict[str, int] = {}
        self.started = set()
        left, preempted = self.limits.max_num_batched_tokens, False
        for job in self.running:
            self._give_back(job)
        order, self.turn = self.running[self.turn :] + self.running[: self.turn], 0
        for job in order:
            if job not in self.running:
                continue
            count = self._share(len(job.tokens) - job.computed, left)
            if count == 0:
                self.turn = self.running.index(job)
                break
            while job in self.running and not self._grow(job, job.computed + count):
                preempted, victim = True, self.running[-1]
                left += plan.pop(victim.source.request_id, 0)
                self._stop(victim)
                victim.computed = victim.patience = 0
                self.waiting.insert(0, victim)
                self.num_back += 1
            if job in self.running:
                plan[job.source.request_id] = count
                left -= count
        behind = 0
        for job in [] if preempted else list(self.waiting):
            if len(self.running) + behind >= self.limits.max_num_seqs or left == 0:
                break
            hit = self._hit(job)
            cached = len(hit) // len(self.windows)
            if job.patience < MAX_STEPS_BEHIND_A_WRITER and self._being_written(job, cached):
                job.patience += 1
                behind += 1
                continue
            count = self._share(len(job.tokens) - cached * self.size, left)
            if count == 0 or not self._start(job, hit, count):
                break
            plan[job.source.request_id] = count
            self.started.add(job.source.request_id)
            left -= count
        return plan

    def update(self, plan: dict[str, int]) -> dict[str, int]:
        """Applies a step; the new token of each request that got one."""
        jobs = {j.source.request_id: j for j in self.running if j.source.request_id in plan}
        for request_id, job in jobs.items():
            job.computed += plan[request_id]
        # Of two blocks with one content the first shown stays: those of requests that start come first.
        for request_id in sorted(jobs, key=lambda one: (one not in self.started, list(plan).index(one))):
            job = jobs[request_id]
            while self.caching and (job.published + 1) * self.size <= job.computed:
                for group in range(len(self.windows)):
                    block = job.table[job.published * len(self.windows) + group]
                    prefix = self._prefix(job, job.published + 1, group)
                    if block not in self.content and prefix not in self.content.values():
                        self.content[block] = prefix
                job.published += 1
        sampled: dict[str, int] = {}
        for request_id in plan:
            if request_id in jobs and jobs[request_id].computed == len(jobs[request_id].tokens):
                job = jobs[request_id]
                sampled[request_id] = scripted_token(job.tokens)
                job.tokens.append(sampled[request_id])
                if job.ends(self.limits.max_model_len):
                    self._stop(job)
        return sampled

    def _share(self, wanted: int, left: int) -> int:
        if not self.limits.enable_chunked_prefill:
            return wanted if wanted <= left else 0
        return min(wanted, left, self.limits.long_prefill_token_threshold or wanted)

    def _prefix(self, job: Job, num_blocks: int, group: int = 0) -> Prefix:
        return group, job.source.cache_salt, tuple(job.tokens[: num_blocks * self.size])

    def _needs(self, window: int | None, index: int, computed: int) -> bool:
        """Whether the token after `computed` ones, or a later one, sees a token of the block."""
        return window is None or (index + 1) * self.size - 1 > computed - window

    def _hit(self, job: Job) -> list[int]:
        places = {prefix: block for block, prefix in self.content.items()}
        for count in range((len(job.tokens) - 1) // self.size if self.caching else 0, 0, -1):
            found = [
                places.get(self._prefix(job, index + 1, group)) if self._needs(window, index, count * self.size) else -1
                for index in range(count)
                for group, window in enumerate(self.windows)
            ]
            if None not in found:
                return [block for block in found if block is not None]
        return []

    def _being_written(self, job: Job, num_hit: int) -> bool:
        wanted = self._prefix(job, num_hit + 1)
        return (
            self.caching
            and (num_hit + 1) * self.size < len(job.tokens)
            and any(other.published <= num_hit and self._prefix(other, num_hit + 1) == wanted for other in self.running)
        )

    def _most(self, window: int | None) -> int:
        """Blocks of the longest span that one step can see, wherever it starts in a block."""
        if window is None:
            return 10**9
        span = window - 1 + self.longest_chunk
        return max((start + span - 1) // self.size + 1 for start in range(self.size))

    def _start(self, job: Job, hit: list[int], count: int) -> bool:
        groups, cached = len(self.windows), len(hit) // len(self.windows)
        taken = [block for block in hit if block >= 0 and self.refs[block] == 0]
        now = (-(-(cached * self.size + count) // self.size) - cached) * groups + len(taken)
        rest = -(-len(job.tokens) // self.size) - cached
        later = sum(
            min(rest + len(set(hit[group::groups]) & set(taken)), self._most(window))
            for group, window in enumerate(self.windows)
        )
        if max(now, later) > len(self.free):
            return False
        for block in taken:
            self.free.remove(block)
        for block in hit:
            if block >= 0:
                self.refs[block] += 1
        job.table, job.published, job.computed = list(hit), cached, cached * self.size
        self._unqueue(job)
        self.running.append(job)
        return self._grow(job, job.computed + count)

    def _grow(self, job: Job, num_tokens: int) -> bool:
        need = -(-num_tokens // self.size) * len(self.windows) - len(job.table)
        if need > len(self.free):
            return False
        for _ in range(need):
            block = self.free.pop(0)
            self.content.pop(block, None)
            self.refs[block] = 1
            job.table.append(block)
        return True

    def _give_back(self, job: Job) -> None:
        """Drops the blocks that no token to come sees; of one window after the other, the last block first."""
        for window in dict.fromkeys(self.windows):
            places = [
                place
                for place, block in enumerate(job.table)
                if block >= 0
                and self.windows[place % len(self.windows)] == window
                and not self._needs(window, place // len(self.windows), job.computed)
            ]
            self._drop([job.table[place] for place in places])
            for place in places:
                job.table[place] = -1

    def _drop(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self.refs[block] -= 1
            if self.refs[block] == 0:
                self.free.append(block)

    def _unqueue(self, job: Job) -> None:
        self.num_back -= self.waiting.index(job) < self.num_back
        self.waiting.remove(job)

    def _stop(self, job: Job) -> None:
        self.turn -= self.running.index(job) < self.turn
        self.running.remove(job)
        self._drop([block for block in job.table if block >= 0])
        job.table, job.published = [], 0
