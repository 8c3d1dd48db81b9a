"""What torch devices of several ranks exchange: sums in rank order, columns of logits, and the residual stream.

An all-reduce of a library sums in an order that depends on a value's place in the buffer. Here every rank gets all
parts and adds them up in rank order, in float32, so that the bits are the same on each.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed

from evensong.distributed.grid import Rank
from evensong.distributed.meeting import Meeting

# Builds of torch without it compute alone: nothing is asked of the module before there are ranks. Its types are not
# exported.
_dist: Any = torch.distributed


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

    The ranks of the replica find each other in the file of `meeting`; all construct theirs at the same time.
    """

    def __init__(self, meeting: Meeting, rank: Rank, device: torch.device, timeout: float) -> None:
        self._device = device
        # The store's file is there for as long as the groups.
        self._meeting = meeting
        self._rank = rank
        self._store = store = _dist.FileStore(meeting.path, rank.grid.num_ranks)
        parts, stages = rank.grid.tensor_parallel_size, rank.grid.pipeline_parallel_size
        self._parts = self._group(store, f"stage {rank.stage}", rank.part, parts, timeout)
        self._stages = self._group(store, f"part {rank.part}", rank.stage, stages, timeout)

    def tell_all(self, name: str, what: str) -> list[str]:
        """What every rank of the replica tells under this name, in rank order; all ask at the same time."""
        self._store.set(f"{name} {self._rank.index}", what)
        return [self._store.get(f"{name} {index}").decode() for index in range(self._rank.grid.num_ranks)]

    def _group(self, store: Any, name: str, member: int, size: int, timeout: float) -> Any:
        if size == 1:
            return None
        within, limit = _dist.PrefixStore(name, store), datetime.timedelta(seconds=timeout)
        if self._device.type == "cuda":
            options = _dist.ProcessGroupNCCL.Options()
            options._timeout = limit
            return _dist.ProcessGroupNCCL(within, member, size, options)
        # Nobody listens but on this machine.
        gloo = _dist.ProcessGroupGloo._Options()
        gloo._devices = [_dist.ProcessGroupGloo.create_device(hostname="127.0.0.1", lazy_init=False)]
        gloo._timeout = limit
        return _dist.ProcessGroupGloo(within, member, size, gloo)

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
