"""Qwen2 and Qwen2.5 (Yang et al., 2024): Llama's layers, whose queries, keys and values have biases."""

from __future__ import annotations

from evensong.models.decoder import DecoderModel


class Qwen2ForCausalLM(DecoderModel):
    """The shared decoder; the biases are said in the family's line (`qkv_bias`)."""
