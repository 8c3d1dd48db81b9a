"""The shared memory of a replica: regions that do not touch, and the same bytes for all who open it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from evensong.distributed.grid import RankGrid
from evensong.distributed.links import Links, LinkSizes, LinksLayout, Region

SIZES = LinkSizes(feed=100, group=5000, logits=4096, channel=4097)


@pytest.fixture
def fd() -> Iterator[int]:
    handle = os.memfd_create("links")
    yield handle
    os.close(handle)


def regions(layout: LinksLayout) -> list[Region]:
    channels = [region for stage in layout.channels for region in stage]
    return [layout.meeting, layout.feed, *layout.groups, layout.logits, *channels]


@pytest.mark.parametrize("grid", [RankGrid(1, 1), RankGrid(3, 1), RankGrid(1, 3), RankGrid(2, 3)])
def test_regions_begin_at_pages_and_do_not_touch(grid: RankGrid) -> None:
    layout = LinksLayout(grid, SIZES)
    found = regions(layout)
    assert all(region.offset % 4096 == 0 for region in found)
    used = [region for region in found if region.size]
    for one, other in zip(used, used[1:], strict=False):
        assert one.offset + one.size <= other.offset
    assert used[-1].offset + used[-1].size <= layout.total < used[-1].offset + used[-1].size + 4096
    parts, stages = grid.tensor_parallel_size, grid.pipeline_parallel_size
    assert [region.size for region in layout.groups] == [5000 if parts > 1 else 0] * stages
    assert layout.logits.size == (4096 if parts > 1 else 0)
    assert [len(stage) for stage in layout.channels] == [parts] * (stages - 1)


def test_all_ranks_see_the_same_bytes(fd: int) -> None:
    layout = LinksLayout(RankGrid(2, 2), SIZES)
    one, other = Links(fd, layout), Links(fd, layout)
    assert os.fstat(fd).st_size == layout.total
    for number, region in enumerate(regions(layout), start=1):
        assert not other.view(region).any()
        one.view(region)[:] = number
        assert (other.view(region) == number).all()
    assert (one.view(layout.feed) == 2).all()


def test_a_view_outlives_the_links_and_the_descriptor() -> None:
    fd = os.memfd_create("links")
    layout = LinksLayout(RankGrid(), SIZES)
    view = Links(fd, layout).view(layout.feed)
    other = Links(fd, layout).view(layout.feed)
    os.close(fd)
    view[:] = 7
    assert (other == 7).all() and len(view) == 100
