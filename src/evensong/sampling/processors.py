"""Loads logits processors, and runs them so that what one of them does ends its own request at most."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Protocol

import numpy as np

from evensong.protocol.errors import ConfigError, RequestError
from evensong.protocol.sampling_params import SamplingParams
from evensong.sampling.processor import LogitsProcessor, ProcessorConfig, RequestView
from evensong.sampling.row import Float32, SamplingRow
from evensong.utils.logging import get_logger

GROUP = "evensong.logits_processors"

logger = get_logger(__name__)

# Not BaseException: Ctrl-C stays what it is. SystemExit: a processor may not end its host.
_FAULTS = (Exception, SystemExit)


class _Processor(Protocol):
    """LogitsProcessor by its methods: a class need not inherit from it."""

    def wanted(self, params: SamplingParams) -> bool: ...

    def apply(self, view: RequestView, logits: Float32) -> None: ...


@dataclass(frozen=True)
class LoadedProcessor:
    """A processor under its name. `fault`: why it cannot act on a request, if it cannot."""

    name: str
    place: str
    own: Any
    fault: str = ""

    def apply(self, row: SamplingRow, logits: Float32) -> str | None:
        """Changes `logits` in place; returns what went wrong."""
        if self.fault:
            return self.fault
        try:
            # A view of its own: whatever it does to the array's shape, the row keeps its own.
            returned = self.own.apply(_view(row), logits[:])
        except _FAULTS as error:
            logger.exception("logits processor %s failed", self.name)
            return _failed(self.name, error)
        if returned is not None:
            return f"logits processor {self.name} returned a {type(returned).__name__}: it must change the row in place"
        if not logits.max() < np.inf:  # a NaN is no number below anything
            return f"logits processor {self.name} left NaN or +inf among the logits"
        return None


class Processors:
    """All that are loaded, in the order in which they act."""

    def __init__(self, loaded: Sequence[LoadedProcessor] = ()) -> None:
        self._loaded = tuple(loaded)

    def __len__(self) -> int:
        return len(self._loaded)

    def describe(self) -> dict[str, str]:
        """The part of the fingerprint: what an answer's bits depend on; nothing where none is loaded."""
        shown = ", ".join(f"{one.name} ({one.place})" for one in self._loaded)
        return {"logits_processors": shown} if shown else {}

    def check(self, params: SamplingParams) -> None:
        """Raises RequestError for what a processor refuses, RuntimeError where one fails."""
        chosen = self.chosen(params)
        for one in chosen:
            if one.fault:
                raise RuntimeError(one.fault)
            try:
                getattr(one.own, "check", _nothing)(params)
            except RequestError:
                raise
            except ValueError as error:
                message = f"logits processor {one.name} refuses the request: {error}"
                raise RequestError(message, param="extra_args") from error
            except _FAULTS as error:
                logger.exception("logits processor %s failed on a request's settings", one.name)
                raise RuntimeError(_failed(one.name, error)) from error

    def chosen(self, params: SamplingParams) -> tuple[LoadedProcessor, ...]:
        """Those that act on a request with these settings."""
        return tuple(one for loaded in self._loaded if (one := _wants(loaded, params)) is not None)


NO_PROCESSORS = Processors()


def load_processors(named: Sequence[str], config: ProcessorConfig) -> Processors:
    """Those of installed packages, by name of their entry points, then those `named` as `module:Class`.

    Of the former one that cannot be loaded is logged and skipped; of the latter it is a ConfigError.
    """
    loaded: list[LoadedProcessor] = []
    classes: set[Any] = set()

    def add(name: str, place: str, load: Callable[[], Any]) -> None:
        found = load()
        if found not in classes:
            classes.add(found)
            loaded.append(LoadedProcessor(name, place, _made(found, config)))

    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        try:
            add(point.name, _place(point), point.load)
        except _FAULTS as error:
            logger.warning("logits processor %s cannot be loaded and is skipped: %s", point.name, error)
    for name in named:
        try:
            add(name, "flag", partial(_find, name))
        except _FAULTS as error:
            raise ConfigError(f"the logits processor {name!r:.200} cannot be loaded: {error}") from error
    return Processors(loaded)


def _find(name: str) -> Any:
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise ValueError("it must be given as module:Class")
    # The folder that the operator stands in counts as well, after all others: its files must not shadow a library's.
    sys.path.append(os.getcwd())
    try:
        found: Any = importlib.import_module(module)
    finally:
        sys.path.pop()
    for part in attribute.split("."):
        found = getattr(found, part)
    return found


def _made(found: Any, config: ProcessorConfig) -> _Processor:
    lacks = [method for method in ("wanted", "apply") if not callable(getattr(found, method, None))]
    if not isinstance(found, type) or lacks:
        raise TypeError(f"it is no {LogitsProcessor.__name__}: it lacks {' and '.join(lacks) or 'a class'}")
    processor: _Processor = found(config)
    return processor


def _place(point: EntryPoint) -> str:
    package = "" if point.dist is None else f" of {point.dist.name} {point.dist.version}"
    return f"{point.value}{package}"


def _wants(loaded: LoadedProcessor, params: SamplingParams) -> LoadedProcessor | None:
    try:
        return loaded if loaded.own.wanted(params) else None
    except _FAULTS as error:
        logger.exception("logits processor %s failed on a request's settings", loaded.name)
        return LoadedProcessor(loaded.name, loaded.place, loaded.own, _failed(loaded.name, error))


def _view(row: SamplingRow) -> RequestView:
    prompt, output = (np.asarray(ids, dtype=np.int64).view() for ids in (row.prompt_token_ids, row.output_token_ids))
    prompt.flags.writeable = output.flags.writeable = False
    return RequestView(row.params, row.params.extra_args or {}, prompt, output)


def _failed(name: str, error: BaseException) -> str:
    return f"logits processor {name} failed: {type(error).__name__}: {error!s:.500}"


def _nothing(params: SamplingParams) -> None:
    """A processor without a `check` refuses nothing."""
