"""A reader for GGUF files, versions 2 and 3 (the format description in the ggml project's docs/gguf.md).

The whole file is mapped; metadata is parsed once, without making Python objects of the large token arrays until they
are asked for. Every offset is checked against the file: a damaged file raises ConfigError, nothing else.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evensong.protocol.errors import ConfigError
from evensong.sources.values import is_whole

# ggml type number -> (name, elements in a block, bytes of a block)
GGML_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
}
# Types that are defined (or once were), but in which weights cannot be read: they hold activations, whole numbers, or a
# layout that the format has dropped.
_UNREADABLE_TYPES: dict[int, str] = {
    4: "Q4_2",
    5: "Q4_3",
    9: "Q8_1",
    15: "Q8_K",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
    41: "Q1_0",
}
_SCALARS: dict[int, struct.Struct] = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_STRING, _ARRAY = 8, 9
# name, ggml type number, shape with the row length last, offset
_Info = tuple[str, int, tuple[int, ...], int]
_MAX_STRING = 1 << 26
_MAX_DIMENSIONS = 4
# Far above any model's. A file of many GB could else say that all of it is one array, and fill the memory with that.
_MAX_ITEMS = 1 << 24
_MAX_TENSORS = 1 << 20  # and as many values
_MAX_METADATA = 1 << 30


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor: its ggml type, its shape with the row length last, and its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview


@dataclass(frozen=True)
class _Array:
    """An array in the metadata that has not been parsed: where its items start, their type and count."""

    offset: int
    item_type: int
    count: int


class GGUFFile:
    """Metadata and tensors of one file. Raises ConfigError for a file that is not whole or not GGUF."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open(path, "rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read the model file {path}: {error}") from error
        self._at = 0
        self._values: dict[str, Any] = {}
        self.tensors: dict[str, GGUFTensor] = {}
        try:
            self._parse()
        except (struct.error, UnicodeDecodeError, IndexError, OverflowError, MemoryError) as error:
            raise ConfigError(f"the model file {path} is damaged: {error}") from error

    def get(self, key: str, default: Any = None) -> Any:
        """A metadata value; arrays become lists on each call."""
        value = self._values.get(key, default)
        if isinstance(value, _Array):
            try:
                return self._read_items(value)
            except (struct.error, UnicodeDecodeError) as error:
                raise ConfigError(f"the model file {self.path} is damaged at {key!r:.80}: {error}") from error
        return value

    def length(self, key: str) -> int:
        """The number of items of a metadata array, without reading them; 0 for what is none."""
        value = self._values.get(key)
        return value.count if isinstance(value, _Array) else 0

    @property
    def keys(self) -> list[str]:
        """Names of all metadata values."""
        return list(self._values)

    @property
    def raw(self) -> mmap.mmap:
        """The mapped file."""
        return self._map

    def _fail(self, what: str) -> ConfigError:
        return ConfigError(f"the model file {self.path} is damaged or not GGUF: {what}")

    def _parse(self) -> None:
        if self._map[:4] != b"GGUF":
            raise self._fail("wrong magic")
        self._at = 4
        version = self._scalar(4)
        if version not in (2, 3):
            raise self._fail(f"version {version}, expected 2 or 3")
        num_tensors, num_values = self._scalar(10), self._scalar(10)
        # A value takes at least 13 bytes, a tensor 32: absurd counts end here and not in memory.
        if num_tensors * 32 + num_values * 13 > len(self._map) or max(num_tensors, num_values) > _MAX_TENSORS:
            raise self._fail(f"{num_tensors} tensors and {num_values} values cannot fit")
        for _ in range(num_values):
            key = self._string()
            if key in self._values:
                raise self._fail(f"two values named {key!r:.80}")
            self._values[key] = self._value(self._scalar(4))
            if self._at > _MAX_METADATA:
                raise self._fail(f"more than {_MAX_METADATA} bytes of metadata")
        infos = [self._tensor_info() for _ in range(num_tensors)]
        alignment = self._values.get("general.alignment", 32)
        if not is_whole(alignment) or alignment <= 0 or alignment > 1 << 20:
            raise self._fail(f"alignment {alignment!r:.80}")
        self._map_tensors(infos, -(-self._at // alignment) * alignment, alignment)

    def _map_tensors(self, infos: list[_Info], base: int, alignment: int) -> None:
        """Fills `tensors`; their offsets count from `base`."""
        whole = memoryview(self._map)
        for name, type_number, shape, offset in infos:
            if name in self.tensors:
                raise self._fail(f"two tensors named {name!r:.80}")
            if offset % alignment:
                raise self._fail(f"tensor {name!r:.80} starts at {offset}, not a multiple of {alignment}")
            self.tensors[name] = self._tensor(whole, base, name, type_number, shape, offset)
        end, before = 0, ""
        for name, _, _, offset in sorted(infos, key=lambda info: info[3]):
            if offset < end:
                raise self._fail(f"tensor {name!r:.80} overlaps with {before!r:.80}")
            end, before = offset + len(self.tensors[name].data), name

    def _scalar(self, type_number: int) -> Any:
        form = _SCALARS[type_number]
        value = form.unpack_from(self._map, self._at)[0]
        self._at += form.size
        return value

    def _string(self) -> str:
        length = self._scalar(10)
        if length > _MAX_STRING or self._at + length > len(self._map):
            raise self._fail(f"a string of {length} bytes at {self._at}")
        text = self._map[self._at : self._at + length].decode("utf-8")
        self._at += length
        return text

    def _value(self, type_number: int) -> Any:
        if type_number == _STRING:
            return self._string()
        if type_number in _SCALARS:
            return self._scalar(type_number)
        if type_number != _ARRAY:
            raise self._fail(f"value type {type_number} at {self._at}")
        item_type, count = self._scalar(4), self._scalar(10)
        array = _Array(self._at, item_type, count)
        self._skip_items(item_type, count)
        return array

    def _skip_items(self, item_type: int, count: int) -> None:
        size = len(self._map)
        if count > _MAX_ITEMS:
            raise self._fail(f"an array of {count} items at {self._at}")
        if item_type in _SCALARS:
            self._at += _SCALARS[item_type].size * count
        elif item_type == _STRING:
            if count * 8 > size:
                raise self._fail(f"an array of {count} strings cannot fit")
            length_of, data, at = _SCALARS[10].unpack_from, self._map, self._at
            for _ in range(count):
                at += 8 + length_of(data, at)[0]
            self._at = at
        else:
            raise self._fail(f"an array of type {item_type} at {self._at}")
        if self._at > size:
            raise self._fail("an array runs past the end")

    def _read_items(self, array: _Array) -> list[Any]:
        if array.item_type == _STRING:
            length_of, data, at = _SCALARS[10].unpack_from, self._map, array.offset
            items = []
            for _ in range(array.count):
                start = at + 8
                at = start + length_of(data, at)[0]
                items.append(data[start:at].decode("utf-8"))
            return items
        form = _SCALARS[array.item_type]
        return list(struct.unpack_from(f"<{array.count}{form.format[-1]}", self._map, array.offset))

    def _tensor_info(self) -> _Info:
        name = self._string()
        num_dimensions = self._scalar(4)
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise self._fail(f"tensor {name!r:.80} has {num_dimensions} dimensions")
        # GGUF names the row length first.
        shape = tuple(self._scalar(10) for _ in range(num_dimensions))[::-1]
        return name, self._scalar(4), shape, self._scalar(10)

    def _tensor(
        self,
        whole: memoryview,
        base: int,
        name: str,
        type_number: int,
        shape: tuple[int, ...],
        offset: int,
    ) -> GGUFTensor:
        if type_number not in GGML_TYPES:
            kind = _UNREADABLE_TYPES.get(type_number, type_number)
            raise ConfigError(f"the model file {self.path} holds tensor {name!r:.80} of type {kind}, not supported")
        dtype, block, block_bytes = GGML_TYPES[type_number]
        if shape[-1] % block:
            raise self._fail(f"tensor {name!r:.80} has rows of {shape[-1]}, not a multiple of {block}")
        size = math.prod(shape) // block * block_bytes
        start = base + offset
        if size <= 0 or start + size > len(whole):
            raise self._fail(f"tensor {name!r:.80} lies outside the file (truncated?)")
        return GGUFTensor(name, dtype, shape, whole[start : start + size])
