"""What a native program exchanges with other ranks through, laid out in the memory that the replica shares."""

from __future__ import annotations

import mmap

import numpy as np

from evensong.distributed.grid import Rank
from evensong.distributed.links import Links, LinkSizes, LinksLayout
from evensong.kernels.cpu.native import extension
from evensong.kernels.cpu.recorder import NativeLinks
from evensong.protocol.kv_spec import KVCacheConfig
from evensong.sources.model_description import ModelDescription
from evensong.worker.device import BANKS, most_samples

# Steps that may be on their way from one stage to the next.
_PLACES = 2
# `published`, padded to a cache line; then a token for each feed slot.
_FEED_HEAD, _FEED_TOKEN = 64, 8


def native_links(fd: int | None, rank: Rank, kv_cache: KVCacheConfig, model: ModelDescription) -> NativeLinks:
    """The links of `rank`, in the memory of `fd`; of a rank that is alone, its own feed table and nothing else.

    Made once in a rank's life: counters in the memory say how far each exchange is.
    """
    feed = _FEED_HEAD + _FEED_TOKEN * kv_cache.max_num_seqs
    grid = rank.grid
    if grid.num_ranks == 1:
        return NativeLinks(feed=np.frombuffer(mmap.mmap(-1, feed), np.uint8))
    assert fd is not None, "several ranks share memory"
    native, parts, width = extension(), grid.tensor_parallel_size, model.hidden_size
    rows, samples = kv_cache.max_num_batched_tokens, most_samples(kv_cache)
    layout = LinksLayout(
        grid,
        LinkSizes(
            feed,
            native.Group.bytes(parts, rows, width),
            native.LogitsGroup.bytes(parts, BANKS, samples, model.vocab_size),
            native.Channel.bytes(_PLACES, rows, width),
        ),
    )
    links = Links(fd, layout)
    group = logits = incoming = outgoing = None
    if parts > 1:
        group = native.Group(links.view(layout.groups[rank.stage]), rank.part, parts, rows, width)
        if rank.is_last_stage:
            logits = native.LogitsGroup(links.view(layout.logits), rank.part, parts, BANKS, samples, model.vocab_size)
    if not rank.is_first_stage:
        incoming = native.Channel(links.view(layout.channels[rank.stage - 1][rank.part]), _PLACES, rows, width)
    if not rank.is_last_stage:
        outgoing = native.Channel(links.view(layout.channels[rank.stage][rank.part]), _PLACES, rows, width)
    return NativeLinks(links.view(layout.feed), group, logits, incoming, outgoing)
