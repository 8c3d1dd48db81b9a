"""Who holds what: heads in whole KV groups, panels, layers weighed with the head; and what cannot be served."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from evensong.distributed.grid import RankGrid
from evensong.distributed.split import (
    PANEL,
    HeadShare,
    Span,
    plan_shares,
    servable_sizes,
    split_evenly,
    split_heads,
    split_layers,
    whole_share,
)
from evensong.protocol.errors import ConfigError
from evensong.sources.model_description import ModelDescription, Rope

SMOLLM = ModelDescription(
    family="llama",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    rotary_dim=64,
    rms_norm_eps=1e-5,
    layer_ropes=(Rope(10000.0),) * 30,
    layer_windows=(None,) * 30,
    max_position_embeddings=2048,
    tie_word_embeddings=True,
    torch_dtype="bfloat16",
    eos_token_ids=(2,),
)


def sizes(shares: tuple[HeadShare, ...]) -> list[tuple[int, int]]:
    return [(share.num_heads, share.num_kv_heads) for share in shares]


def test_whole_groups_larger_shares_first() -> None:
    assert sizes(split_heads(9, 3, 2)) == [(6, 2), (3, 1)]
    assert split_heads(9, 3, 2)[1] == HeadShare(6, 9, 2, 3)
    assert sizes(split_heads(9, 3, 3)) == [(3, 1)] * 3
    assert sizes(split_heads(14, 2, 2)) == [(7, 1)] * 2
    assert split_heads(9, 3, 1) == (HeadShare(0, 9, 0, 3),)


def test_more_parts_than_groups_keep_the_same_kv_head() -> None:
    assert split_heads(9, 3, 4) == (
        HeadShare(0, 2, 0, 1),
        HeadShare(2, 3, 0, 1),
        HeadShare(3, 6, 1, 2),
        HeadShare(6, 9, 2, 3),
    )
    assert sizes(split_heads(14, 2, 3)) == [(4, 1), (3, 1), (7, 1)]
    assert split_heads(9, 3, 9) == tuple(HeadShare(i, i + 1, i // 3, i // 3 + 1) for i in range(9))


@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (14, 2), (8, 8), (6, 1), (32, 8), (1, 1)])
def test_every_head_is_somewhere_once_beside_its_kv_head(heads: int, kv_heads: int) -> None:
    group = heads // kv_heads
    for parts in range(1, heads + 1):
        shares = split_heads(heads, kv_heads, parts)
        assert len(shares) == parts
        assert [head for share in shares for head in range(share.first, share.stop)] == list(range(heads))
        for share in shares:
            assert share.num_heads > 0 and share.num_heads % share.num_kv_heads == 0
            per_kv = share.num_heads // share.num_kv_heads
            for index, head in enumerate(range(share.first, share.stop)):
                assert head // group == share.kv_first + index // per_kv


@pytest.mark.parametrize(
    ("total", "multiple"), [(1536, 32), (80, 32), (300, 32), (7, 32), (49152, 32), (33, 32), (9, 1)]
)
def test_even_parts_meet_and_none_is_empty(total: int, multiple: int) -> None:
    for parts in range(1, min(total, 12) + 1):
        ranges = split_evenly(total, parts, multiple)
        assert ranges[0][0] == 0 and ranges[-1][1] == total
        assert all(first < end for first, end in ranges)
        assert all(one[1] == other[0] for one, other in itertools.pairwise(ranges))
        if parts <= total // multiple:
            assert all(first % multiple == 0 for first, _ in ranges)
            assert max(e - f for f, e in ranges) - min(e - f for f, e in ranges) < 2 * multiple


def slowest(costs: list[float], head: float, ranges: tuple[tuple[int, int], ...]) -> float:
    sums = [sum(costs[first:end]) for first, end in ranges]
    sums[-1] += head
    return max(sums)


@pytest.mark.parametrize("head", [0.0, 3.0, 50.0])
@pytest.mark.parametrize("costs", [[1.0] * 7, [3.0, 1.0, 1.0, 5.0, 1.0, 2.0], [1.0, 1.0, 9.0]])
def test_no_other_ranges_have_a_faster_slowest_stage(costs: list[float], head: float) -> None:
    count = len(costs)
    for stages in range(1, count + 1):
        found = split_layers(costs, head, stages)
        assert found[0][0] == 0 and found[-1][1] == count and len(found) == stages
        assert all(first < end for first, end in found)
        assert all(one[1] == other[0] for one, other in itertools.pairwise(found))
        others = [
            tuple(zip((0, *cuts), (*cuts, count), strict=True))
            for cuts in itertools.combinations(range(1, count), stages - 1)
        ]
        assert slowest(costs, head, found) == min(slowest(costs, head, other) for other in others)


def test_the_output_head_weighs_on_the_last_stage() -> None:
    layers = [share.layers for share in plan_shares(SMOLLM, RankGrid(1, 2))]
    assert layers == [range(17), range(17, 30)]
    assert [len(share.layers) for share in plan_shares(SMOLLM, RankGrid(1, 3))] == [12, 11, 7]


def test_what_ranks_hold() -> None:
    shares = plan_shares(SMOLLM, RankGrid(2, 2), "20,10")
    assert [share.part for share in shares] == [0, 1, 0, 1]
    assert [(share.layers, share.embeds, share.has_head) for share in shares] == [
        (range(20), True, False),
        (range(20), True, False),
        (range(20, 30), False, True),
        (range(20, 30), False, True),
    ]
    second = shares[1]
    assert second.queries == Span(576, ((384, 576),)) and second.keys == Span(192, ((128, 192),))
    assert second.intermediate == Span(1536, ((768, 1536),)) and second.vocabulary == Span(49152, ((24576, 49152),))
    assert (
        shares[3].of_all_stages()
        == replace(second, layers=range(30), rank=RankGrid(2, 1).rank(1))
        == second.of_all_stages()
    )
    whole = whole_share(SMOLLM)
    assert whole == plan_shares(SMOLLM, RankGrid())[0] == whole.of_all_stages()
    assert whole.queries.is_whole and whole.vocabulary.is_whole and whole.embeds and whole.has_head


def test_panels_of_the_vocabulary() -> None:
    model = replace(SMOLLM, vocab_size=300)
    for parts in range(1, 10):
        spans = [share.vocabulary for share in plan_shares(model, RankGrid(parts))]
        assert all(span.first % PANEL == 0 for span in spans)
        assert sum(span.size for span in spans) == 300
    assert servable_sizes(replace(SMOLLM, vocab_size=100)) == (4, 30)


@pytest.mark.parametrize(
    ("grid", "layers", "message"),
    [
        (RankGrid(10, 1), None, r"--tensor-parallel-size 10 .* 9 heads.* 1 to 9 can"),
        (RankGrid(0, 1), None, "--tensor-parallel-size 0"),
        (RankGrid(1, 31), None, "--pipeline-parallel-size 31 .* 1 to 30 can"),
        (RankGrid(1, 0), None, "--pipeline-parallel-size 0"),
        (RankGrid(1, 2), "18,11", "29 layers; the model has 30"),
        (RankGrid(1, 2), "30,0", "at least one"),
        (RankGrid(1, 2), "10,10,10", "names 3 stages, --pipeline-parallel-size is 2"),
        (RankGrid(1, 2), "18;12", "such as 18,12"),
        (RankGrid(1, 2), "-1,31", "such as 18,12"),
        (RankGrid(1, 2), "", "such as 18,12"),
    ],
)
def test_what_cannot_be_served(grid: RankGrid, layers: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_shares(SMOLLM, grid, layers)


def test_spans_of_fused_tensors() -> None:
    joined = Span.joined(Span(6, ((2, 4),)), Span(2, ((0, 1),)), Span(2, ((0, 1),)))
    assert joined == Span(10, ((2, 4), (6, 7), (8, 9))) and joined.size == 4 and not joined.is_whole
    assert Span.joined(Span.whole(3), Span.whole(2)).is_whole
