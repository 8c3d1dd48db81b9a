"""Which executor runs the workers."""

from __future__ import annotations

from evensong.config.sections import EngineConfig
from evensong.executor.base import Executor
from evensong.executor.multiproc import MultiprocExecutor
from evensong.executor.uniproc import UniProcExecutor


def make_executor(config: EngineConfig, replica: int = 0) -> Executor:
    """The executor that the settings name; `auto`: processes of their own for several ranks only.

    Its workers have loaded their weights. Raises what they raise.
    """
    backend, several = config.parallel.distributed_executor_backend, config.parallel.num_ranks > 1
    if backend == "mp" or (backend == "auto" and several):
        return MultiprocExecutor(config, replica=replica)
    return UniProcExecutor(config)
