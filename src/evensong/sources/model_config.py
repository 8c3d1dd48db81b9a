"""Reads a model's ModelDescription from wherever its files are."""

from __future__ import annotations

from dataclasses import replace

from evensong.protocol.errors import ConfigError
from evensong.sources.gguf_config import describe_gguf
from evensong.sources.hf_config import describe_folder
from evensong.sources.model_description import ModelDescription, check_description
from evensong.sources.resolve import ModelSource

__all__ = ["ModelDescription", "load_model_description"]


def load_model_description(source: ModelSource) -> ModelDescription:
    """The description of `source`. Raises ConfigError naming what is missing, wrong or not supported yet."""
    try:
        description = describe_gguf(source.path) if source.kind == "gguf" else describe_folder(source.path)
    except ConfigError:
        raise
    except (KeyError, AttributeError, TypeError, ValueError, ArithmeticError) as error:
        what = f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)
        raise ConfigError(f"the configuration of the model {source.name!r} cannot be used: {what}") from error
    check_description(description, source.name)
    return _without_idle_windows(description)


def _without_idle_windows(model: ModelDescription) -> ModelDescription:
    """A window as long as the longest sequence hides nothing."""
    windows = tuple(w if w is not None and w < model.max_position_embeddings else None for w in model.layer_windows)
    return replace(model, layer_windows=windows)
