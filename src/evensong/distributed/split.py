"""What each rank holds of a model: whole KV groups, runs of the MLP, panels of the vocabulary, a range of layers.

Parts of a stage share every layer as Megatron-LM cuts it (Shoeybi et al., 2019): the products that widen are cut by
outputs, those that come back to the residual stream by inputs. Sizes need not divide evenly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from evensong.distributed.grid import ALONE, Rank, RankGrid
from evensong.protocol.errors import ConfigError
from evensong.sources.model_description import ModelDescription

# Rows of the vocabulary and inner sizes of MLPs are cut at multiples of this: whole panels of every instruction set.
PANEL = 32
# The context that layers are weighed with: each earlier token costs a multiplication with its keys and its values.
# Short answers and long ones lie on both sides of it; with it attention is a sixth of a layer of SmolLM2.
WEIGHED_CONTEXT = 512
# What a value between two products costs (norms, rotation, activation, sums), in multiplications of a product: fitted
# to steps of 32 rows of SmolLM2, where a layer takes 0.69 ms and the output head 3.0. Wider models feel it less.
BETWEEN_PRODUCTS = 300
# Ranks that the native kernels let meet (native/src/links.h).
_MOST_PARTS = 64


@dataclass(frozen=True)
class Span:
    """Which of `total` indices are meant: `ranges`, first and end of each, in order."""

    total: int
    ranges: tuple[tuple[int, int], ...]

    @staticmethod
    def whole(total: int) -> Span:
        """All of them."""
        return Span(total, ((0, total),))

    @staticmethod
    def joined(*spans: Span) -> Span:
        """Of what lies one behind the other in one tensor."""
        ranges: list[tuple[int, int]] = []
        offset = 0
        for span in spans:
            ranges += [(offset + first, offset + end) for first, end in span.ranges]
            offset += span.total
        return Span(offset, tuple(ranges))

    @property
    def size(self) -> int:
        """How many are meant."""
        return sum(end - first for first, end in self.ranges)

    @property
    def first(self) -> int:
        """The lowest."""
        return self.ranges[0][0]

    @property
    def is_whole(self) -> bool:
        """Whether nothing is left out."""
        return self.size == self.total


@dataclass(frozen=True)
class HeadShare:
    """Query heads `first`..`stop` - 1 and the KV heads that they read; each KV head has as many of the queries."""

    first: int
    stop: int
    kv_first: int
    kv_stop: int

    @property
    def num_heads(self) -> int:
        """Query heads."""
        return self.stop - self.first

    @property
    def num_kv_heads(self) -> int:
        """KV heads."""
        return self.kv_stop - self.kv_first


@dataclass(frozen=True)
class Share:
    """What one rank holds: `queries` and `keys` are spans of heads' components, `layers` those of its stage.

    `vocabulary` are its rows of embedding and output head; `vocabulary_sizes`, how many each part has.
    """

    rank: Rank
    heads: HeadShare
    queries: Span
    keys: Span
    intermediate: Span
    vocabulary: Span
    vocabulary_sizes: tuple[int, ...]
    layers: range
    num_layers: int

    @property
    def part(self) -> int:
        """Which part of its stage it is."""
        return self.rank.part

    @property
    def num_parts(self) -> int:
        """Ranks that share its layers."""
        return self.rank.grid.tensor_parallel_size

    @property
    def embeds(self) -> bool:
        """Whether it embeds tokens."""
        return self.rank.is_first_stage

    @property
    def has_head(self) -> bool:
        """Whether it has the last norm and the output head."""
        return self.rank.is_last_stage

    def of_all_stages(self) -> Share:
        """The same part with all layers: what its stages read from one file."""
        return replace(self, rank=RankGrid(self.num_parts).rank(self.part), layers=range(self.num_layers))


def whole_share(model: ModelDescription) -> Share:
    """All of the model."""
    return _share(model, ALONE, (0, model.num_layers))


def plan_shares(model: ModelDescription, grid: RankGrid, pipeline_layers: str | None = None) -> tuple[Share, ...]:
    """What each rank of the grid holds, in rank order.

    `pipeline_layers`: layers of each stage, such as "18,12". Raises ConfigError for sizes that cannot be served, which
    says which can.
    """
    check_sizes(model, grid)
    ranges = stage_layers(model, grid.pipeline_parallel_size, pipeline_layers)
    ranks = [grid.rank(index) for index in range(grid.num_ranks)]
    return tuple(_share(model, rank, ranges[rank.stage]) for rank in ranks)


def check_sizes(model: ModelDescription, grid: RankGrid) -> None:
    """Raises ConfigError for more parts or stages than the model has to give."""
    parts, stages = servable_sizes(model)
    if not 1 <= grid.tensor_parallel_size <= parts:
        raise ConfigError(
            f"--tensor-parallel-size {grid.tensor_parallel_size} cannot be served: the model has {model.num_heads} "
            f"heads, an MLP of {model.intermediate_size} and {model.vocab_size:,} token ids, so 1 to {parts} can"
        )
    if not 1 <= grid.pipeline_parallel_size <= stages:
        raise ConfigError(
            f"--pipeline-parallel-size {grid.pipeline_parallel_size} cannot be served: the model has {stages} layers, "
            f"so 1 to {stages} can"
        )


def servable_sizes(model: ModelDescription) -> tuple[int, int]:
    """The most parts that can share a layer, and the most stages; any fewer can be served too."""
    panels = -(-model.vocab_size // PANEL)
    return min(model.num_heads, model.intermediate_size, panels, _MOST_PARTS), model.num_layers


def stage_layers(model: ModelDescription, stages: int, asked: str | None) -> tuple[tuple[int, int], ...]:
    """First layer and end of each stage: as `asked`, else so that the slowest stage is as fast as can be."""
    if asked is not None:
        return _asked_layers(model, stages, asked)
    costs, head = layer_costs(model)
    return split_layers(costs, head, stages)


def layer_costs(model: ModelDescription) -> tuple[list[int], int]:
    """What a token costs in each layer, over a context of WEIGHED_CONTEXT, and in the output head: multiplications."""
    query = model.num_heads * model.head_dim
    keys = model.num_kv_heads * model.head_dim
    products = model.hidden_size * (2 * query + 2 * keys + 3 * model.intermediate_size)
    between = 4 * model.hidden_size + query + 2 * keys + 2 * model.intermediate_size
    own = products + BETWEEN_PRODUCTS * between
    seen = [min(window or WEIGHED_CONTEXT, WEIGHED_CONTEXT) for window in model.layer_windows]
    return [own + 2 * query * context for context in seen], model.hidden_size * model.vocab_size


def split_heads(num_heads: int, num_kv_heads: int, parts: int) -> tuple[HeadShare, ...]:
    """Heads of each part, larger shares first: whole KV groups while there are enough.

    With more parts than groups, several parts keep the same KV head and divide its queries. At most `num_heads` parts.
    """
    assert num_heads % num_kv_heads == 0 and 1 <= parts <= num_heads
    group = num_heads // num_kv_heads
    if parts <= num_kv_heads:
        return tuple(
            HeadShare(first * group, stop * group, first, stop) for first, stop in split_evenly(num_kv_heads, parts)
        )
    shares = []
    for kv_head, (begin, end) in enumerate(split_evenly(parts, num_kv_heads)):
        for first, stop in split_evenly(group, end - begin):
            shares.append(HeadShare(kv_head * group + first, kv_head * group + stop, kv_head, kv_head + 1))
    return tuple(shares)


def split_evenly(total: int, parts: int, multiple: int = 1) -> tuple[tuple[int, int], ...]:
    """First and end of each part, cut at multiples of `multiple`, or of half of it until each part has some.

    Larger parts come first, and the last takes what is left. `total` is at least `parts`.
    """
    assert 1 <= parts <= total
    while -(-total // multiple) < parts:
        multiple = max(multiple // 2, 1)
    units = -(-total // multiple)
    each, more = divmod(units, parts)
    bounds = [min((part * each + min(part, more)) * multiple, total) for part in range(parts + 1)]
    return tuple(zip(bounds[:-1], bounds[1:], strict=True))


def split_layers(costs: Sequence[float], head: float, stages: int) -> tuple[tuple[int, int], ...]:
    """First layer and end of each stage: the slowest costs as little as can be, and no stage is empty.

    `head`: the cost of what the last stage does besides. Of equal ways, that with the longest first stages.
    """
    assert 1 <= stages <= len(costs)
    count = len(costs)
    # best[i]: the least that the slowest of the remaining stages costs, where they begin at layer i, and their ends.
    best: list[tuple[float, tuple[int, ...]] | None] = [
        (sum(costs[i:]) + head, (count,)) if i < count else None for i in range(count + 1)
    ]
    for _ in range(stages - 1):
        best = [_best_cut(costs, first, best) for first in range(count + 1)]
    found = best[0]
    assert found is not None
    ends = found[1]
    return tuple(zip((0, *ends[:-1]), ends, strict=True))


def _best_cut(
    costs: Sequence[float], first: int, rest: Sequence[tuple[float, tuple[int, ...]] | None]
) -> tuple[float, tuple[int, ...]] | None:
    """The best way to begin a stage at layer `first`, where `rest` says what follows from each layer on."""
    found: tuple[float, tuple[int, ...]] | None = None
    own = 0.0
    for end in range(first + 1, len(costs)):
        own += costs[end - 1]
        after = rest[end]
        if after is not None and (found is None or max(own, after[0]) <= found[0]):
            found = max(own, after[0]), (end, *after[1])
    return found


def _asked_layers(model: ModelDescription, stages: int, asked: str) -> tuple[tuple[int, int], ...]:
    words = asked.split(",")
    if not all(word.strip().isdecimal() and len(word) < 10 for word in words):
        raise ConfigError(f"--pipeline-layers {asked!r:.80}: layers of each stage are wanted, such as 18,12")
    counts = [int(word) for word in words]
    if len(counts) != stages:
        raise ConfigError(
            f"--pipeline-layers {asked:.80} names {len(counts)} stages, --pipeline-parallel-size is {stages}"
        )
    if min(counts) < 1 or sum(counts) != model.num_layers:
        raise ConfigError(
            f"--pipeline-layers {asked:.80} has {sum(counts)} layers; the model has {model.num_layers}, and each stage "
            "needs at least one"
        )
    ends = [sum(counts[: stage + 1]) for stage in range(stages)]
    return tuple(zip([0, *ends[:-1]], ends, strict=True))


def _share(model: ModelDescription, rank: Rank, layers: tuple[int, int]) -> Share:
    parts, part = rank.grid.tensor_parallel_size, rank.part
    heads = split_heads(model.num_heads, model.num_kv_heads, parts)[part]
    size = model.head_dim
    rows = split_evenly(model.vocab_size, parts, PANEL)
    return Share(
        rank=rank,
        heads=heads,
        queries=Span(model.num_heads * size, ((heads.first * size, heads.stop * size),)),
        keys=Span(model.num_kv_heads * size, ((heads.kv_first * size, heads.kv_stop * size),)),
        intermediate=Span(model.intermediate_size, (split_evenly(model.intermediate_size, parts, PANEL)[part],)),
        vocabulary=Span(model.vocab_size, (rows[part],)),
        vocabulary_sizes=tuple(end - first for first, end in rows),
        layers=range(*layers),
        num_layers=model.num_layers,
    )
