"""Model families by name (sources/model_config.py maps architectures to them). Adding a model is one line here."""

from __future__ import annotations

from collections.abc import Callable

from evensong.layers.builder import Builder
from evensong.models.base import CausalLM
from evensong.models.llama import LlamaForCausalLM
from evensong.sources.model_config import ModelDescription

FAMILIES: dict[str, Callable[[ModelDescription, Builder], CausalLM]] = {
    "llama": LlamaForCausalLM,
    "mistral": LlamaForCausalLM,
}
