"""The roofline of a step: what the machine's GEMM peak and read bandwidth allow for it, in pure functions.

After Williams, Waterman and Patterson, "Roofline" (2009): a phase takes at least FLOP / peak and at least bytes /
bandwidth seconds, and the phases of a step run one after another. Counted are the weights, each read once a step, and
the keys and values, each read once by their request's queries. Activations, norms and the sampler are not counted, so
no engine reaches the figure where memory decides.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

BF16_BYTES = 2.0


@dataclass(frozen=True)
class Sizes:
    """A decoder-only model with gated MLPs; all of its layers attend to the whole context."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tied: bool
    # Of one element, as it lies in memory: 2 for bf16; quantised ones have their scales in it (8.5 / 8 for Q8_0).
    weight_bytes: float = BF16_BYTES
    kv_bytes: float = BF16_BYTES

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """(inputs, outputs) of each matrix of a layer."""
        query, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return {
            "qkv": (self.hidden_size, query + 2 * kv),
            "output": (query, self.hidden_size),
            "gate_up": (self.hidden_size, 2 * self.intermediate_size),
            "down": (self.intermediate_size, self.hidden_size),
        }

    @property
    def kv_bytes_per_token(self) -> float:
        """Keys and values of one token in all layers."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * self.kv_bytes

    @property
    def total_weight_bytes(self) -> float:
        """All matrices; a tied embedding and output head are one."""
        layer = sum(inputs * outputs for inputs, outputs in self.linears.values())
        vocabulary = self.vocab_size * self.hidden_size * (1 if self.tied else 2)
        return (self.num_layers * layer + vocabulary) * self.weight_bytes


@dataclass(frozen=True)
class Rows:
    """`count` neighbouring tokens of one request, the first at `position` (from 0). A decode row: Rows(context - 1)."""

    position: int
    count: int = 1

    @property
    def keys(self) -> int:
        """Keys that are in the cache when the step ends."""
        return self.position + self.count

    @property
    def pairs(self) -> int:
        """Query-key pairs: each token sees itself and all before it."""
        return self.count * self.position + self.count * (self.count + 1) // 2


@dataclass(frozen=True)
class Step:
    """One forward pass, and how many of its rows go through the output head."""

    rows: tuple[Rows, ...]
    num_sampled: int

    @property
    def num_tokens(self) -> int:
        """Rows of the matrix products."""
        return sum(rows.count for rows in self.rows)


@dataclass(frozen=True)
class Phase:
    """FLOP and bytes of one phase, which runs `times` times in a step (once a layer)."""

    name: str
    flop: float
    bytes: float
    times: int = 1

    def seconds(self, peak: float, bandwidth: float) -> float:
        """At `peak` FLOP/s and `bandwidth` bytes/s, all its times together."""
        return self.times * max(self.flop / peak, self.bytes / bandwidth)


def phases(sizes: Sizes, step: Step) -> list[Phase]:
    """The phases of a step in their order."""
    tokens, element = step.num_tokens, sizes.weight_bytes
    linears = {
        name: Phase(name, 2.0 * tokens * inputs * outputs, inputs * outputs * element, sizes.num_layers)
        for name, (inputs, outputs) in sizes.linears.items()
    }
    # A multiplication and an addition for each element of the head, for the score and again for the value.
    attention_flop = 4.0 * sizes.num_heads * sizes.head_dim * sum(rows.pairs for rows in step.rows)
    attention_bytes = sizes.kv_bytes_per_token / sizes.num_layers * sum(rows.keys for rows in step.rows)
    head = sizes.hidden_size * sizes.vocab_size if step.num_sampled else 0
    return [
        Phase("embedding", 0.0, tokens * sizes.hidden_size * element),
        linears["qkv"],
        Phase("attention", attention_flop, attention_bytes, sizes.num_layers),
        linears["output"],
        linears["gate_up"],
        linears["down"],
        Phase("head", 2.0 * step.num_sampled * head, head * element),
    ]


def seconds(sizes: Sizes, step: Step, peak: float, bandwidth: float) -> float:
    """The least time of a step."""
    return sum(phase.seconds(peak, bandwidth) for phase in phases(sizes, step))


def totals(sizes: Sizes, steps: Iterable[Step]) -> tuple[float, float]:
    """FLOP and bytes of all steps together."""
    every = [phase for step in steps for phase in phases(sizes, step)]
    return sum(phase.times * phase.flop for phase in every), sum(phase.times * phase.bytes for phase in every)


def workload_steps(num_streams: int, prompt_len: int, output_len: int) -> list[Step]:
    """An ideal scheduler's: all prompts in one step, which samples the first tokens; then all streams at once."""
    prompts = Step((Rows(0, prompt_len),) * num_streams, num_streams)
    decodes = [Step((Rows(prompt_len + done - 1),) * num_streams, num_streams) for done in range(1, output_len)]
    return [prompts, *decodes]


def workload_seconds(
    sizes: Sizes, num_streams: int, prompt_len: int, output_len: int, peak: float, bandwidth: float
) -> float:
    """The least time of a batch of equal requests."""
    return sum(seconds(sizes, step, peak, bandwidth) for step in workload_steps(num_streams, prompt_len, output_len))
