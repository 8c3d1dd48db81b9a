"""The extension, if it is there, and the instruction set that its kernels use."""

from __future__ import annotations

import importlib
import os
from typing import Any

from evensong.protocol.errors import ConfigError
from evensong.utils.logging import get_logger

ISA_VARIABLE = "EVENSONG_CPU_ISA"
logger = get_logger(__name__)


def _load() -> Any:
    try:
        return importlib.import_module("evensong._native")
    except ImportError as error:
        return error


_loaded = _load()


def available() -> bool:
    """Whether the extension can be used; says so in one line where it cannot."""
    if isinstance(_loaded, ImportError):
        logger.warning("the native kernels are missing (%s): torch's ops run instead, which are slower", _loaded)
        return False
    return True


def extension() -> Any:
    """The module evensong._native; `available` was asked before."""
    assert not isinstance(_loaded, ImportError), _loaded
    return _loaded


def chosen_isa() -> str:
    """The best instruction set of this processor, or the one that EVENSONG_CPU_ISA names.

    Raises ConfigError for one that cannot be used here.
    """
    usable: list[str] = extension().supported_isas()
    asked = os.environ.get(ISA_VARIABLE, "")
    if asked and asked not in usable:
        raise ConfigError(f"{ISA_VARIABLE}={asked[:40]!r} cannot be used here; usable: {', '.join(usable)}")
    return asked or usable[0]


def multiplies_bfloat16(isa: str) -> bool:
    """True for instruction sets with bfloat16 products."""
    pairs: bool = extension().isa_traits(isa)[1]
    return pairs
