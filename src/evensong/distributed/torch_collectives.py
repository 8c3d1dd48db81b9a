"""What torch devices of several ranks exchange: sums in rank order, columns of logits, and the residual stream.

An all-reduce of a library sums in an order that depends on a value's place in the buffer. Here every rank gets all
parts and adds them up in rank order, in float32, so that the bits are the same on each.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from evensong.distributed.grid import Rank


class Peers(Protocol):
    """The ranks that share a step with this one."""

    def all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        """Float32 sum of the parts [rows, width] of all ranks of the stage, the same on each."""

    def join_columns(self, part: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """The parts' columns side by side: [rows, widths[i]] of part i to [rows, sum(widths)]."""

    def send(self, x: torch.Tensor) -> None:
        """Float32 [rows, width] to the same part of the next stage."""

    def receive(self, rows: int, width: int) -> torch.Tensor:
        """What the same part of the stage before sent."""


class TorchPeers:
    """Peers over torch.distributed: gloo between processes on CPUs, nccl between CUDA devices.

    `store`: where the ranks of the replica find each other; every rank constructs its own at the same time.
    """

    def __init__(self, store: Any, rank: Rank, device: torch.device, timeout: float) -> None:
        self._device = device
        self._rank = rank
        parts, stages = rank.grid.tensor_parallel_size, rank.grid.pipeline_parallel_size
        self._parts = self._group(store, f"stage {rank.stage}", rank.part, parts, timeout)
        self._stages = self._group(store, f"part {rank.part}", rank.stage, stages, timeout)

    def _group(self, store: Any, name: str, member: int, size: int, timeout: float) -> Any:
        if size == 1:
            return None
        within, limit = c10d.PrefixStore(name, store), datetime.timedelta(seconds=timeout)
        if self._device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = limit
            return dist.ProcessGroupNCCL(within, member, size, options)
        return dist.ProcessGroupGloo(within, member, size, limit)

    def all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        parts = self._gather(part.float().contiguous())
        total = parts[0]
        for other in parts[1:]:
            total += other
        return total

    def join_columns(self, part: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        # Members of a collective give as many values each.
        widest = max(widths)
        padded = torch.nn.functional.pad(part, (0, widest - part.shape[1])).contiguous()
        return torch.cat([one[:, :width] for one, width in zip(self._gather(padded), widths, strict=True)], dim=1)

    def send(self, x: torch.Tensor) -> None:
        assert self._stages is not None
        self._stages.send([x.contiguous()], self._rank.stage + 1, 0).wait()

    def receive(self, rows: int, width: int) -> torch.Tensor:
        assert self._stages is not None
        x = torch.empty(rows, width, dtype=torch.float32, device=self._device)
        self._stages.recv([x], self._rank.stage - 1, 0).wait()
        return x

    def _gather(self, part: torch.Tensor) -> list[torch.Tensor]:
        assert self._parts is not None
        parts = [torch.empty_like(part) for _ in range(self._rank.grid.tensor_parallel_size)]
        self._parts.allgather([parts], [part]).wait()
        return parts
