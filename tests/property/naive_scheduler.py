"""The scheduler and its KV cache said naively, with lists and searches: what a plan is, which blocks it takes."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from evensong.protocol.request import EngineCoreRequest
from evensong.scheduler import policy, queue
from evensong.scheduler.budget import SchedulerLimits
from evensong.scheduler.scheduler import MAX_STEPS_BEHIND_A_WRITER
from evensong.testing.fake_executor import scripted_token

NEW = 10**9
# Which layer group's keys of which tokens.
Prefix = tuple[int, str | None, tuple[int, ...]]
Windows = tuple[int | None, ...]


@dataclass(eq=False)
class Job:
    source: EngineCoreRequest
    tokens: list[int]
    computed: int = 0  # those of planned steps too
    unknown: int = 0  # tokens that planned steps sample
    sampled_in: int = 0  # the last of those
    published: int = 0
    patience: int = 0
    scored: int = 0
    table: list[int] = field(default_factory=list)
    urgency: int = 0
    # Below 0: preempted, the last one first; then those that came resumed; then new ones, from NEW on.
    place: int = 0
    arrival: int = 0
    since: int = 0
    first_step: int = 0
    displaced: tuple[int, int] | None = None  # in which step, with how many tokens

    @property
    def made(self) -> int:
        """Tokens of output."""
        return len(self.tokens) - len(self.source.prompt_token_ids)

    @property
    def to_score(self) -> int:
        """Prompt tokens whose log-probabilities are asked for."""
        return 0 if self.source.params.prompt_logprobs is None else len(self.source.prompt_token_ids) - 1

    def ends(self, max_model_len: int) -> bool:
        params, made = self.source.params, self.made
        stops = set(params.stop_token_ids or []) | (set() if params.ignore_eos else set(self.source.eos_token_ids))
        stopped = made >= params.min_tokens and self.tokens[-1] in stops
        return stopped or made == params.max_tokens or len(self.tokens) >= max_model_len


@dataclass
class Part:
    """Of a planned step: what it computes of one job, and whether it samples its next token."""

    job: Job
    count: int
    end: int
    samples: bool
    starts: bool


class NaiveScheduler:
    def __init__(
        self,
        limits: SchedulerLimits,
        num_blocks: int,
        block_size: int,
        caching: bool,
        windows: Windows = (None,),
        stages: int = 1,
        ahead: bool = False,
    ) -> None:
        self.stages, self.ahead = stages, ahead
        self.flight: deque[tuple[int, list[Part]]] = deque()
        self.limits, self.size, self.caching, self.windows = limits, block_size, caching, windows
        self.longest_chunk = limits.max_num_batched_tokens
        self.free, self.refs = list(range(num_blocks)), [0] * num_blocks
        self.content: dict[int, Prefix] = {}
        self.waiting: list[Job] = []
        self.running: list[Job] = []
        self.turn = self.left = 0
        self.started: set[str] = set()
        self.paused = -(10**9)
        self.step = self.arrivals = self.overtakes = self.num_preempted = 0

    def add(self, source: EngineCoreRequest) -> None:
        job = Job(source, source.prompt_token_ids + source.output_token_ids, scored=source.prompt_logprobs_delivered)
        self.arrivals += 1
        back = source.attempt > 0 or bool(source.output_token_ids)
        job.urgency = source.priority
        job.arrival, job.place, job.since = self.arrivals, self.arrivals + (0 if back else NEW), self.step
        self._queue(job)

    def remove(self, request_id: str) -> None:
        for job in [j for j in self.running + self.waiting if j.source.request_id == request_id]:
            self.waiting.remove(job) if job in self.waiting else self._stop(job)

    def plan(self) -> dict[str, int]:
        plan: dict[str, int] = {}
        self.started = set()
        self.step += 1
        self.left = self.limits.max_num_batched_tokens
        # Of those that decode each step takes its part.
        self.seats = -(-len(self.running) // self.stages)
        for job in self.running:
            self._give_back(job)
        order, self.turn = self.running[self.turn :] + self.running[: self.turn], 0
        full = len(order) >= self.limits.max_num_seqs
        next_in = self.waiting[0].urgency if self.waiting else 2**63
        next_in = 2**63 if full and all(job.urgency <= next_in for job in order) else next_in
        least = max((job.urgency for job in order), default=next_in)
        unequal = self.left >= len(order) and least > min(next_in, *(job.urgency for job in order), 2**63)
        if unequal:
            order.sort(key=lambda one: one.urgency)
        half = self.left // 2
        keep = [len(order) - n + (half if next_in < job.urgency else 0) for n, job in enumerate(order, 1)]
        late = [job for job in order if next_in < job.urgency]
        if self.step - self.paused < policy.STEPS_BETWEEN_PAUSES:
            late = []
        self.paused = self.step if late else self.paused
        now = [(job, k if unequal else 0) for job, k in zip(order, keep, strict=True) if job not in late]
        crowded = self._serve(now, plan)
        if not crowded:
            self._fill(plan)
        if late and not self.started:
            self._serve([(job, 0) for job in late], plan)
        if plan:
            self._depart(plan)
        else:
            self.step -= 1
        return plan

    def _serve(self, order: list[tuple[Job, int]], plan: dict[str, int]) -> bool:
        crowded = False
        for job, keep in order:
            if job not in self.running or (wanted := self._wanted(job)) == 0:
                continue
            left = min(max(self.left - keep, 1), self.left)
            count = self._share(wanted, left)
            if count == 0:
                self.turn = self.running.index(job)
                break
            fits = self._grow(job, job.computed + count)
            crowded |= not fits
            while job in self.running and not fits and not job.unknown:
                least = max(other.urgency for other in self.running)
                self._preempt([other for other in self.running if other.urgency == least][-1], plan)
                fits = job in self.running and self._grow(job, job.computed + count)
            if fits:
                plan[job.source.request_id] = count
                self.left -= count
                self.seats -= job.computed >= len(job.source.prompt_token_ids)
        return crowded

    def _wanted(self, job: Job) -> int:
        """Tokens that a job could compute: those known, or the one that is sampled right now."""
        if job.computed >= len(job.source.prompt_token_ids) and self.seats == 0:
            return 0
        if job.computed < len(job.tokens):
            return len(job.tokens) - job.computed
        last = job.made + 1 == max(job.source.params.max_tokens or 0, 1) or (
            len(job.tokens) + 1 >= self.limits.max_model_len
        )
        old = self.step - job.sampled_in >= self.stages
        return int(self.ahead and job.unknown == 1 and old and not last)

    def _depart(self, plan: dict[str, int]) -> None:
        parts = []
        for request_id, count in plan.items():
            (job,) = [job for job in self.running if job.source.request_id == request_id]
            job.computed += count
            samples = job.computed == len(job.tokens) + job.unknown
            if samples:
                job.unknown, job.sampled_in = job.unknown + 1, self.step
            parts.append(Part(job, count, job.computed, samples, request_id in self.started))
        self.flight.append((self.step, parts))

    def _fill(self, plan: dict[str, int]) -> None:
        aged = self._aged()
        behind, blocked = 0, False
        for job in [aged, *(j for j in self.waiting if j is not aged)] if aged else list(self.waiting):
            if self.left == 0:
                return
            free_slot = not blocked and len(self.running) + behind < self.limits.max_num_seqs
            if not free_slot and (job is aged or not self._victims(job)):
                if job is aged:
                    continue
                return
            if len(self.running) >= self.limits.max_num_seqs and not any(
                other.urgency > self.waiting[0].urgency for other in self.running
            ):
                return
            hit = self._hit(job)
            cached = len(hit) // len(self.windows)
            if job.patience < MAX_STEPS_BEHIND_A_WRITER and self._being_written(job, cached):
                job.patience += 1
                behind += 1
                continue
            started = free_slot and self._begin(job, hit, plan, aged)
            victims = [] if started or job is aged else self._victims(job)
            if self._worth_it(job, hit, victims, plan):
                for victim in victims:
                    self._preempt(victim, plan)
                    victim.displaced = self.step, len(victim.tokens)
                    if self._begin(job, hit, plan, aged):
                        started = True
                        break
            if not started:
                blocked = True
                if job is not aged:
                    return

    def _begin(self, job: Job, hit: list[int], plan: dict[str, int], aged: Job | None) -> bool:
        count = self._share(len(job.tokens) - self._cached(hit), self.left)
        if count == 0:
            return False
        first = self.waiting[0].urgency
        if not self._start(job, hit, count):
            return False
        if job is aged:
            job.urgency, self.overtakes = first, 0
        fronts = {}
        for other in reversed(self.waiting):
            fronts[other.urgency] = other
        self.overtakes += any(f.arrival < job.arrival for urgency, f in fronts.items() if urgency > job.urgency)
        plan[job.source.request_id] = count
        self.started.add(job.source.request_id)
        self.left -= count
        return True

    def _aged(self) -> Job | None:
        """The longest waiting of those that are first of a less urgent kind, when it is its turn."""
        fronts = {}
        for job in reversed(self.waiting):
            fronts[job.urgency] = job
        due = [
            job
            for job in fronts.values()
            if job is not self.waiting[0] and self.step - 1 - job.since >= queue.AGE_STEPS
        ]
        return min(due, key=lambda job: job.arrival) if due and self.overtakes >= queue.MAX_OVERTAKES else None

    def _victims(self, job: Job) -> list[Job]:
        victims = []
        for other in reversed(self.running):
            since, had = other.displaced or (-(10**9), 0)
            rested = self.step - since >= policy.STEPS_BETWEEN_DISPLACEMENTS and len(other.tokens) > had
            if other.urgency > job.source.priority and other.first_step < self.step and rested:
                victims.append(other)
        return sorted(victims, key=lambda other: -other.urgency)

    def _worth_it(self, job: Job, hit: list[int], victims: list[Job], plan: dict[str, int]) -> bool:
        held = {block for other in self.running if other not in victims for block in other.table if block >= 0}
        taken = [block for block in hit if block >= 0 and block not in held]
        left = self.left + sum(plan.get(victim.source.request_id, 0) for victim in victims)
        fits = self._at_once(job, hit, taken) <= len(self.refs) - len(held)
        return fits and self._share(len(job.tokens) - self._cached(hit), left) > 0

    def _preempt(self, victim: Job, plan: dict[str, int]) -> None:
        self.left += plan.pop(victim.source.request_id, 0)
        self._stop(victim)
        victim.computed = victim.patience = victim.unknown = 0
        self.num_preempted += 1
        victim.place, victim.since = -self.num_preempted, self.step
        self._queue(victim)

    def _queue(self, job: Job) -> None:
        self.waiting.append(job)
        self.waiting.sort(key=lambda one: (one.urgency, one.place))

    def update(self) -> dict[str, int]:
        """Applies the oldest step in flight; the new token of each request that got one."""
        step, parts = self.flight.popleft()
        parts = [part for part in parts if part.job in self.running and part.job.first_step <= step]
        for part in parts:
            part.job.scored = max(part.job.scored, min(part.end, part.job.to_score))
        # Of two blocks with one content the first shown stays: those of requests that start come first.
        for part in sorted(parts, key=lambda one: not one.starts):
            job = part.job
            while self.caching and (job.published + 1) * self.size <= part.end:
                for group in range(len(self.windows)):
                    block = job.table[job.published * len(self.windows) + group]
                    prefix = self._prefix(job, job.published + 1, group)
                    if block >= 0 and block not in self.content and prefix not in self.content.values():
                        self.content[block] = prefix
                job.published += 1
        sampled: dict[str, int] = {}
        for job in (part.job for part in parts if part.samples):
            sampled[job.source.request_id] = scripted_token(job.tokens)
            job.tokens.append(sampled[job.source.request_id])
            job.unknown -= 1
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
        may_read = self.caching and job.scored >= job.to_score
        for count in range((len(job.tokens) - 1) // self.size if may_read else 0, 0, -1):
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
            and job.scored >= job.to_score
            and (num_hit + 1) * self.size < len(job.tokens)
            and any(
                other.published <= num_hit
                and self._prefix(other, num_hit + 1) == wanted
                and other.urgency <= job.urgency
                for other in self.running
            )
        )

    def _most(self, window: int | None) -> int:
        """Blocks of the longest span that one step can see, wherever it starts in a block."""
        if window is None:
            return 10**9
        span = window - 1 + self.longest_chunk
        return max((start + span - 1) // self.size + 1 for start in range(self.size))

    def _cached(self, hit: list[int]) -> int:
        """Tokens of a hit."""
        return len(hit) // len(self.windows) * self.size

    def _at_once(self, job: Job, hit: list[int], taken: list[int]) -> int:
        """Free blocks that the job takes at most at once; `taken`: those of the hit that nobody else holds."""
        groups = len(self.windows)
        rest = -(-len(job.tokens) // self.size) - len(hit) // groups
        return sum(
            min(rest + len(set(hit[group::groups]) & set(taken)), self._most(window))
            for group, window in enumerate(self.windows)
        )

    def _start(self, job: Job, hit: list[int], count: int) -> bool:
        groups, cached = len(self.windows), len(hit) // len(self.windows)
        taken = [block for block in hit if block >= 0 and self.refs[block] == 0]
        now = (-(-(cached * self.size + count) // self.size) - cached) * groups + len(taken)
        if max(now, self._at_once(job, hit, taken)) > len(self.free):
            return False
        for block in taken:
            self.free.remove(block)
        for block in hit:
            if block >= 0:
                self.refs[block] += 1
        job.table, job.published, job.computed = list(hit), cached, cached * self.size
        self.waiting.remove(job)
        job.first_step = self.step
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

    def _stop(self, job: Job) -> None:
        self.turn -= self.running.index(job) < self.turn
        self.running.remove(job)
        self._drop([block for block in job.table if block >= 0])
        job.table, job.published = [], 0
