"""Recording: a model's forward pass as a native program, made for one KV cache and one fitted length."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evensong.distributed.grid import Rank
from evensong.kernels.cpu.native import extension
from evensong.kernels.cpu.recorder import CosSin, NativeLinks, Recorder, Watchers
from evensong.kernels.mode import NumericMode
from evensong.models.base import CausalLM
from evensong.protocol.kv_spec import KVCacheConfig, LayerKVSpec, groups_of_layers
from evensong.worker.device import BANKS, most_samples, num_probe_blocks


@dataclass(frozen=True)
class LayerMemory:
    """What layers read besides weights: their arrays of the KV cache, how blocks are found, and rotary tables.

    `arrays` and `specs` are those of the rank's layers; `cos_sin` has an entry for each layer of the model.
    """

    arrays: Sequence[Any]
    specs: Sequence[LayerKVSpec]
    kv_cache: KVCacheConfig
    cos_sin: list[CosSin]

    def caches(self) -> dict[int, Any]:
        """The native handles of the arrays, by layer."""
        make, group_of = extension().Cache, groups_of_layers(self.specs, self.kv_cache.groups)
        return {
            spec.layer: make(array, spec.num_kv_heads, spec.head_dim, group_of[spec.layer], spec.window)
            for array, spec in zip(self.arrays, self.specs, strict=True)
        }


class Recording:
    """`program` is replayed by every step; its segments from `head_begins` on are the output head and the sampler.

    `logits` is the number of the buffer with the sampled rows' logits. Ranks before the last stage have no head, and of
    the last stage only the output rank samples.
    """

    def __init__(
        self,
        isa: str,
        mode: NumericMode,
        model: CausalLM,
        rank: Rank,
        links: NativeLinks,
        memory: LayerMemory,
        max_model_len: int,
        num_token_ids: int,
        watchers: Watchers,
    ) -> None:
        self._isa = isa
        self._mode = mode
        self._model = model
        self._rank = rank
        self._links = links
        self._memory = memory
        self._max_model_len = max_model_len
        self._watchers = watchers
        self.num_token_ids = num_token_ids
        self.head_begins = self.sampling_begins = self.logits = 0
        self.program: Any = None
        self._record(None)

    def run_eagerly(
        self,
        engine: Any,
        inputs: tuple[Any, ...],
        sample_rows: Any,
        samples: Any,
        place: Mapping[str, int],
        copies: Any,
    ) -> None:
        """One step op by op: the model's forward is called anew, and each op runs as it is appended.

        Blocks are copied before the first one. The sampler is left to the caller, as the last segment of a program that
        is this step's own. `place`: where the step stands, as `submit` takes it.
        """

        def run(first: int, last: int) -> None:
            if last > first:
                pairs = copies if first == 0 else None
                ticket = engine.submit(
                    self.program, *inputs, sample_rows, samples, first=first, last=last, copies=pairs, **place
                )
                engine.wait(ticket)

        self._record(run)

    def _record(self, after_each: Callable[[int, int], None] | None) -> None:
        self.program = self._new_program()
        recorder = Recorder(
            self.program,
            self._mode,
            self._memory.caches(),
            self._memory.cos_sin,
            links=self._links,
            watchers=self._watchers,
            after_each=after_each,
        )
        hidden = self._model.forward(recorder)
        self.head_begins = self.program.num_segments
        if self._rank.is_last_stage:
            self.logits = self._model.logits(recorder, hidden)
        self.sampling_begins = self.program.num_segments
        if self._rank.is_output:
            self.program.sampling(self.logits)

    def _new_program(self) -> Any:
        kv_cache = self._memory.kv_cache
        return extension().Program(
            self._isa,
            max_rows=kv_cache.max_num_batched_tokens,
            max_samples=most_samples(kv_cache),
            max_positions=self._max_model_len,
            num_blocks=kv_cache.num_blocks + num_probe_blocks(kv_cache.block_size),
            block_size=kv_cache.block_size,
            num_groups=len(kv_cache.groups),
            num_feed_slots=kv_cache.max_num_seqs,
            vocab_size=self.num_token_ids,
            num_banks=BANKS,
            feed=self._links.feed,
        )
