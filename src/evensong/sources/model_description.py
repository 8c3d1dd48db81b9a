"""ModelDescription: what a model is, in numbers, whatever file said so."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Literal

from evensong.protocol.errors import ConfigError

Activation = Literal["silu", "gelu_tanh"]
DTYPES = ("float32", "float16", "bfloat16")
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "max_position_embeddings",
)


@dataclass(frozen=True)
class Rope:
    """The rotary embedding of a layer: frequency i of n is theta^(-i/n), divided by factors[i].

    Every kind of scaling is a list of factors (sources/rope.py); without any, all are 1. Where there are
    `long_factors`, they stand in for `factors` in an engine whose fitted max_model_len is above
    `original_max_position`: a choice made once, never by the current length. `magnitude` multiplies the rotated
    components.
    """

    theta: float
    factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    original_max_position: int = 0
    magnitude: float = 1.0

    def __str__(self) -> str:
        """The base, and a digest of the scaling where there is one."""
        if self == Rope(self.theta):
            return repr(self.theta)
        return f"{self.theta!r} scaled {hashlib.blake2b(repr(self).encode(), digest_size=6).hexdigest()}"

    def factors_for(self, max_model_len: int) -> tuple[float, ...]:
        """The factors of an engine with this fitted length."""
        long = bool(self.long_factors) and max_model_len > self.original_max_position
        return self.long_factors if long else self.factors


@dataclass(frozen=True)
class ModelDescription:
    """What a model is; sizes in elements. `vocab_size` counts the rows of the embedding, padding included.

    `layer_ropes` and `layer_windows` have one entry a layer. A window of W: a token sees itself and the W - 1 before
    it; None: all. A head's first `rotary_dim` components are rotated. What belongs to a family and never varies (names
    of tensors, norms of queries and keys, further norms) is code in the family's file in models/.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    rms_norm_eps: float
    layer_ropes: tuple[Rope, ...]
    layer_windows: tuple[int | None, ...]
    max_position_embeddings: int
    tie_word_embeddings: bool
    torch_dtype: str
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    activation: Activation = "silu"
    # Added to stored norm weights; GGUF files of such families have it added already.
    norm_weight_offset: float = 0.0
    embedding_scale: float = 1.0
    # Queries are multiplied by this^-1/2; None: by head_dim^-1/2.
    query_pre_attn_scalar: float | None = None


def check_description(model: ModelDescription, name: str) -> None:
    """Raises ConfigError for numbers that cannot be those of the model `name`."""
    _check_sizes(model, name)
    if not 0 < model.rms_norm_eps < 1:
        raise ConfigError(f"the model {name!r} has rms_norm_eps {model.rms_norm_eps}, which cannot be")
    for rope in set(model.layer_ropes):
        _check_rope(model, rope, name)
    for window in set(model.layer_windows):
        if window is not None and window < 1:
            raise ConfigError(f"the model {name!r} has a sliding window of {window}, which cannot be")
    scalar = model.query_pre_attn_scalar
    if scalar is not None and not 0 < scalar < math.inf:
        raise ConfigError(f"the model {name!r} has query_pre_attn_scalar {scalar}, which cannot be")
    if model.torch_dtype not in DTYPES:
        raise ConfigError(
            f"the dtype {model.torch_dtype!r:.80} of the model {name!r} is not supported; supported: "
            f"{', '.join(DTYPES)}"
        )
    for token_id in (*model.eos_token_ids, *(() if model.bos_token_id is None else (model.bos_token_id,))):
        if not 0 <= token_id < model.vocab_size:
            raise ConfigError(f"the model {name!r} names token {token_id}, which is not among its {model.vocab_size}")


def _check_sizes(model: ModelDescription, name: str) -> None:
    for size_name in _SIZES:
        size = getattr(model, size_name)
        if not 1 <= size <= 2**31 - 1:
            raise ConfigError(f"the model {name!r} has {size_name} {size}, which cannot be")
    if not 2 <= model.rotary_dim <= model.head_dim:
        raise ConfigError(f"the model {name!r} rotates {model.rotary_dim} of {model.head_dim}, which cannot be")
    if model.num_heads % model.num_kv_heads or model.head_dim % 2 or model.rotary_dim % 2:
        raise ConfigError(
            f"the model {name!r} has {model.num_heads} heads of {model.head_dim} ({model.rotary_dim} rotated) on "
            f"{model.num_kv_heads} KV heads, which cannot be"
        )


def _check_rope(model: ModelDescription, rope: Rope, name: str) -> None:
    if not 1 < rope.theta < math.inf:
        raise ConfigError(f"the model {name!r} has rope_theta {rope.theta}, which cannot be")
    if not 0 < rope.magnitude < math.inf:
        raise ConfigError(f"the model {name!r} multiplies rotated components by {rope.magnitude}, which cannot be")
    for factors in (rope.factors, rope.long_factors):
        if factors and len(factors) != model.rotary_dim // 2:
            raise ConfigError(
                f"the model {name!r} has {len(factors)} rope factors for {model.rotary_dim} rotated components, which "
                "cannot be"
            )
        if not all(0 < factor < math.inf for factor in factors):
            raise ConfigError(f"the model {name!r} has a rope factor that is not a positive number")
