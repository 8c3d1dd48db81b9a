"""RankGrid: how the ranks of one replica stand to each other. Stages follow one another; the parts of a stage share it.

Rank numbers run through the parts of the first stage, then through those of the second, as Megatron-LM and vLLM number
them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RankGrid:
    """`pipeline_parallel_size` stages, each a range of layers; `tensor_parallel_size` parts of every layer."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1

    @property
    def num_ranks(self) -> int:
        """Ranks of the replica."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def rank(self, index: int) -> Rank:
        """Where rank `index` stands."""
        stage, part = divmod(index, self.tensor_parallel_size)
        assert 0 <= stage < self.pipeline_parallel_size, "no such rank"
        return Rank(index, stage, part, self)

    @property
    def output_rank(self) -> int:
        """The rank that samples and answers: the first part of the last stage."""
        return (self.pipeline_parallel_size - 1) * self.tensor_parallel_size


@dataclass(frozen=True)
class Rank:
    """One rank: its number, its stage of the pipeline and its part of that stage's layers."""

    index: int
    stage: int
    part: int
    grid: RankGrid

    @property
    def is_first_stage(self) -> bool:
        """Whether it embeds tokens."""
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether it has the output head."""
        return self.stage == self.grid.pipeline_parallel_size - 1

    @property
    def is_output(self) -> bool:
        """Whether it samples, and its results go to the core."""
        return self.index == self.grid.output_rank


ALONE = RankGrid().rank(0)
