"""What the workers' own code says of a request before it is admitted."""

from __future__ import annotations

from evensong.executor.base import Executor
from evensong.protocol.errors import RequestError
from evensong.protocol.kv_spec import Resources
from evensong.protocol.sampling_params import SamplingParams


class RequestChecks:
    """Asks the logits processors, where there are any; else nobody could mean a request's `extra_args`."""

    def __init__(self, executor: Executor, resources: Resources) -> None:
        self._executor = executor
        self._any = "logits_processors" in resources.fingerprint_parts

    def check(self, params: SamplingParams) -> None:
        """Raises RequestError for what one refuses, and whatever else one raises."""
        if self._any:
            self._executor.collective_rpc("check_request", args=(params,))
        elif params.extra_args:
            raise RequestError(
                "extra_args (vllm_xargs over HTTP) are for logits processors, and none is loaded", param="extra_args"
            )
