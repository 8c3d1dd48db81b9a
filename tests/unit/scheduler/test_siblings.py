"""Choices of one request: the prompt is computed once, the block in which it ends is copied, nobody's tokens change."""

from __future__ import annotations

from typing import Any

import pytest

from evensong.kvcache.manager import KVCacheManager
from evensong.protocol.kv_spec import KVCacheConfig, LayerGroup
from evensong.protocol.output import FinishReason
from evensong.scheduler.scheduler import Scheduler
from tests.unit.scheduler.driving import Driven, alone, ask

PROMPT = list(range(100, 130))  # 7 blocks of 4, and 2 tokens


class Choices(Driven):
    """A request of n choices; `caching` as the engine has it."""

    def __init__(
        self, n: int, prompt: list[int] = PROMPT, *, caching: bool = True, most: int = 6, **settings: Any
    ) -> None:
        fields = settings.pop("fields", {})
        super().__init__(**settings)
        windows = settings.get("windows", (None,))
        blocks = settings.get("num_blocks", 64)
        self.kv_cache = KVCacheManager(
            blocks,
            4,
            fingerprint="f",
            enable_prefix_caching=caching,
            windows=windows,
            max_step_tokens=self.limits.max_num_batched_tokens,
        )
        self.scheduler = Scheduler(self.limits, self.kv_cache, check=True)
        groups = tuple(LayerGroup(window) for window in windows)
        self.executor.initialize_from_config(KVCacheConfig(blocks, 4, groups), self.limits.max_model_len)
        self.prompt, self.most = prompt, most
        self.names = [f"{index}_r" for index in range(n)]
        for name in self.names:
            self.scheduler.add_request(ask(name, prompt, most, group="r", **fields))

    def check(self, *names: str) -> None:
        """Everybody has what it gets alone."""
        for name in names or self.names:
            assert self.tokens(name) == alone(self.prompt, self.most)
        assert self.scheduler.check_kv_cache()["owned"] == 0


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize(("length", "copies"), [(30, 1), (29, 0), (28, 1), (3, 1), (2, 1), (1, 0)])
def test_a_prompt_is_computed_once(caching: bool, length: int, copies: int) -> None:
    choices = Choices(4, PROMPT[:length], caching=caching)
    first = choices.step()
    assert first.num_scheduled_tokens == ({"0_r": length} if length > 1 else dict.fromkeys(choices.names, 1))
    if length > 1:
        second = choices.step()
        assert second.num_scheduled_tokens == dict.fromkeys(choices.names, 1)
        assert len(second.block_copies) == 3 * copies
        tables = [choices.kv_cache.tables[name] for name in choices.names]
        shared = (length - 1) // 4
        assert all(table[:shared] == tables[0][:shared] for table in tables)
        assert len({table[shared] for table in tables}) == 4
    choices.run()
    choices.check()
    # Once the prompt, for each sibling its last token, and of each output all but the last.
    assert choices.executor.num_computed_tokens == length + 3 + 4 * (choices.most - 1)


@pytest.mark.parametrize("caching", [True, False])
def test_chunks(caching: bool) -> None:
    choices = Choices(3, caching=caching, max_num_batched_tokens=8)
    while "1_r" not in choices.step().num_scheduled_tokens:
        assert choices.scheduler.requests["0_r"].num_computed_tokens <= len(PROMPT)
    choices.run()
    choices.check()
    assert choices.executor.num_computed_tokens == 30 + 2 + 3 * 5


@pytest.mark.parametrize("caching", [True, False])
def test_the_first_goes_before_the_others_begin(caching: bool) -> None:
    """In the middle of its prompt, and right behind it: the next one computes it, and lends in its turn."""
    for steps in (2, 4):
        choices = Choices(4, caching=caching, max_num_batched_tokens=8)
        for _ in range(steps):
            choices.step()
        choices.scheduler.finish_requests(["0_r"], FinishReason.ABORT)
        choices.run()
        choices.check(*choices.names[1:])


@pytest.mark.parametrize("caching", [True, False])
def test_a_pool_that_is_too_small_for_all(caching: bool) -> None:
    """They give way to each other; who comes back takes the whole prompt from who runs."""
    choices = Choices(6, caching=caching, num_blocks=14, most=12)
    choices.run()
    choices.check()
    stats = choices.scheduler.make_stats()
    assert stats.num_preemptions > 0


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("windows", [(5,), (None, 6), (9, None, 9), (1, None)], ids=str)
def test_windows(caching: bool, windows: tuple[int | None, ...]) -> None:
    choices = Choices(
        4, caching=caching, windows=windows, num_blocks=64 * len(windows), max_num_batched_tokens=16, most=20
    )
    choices.run()
    choices.check()
    assert choices.executor.num_computed_tokens < 2 * 30 + 4 * 20 or windows == (1, None)


def test_those_that_end_with_their_first_token_do_not_wait() -> None:
    choices = Choices(4, caching=False, most=1, max_num_batched_tokens=128)
    assert set(choices.step().num_scheduled_tokens) == set(choices.names)
    choices.check()


def test_one_that_may_not_read_the_cache_computes_its_prompt() -> None:
    choices = Choices(2, fields={"skip_reading_prefix_cache": True})
    choices.run()
    choices.check()
    assert choices.executor.num_computed_tokens == 2 * 30 + 2 * 5


def test_strangers_with_the_same_prompt_share_only_what_is_cached() -> None:
    choices = Choices(2, caching=False)
    choices.scheduler.add_request(ask("x", PROMPT, 6, group="other"))
    choices.scheduler.add_request(ask("y", PROMPT, 6))
    choices.run()
    choices.check(*choices.names, "x", "y")
    assert choices.executor.num_computed_tokens == 3 * 30 + 1 + 4 * 5
