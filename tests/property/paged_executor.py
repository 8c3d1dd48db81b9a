"""A FakeExecutor with memory: it knows which prefix each place of each block was written for, and checks every read."""

from __future__ import annotations

from evensong.protocol.step import SchedulerOutput
from evensong.testing.fake_executor import FakeExecutor


class PagedExecutor(FakeExecutor):
    """Fails when a plan reads a place that does not hold this request's own prefix, or writes one twice in a step."""

    def __init__(self, **settings: object) -> None:
        super().__init__(**settings)  # type: ignore[arg-type]
        self.places: dict[int, int] = {}

    def _copy_block(self, source: int, target: int) -> None:
        super()._copy_block(source, target)
        assert self.kv_cache is not None
        size = self.kv_cache.block_size
        for offset in range(size):
            self.places.pop(target * size + offset, None)
            if (state := self.places.get(source * size + offset)) is not None:
                self.places[target * size + offset] = state

    def _advance(self, plan: SchedulerOutput) -> None:
        assert self.kv_cache is not None
        size, num_groups = self.kv_cache.block_size, len(self.kv_cache.groups)
        written: dict[int, int] = {}
        for request_id, count in plan.num_scheduled_tokens.items():
            slot = self._slots[request_id]
            for group, spec in enumerate(self.kv_cache.groups):
                seen = 0 if spec.window is None else slot.num_computed - spec.window + 1
                state = group
                for position, token_id in enumerate(slot.token_ids[: slot.num_computed + count]):
                    state = hash((state, token_id, position))
                    place = slot.block_ids[position // size * num_groups + group] * size + position % size
                    if seen <= position < slot.num_computed:
                        assert self.places.get(place) == state, f"{request_id} reads another's KV at {position}"
                    elif position >= slot.num_computed:
                        assert place not in written, f"{request_id} writes where another writes"
                        written[place] = state
        self.places.update(written)
        super()._advance(plan)
