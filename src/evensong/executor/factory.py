"""Which executor runs the workers."""

from __future__ import annotations

import importlib
from typing import Any

from evensong.config.sections import EngineConfig
from evensong.distributed.grid import RankGrid
from evensong.distributed.split import plan_shares
from evensong.executor.base import Executor
from evensong.executor.uniproc import UniProcExecutor
from evensong.sources.model_config import load_model_description
from evensong.sources.resolve import resolve_model


def make_executor(config: EngineConfig, replica: int = 0) -> Executor:
    """The executor that the settings name; `auto`: processes of their own for several ranks only.

    Its workers have loaded their weights. Raises what they raise, and ConfigError for numbers of ranks that the model
    cannot be shared by, before any worker starts.
    """
    backend, several = config.parallel.distributed_executor_backend, config.parallel.num_ranks > 1
    if several or config.parallel.pipeline_layers is not None:
        _check_shares(config)
    if backend == "mp" or (backend == "auto" and several):
        # By name: one worker inside the core starts 15 ms sooner without what starts and hears other processes.
        module: Any = importlib.import_module("evensong.executor.multiproc")
        executor: Executor = module.MultiprocExecutor(config, replica=replica)
        return executor
    return UniProcExecutor(config)


def _check_shares(config: EngineConfig) -> None:
    model, parallel = config.model, config.parallel
    source = resolve_model(model.model, revision=model.revision, progress=False, fetched=True)
    grid = RankGrid(parallel.tensor_parallel_size, parallel.pipeline_parallel_size)
    plan_shares(load_model_description(source), grid, parallel.pipeline_layers)
