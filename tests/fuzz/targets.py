"""What is fuzzed: everything that a start reads of a weight file. Only ConfigError may come out, in one short line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from evensong.protocol.errors import ConfigError
from evensong.sources.dequant import dequantize
from evensong.sources.gguf_file import GGUFFile
from evensong.sources.gguf_tokenizer import convert
from evensong.sources.model_config import load_model_description
from evensong.sources.resolve import ModelSource
from evensong.sources.safetensors_file import read_safetensors
from evensong.sources.weights import TensorEntry, open_weights

# Bytes of float32 values for a byte of the file: IQ1_S has 20. More were made up.
MAX_AMPLIFICATION = 20.5
_MAX_MESSAGE = 2000
# Writes an input to a path and reads it.
Target = Callable[[bytes, Path], None]


def gguf(data: bytes, path: Path) -> None:
    """All metadata and tensors of `data` as a GGUF file, then what a start makes of them."""
    path.write_bytes(data)
    with _ConfigErrorOnly():
        file = GGUFFile(path)
        for key in file.keys:
            value = file.get(key)
            assert not isinstance(value, list) or len(value) == file.length(key) <= len(data), key
        for tensor in file.tensors.values():
            assert len(tensor.data) <= len(data), tensor.name
            stored = np.frombuffer(tensor.data, np.uint8)
            _dequantize(TensorEntry(tensor.name, tensor.dtype, tensor.shape, stored), len(data))
    source = ModelSource("gguf", path, "fuzzed")
    with _ConfigErrorOnly():
        for entry in open_weights(source).values():
            with _ConfigErrorOnly():
                _dequantize(entry, len(data))
    with _ConfigErrorOnly():
        load_model_description(source)
    with _ConfigErrorOnly():
        convert(GGUFFile(path))


def safetensors(data: bytes, path: Path) -> None:
    """All tensors of `data` as a safetensors file."""
    path.write_bytes(data)
    with _ConfigErrorOnly():
        for name, (dtype, shape, stored) in read_safetensors(path).items():
            assert len(stored) <= len(data), name
            _dequantize(TensorEntry(name, dtype, shape, stored), len(data))


TARGETS: dict[str, Target] = {"gguf": gguf, "safetensors": safetensors}


def _dequantize(entry: TensorEntry, num_bytes: int) -> None:
    values = dequantize(entry)
    assert values.shape == entry.shape and values.nbytes <= num_bytes * MAX_AMPLIFICATION, entry.name


class _ConfigErrorOnly:
    """Takes a ConfigError, and checks what it says; lets everything else through."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, ConfigError):
            return False
        message = str(error)
        assert message and len(message.splitlines()) == 1 and len(message) < _MAX_MESSAGE, message
        return True
