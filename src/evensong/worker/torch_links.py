"""What a torch device meets other ranks through: collectives over torch.distributed, and the table of tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from evensong.distributed.grid import Rank
from evensong.distributed.links import Links, LinkSizes, LinksLayout
from evensong.distributed.meeting import Meeting
from evensong.distributed.token_table import TokenTable, token_table_bytes
from evensong.distributed.torch_collectives import TorchPeers
from evensong.protocol.kv_spec import KVCacheConfig

# Seconds that a rank waits for others, in a step or before the first one. Whoever watches the ranks ends them earlier.
TIMEOUT = 600.0


@dataclass(frozen=True)
class TorchLinks:
    """`peers`: the other ranks of the replica; `tokens`: what the output rank has sampled."""

    peers: TorchPeers
    tokens: TokenTable


def torch_links(fd: int | None, rank: Rank, kv_cache: KVCacheConfig, device: torch.device) -> TorchLinks | None:
    """The links of `rank`, all of whose replica call this at the same time; None for a rank that is alone."""
    if rank.grid.num_ranks == 1:
        return None
    assert fd is not None, "several ranks share memory"
    layout = LinksLayout(rank.grid, LinkSizes(token_table_bytes(kv_cache.max_num_seqs)))
    links = Links(fd, layout)
    meeting = Meeting(links.view(layout.meeting), rank, TIMEOUT)
    return TorchLinks(TorchPeers(meeting, rank, device, TIMEOUT), TokenTable(links.view(layout.feed)))
