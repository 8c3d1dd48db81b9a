"""The class that runs a family, loaded by the name in the family's line in sources/families.py."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from evensong.kernels.interface import Builder
from evensong.models.base import CausalLM
from evensong.sources.families import family_named
from evensong.sources.model_description import ModelDescription

MakeModel = Callable[[ModelDescription, Builder], CausalLM]


def model_class(family: str) -> MakeModel:
    """What makes a model of `family` from its description and its tensors."""
    module, name = family_named(family).model.rsplit(".", 1)
    made: MakeModel = getattr(importlib.import_module(f"evensong.models.{module}"), name)
    return made
