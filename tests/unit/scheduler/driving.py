"""A scheduler with a scripted executor, for tests that look at single steps."""

from __future__ import annotations

from typing import Any

from evensong.kvcache.manager import KVCacheManager
from evensong.protocol.kv_spec import KVCacheConfig, LayerGroup
from evensong.protocol.output import EngineCoreOutput
from evensong.protocol.request import EngineCoreRequest
from evensong.protocol.sampling_params import SamplingParams
from evensong.protocol.step import SchedulerOutput
from evensong.scheduler.budget import SchedulerLimits
from evensong.scheduler.policy import Policy
from evensong.scheduler.scheduler import Scheduler
from evensong.testing.fake_executor import FakeExecutor, NextToken, scripted_token


def ask(request_id: str, prompt: list[int], max_tokens: int | None = 4, **fields: Any) -> EngineCoreRequest:
    """A request; fields that the request itself lacks are sampling parameters."""
    own = {name: fields.pop(name) for name in list(fields) if name in EngineCoreRequest.__struct_fields__}
    return EngineCoreRequest(request_id, prompt, SamplingParams(seed=1, max_tokens=max_tokens, **fields), **own)


def alone(prompt: list[int], count: int) -> list[int]:
    """The first `count` tokens that the scripted model gives after a prompt."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(scripted_token(tokens))
    return tokens[len(prompt) :]


class Driven:
    """Runs whole steps; keeps every output."""

    def __init__(
        self,
        num_blocks: int = 64,
        next_token: NextToken = scripted_token,
        windows: tuple[int | None, ...] = (None,),
        *,
        policy: Policy | None = None,
        **limits: Any,
    ) -> None:
        settings: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 128}
        self.limits = SchedulerLimits(**(settings | limits))
        most = self.limits.max_num_batched_tokens
        kv_cache = KVCacheManager(num_blocks, 4, fingerprint="f", windows=windows, max_step_tokens=most)
        self.scheduler = Scheduler(self.limits, kv_cache, policy=policy, check=True)
        self.executor = FakeExecutor(next_token=next_token)
        groups = tuple(LayerGroup(window) for window in windows)
        self.executor.initialize_from_config(KVCacheConfig(num_blocks, 4, groups), self.limits.max_model_len)
        self.outputs: list[EngineCoreOutput] = []

    def step(self) -> SchedulerOutput:
        """One step."""
        plan = self.scheduler.schedule()
        self.executor._execute(plan)
        for new in self.scheduler.update_from_output(plan, self.executor._sample()).values():
            self.outputs += new
        return plan

    def run(self, max_steps: int = 3000) -> int:
        """Steps until nothing is left; how many it took."""
        for count in range(max_steps):
            if not self.scheduler.has_requests():
                return count
            self.step()
        raise AssertionError("no end")

    def tokens(self, request_id: str) -> list[int]:
        """What a request got."""
        return [token for output in self.outputs if output.request_id == request_id for token in output.new_token_ids]

    def last(self, request_id: str) -> EngineCoreOutput:
        """A request's last output."""
        return [output for output in self.outputs if output.request_id == request_id][-1]
