"""A model with packed weights, as one rank has it: packed once for all stages of its part, then mapped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from evensong.distributed.split import Share
from evensong.kernels.cpu.builders import NativeBuilder, PackingBuilder
from evensong.kernels.cpu.native import extension
from evensong.kernels.cpu.packed_file import PackedFile, packed_key, packed_path
from evensong.kernels.cpu.packed_writer import PackedWriter, open_or_pack
from evensong.kernels.interface import Spans
from evensong.kernels.mode import DType
from evensong.models.base import CausalLM
from evensong.models.check import check_model
from evensong.models.loader import TensorReader, build_model
from evensong.sources.model_description import ModelDescription
from evensong.sources.weights import Weights, open_weights
from evensong.worker.device import ModelFiles


@dataclass(frozen=True)
class NativeModel:
    """`model` has the weights of `share`; `packed` is the file that holds them."""

    description: ModelDescription
    share: Share
    model: CausalLM
    packed: PackedFile


def load_native(files: ModelFiles, share: Share, isa: str, stored: DType, threads: int, show: bool) -> NativeModel:
    """The rank's weights, packed for `isa` where no process has packed them before; a bar where `show`.

    A part's file has the layers of all stages; a stage maps it and reads its own. Raises ConfigError for damaged files.
    """
    description = files.description
    weights = open_weights(files.source)
    spans = check_model(description, weights, share.of_all_stages())
    parts: dict[str, Any] = {"model": files.digest(), "isa": isa, "build": extension().BUILD, "stored": stored}
    part = ""
    if share.num_parts > 1:
        part = f"{share.part + 1}of{share.num_parts}"
        parts["part"] = part
    key = packed_key(parts)

    def pack(writer: PackedWriter) -> dict[str, Any]:
        _pack(description, share.of_all_stages(), weights, spans, writer, isa, stored, show)
        return {}

    def used(packed: PackedFile) -> set[str]:
        builder = NativeBuilder(share, packed, isa)
        build_model(description, builder)
        return builder.used

    path = packed_path(files.source.name, key, part)
    packed = open_or_pack(path, key, pack, extension().checksum, threads, used)
    return NativeModel(description, share, build_model(description, NativeBuilder(share, packed, isa)), packed)


def _pack(
    description: ModelDescription,
    share: Share,
    weights: Weights,
    spans: dict[str, Spans],
    writer: PackedWriter,
    isa: str,
    stored: DType,
    show: bool,
) -> None:
    with (
        tqdm(total=len(spans), desc="packing weights", unit="tensor", disable=not show, leave=False) as bar,
        TensorReader(weights, spans, lambda: bar.update(1)) as read,
    ):
        build_model(description, PackingBuilder(share, read, writer, isa, stored))
