"""The Llama family: Llama, SmolLM2, Mistral (Touvron et al., 2023): the shared decoder as it is."""

from __future__ import annotations

from evensong.models.decoder import DecoderModel


class LlamaForCausalLM(DecoderModel):
    """Pre-norm layers of grouped attention and a gated MLP."""
