"""A real byte-level tokenizer without a file: special tokens, all 256 bytes, and pairs of bytes.

Ids 0 to 9 are special tokens, as FakeExecutor's script expects; its vocabulary is as large as FakeExecutor's.
"""

from __future__ import annotations

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from evensong.sources.model_description import ModelDescription, Rope
from evensong.sources.tokenizer import Tokenizer
from evensong.testing.fake_executor import VOCAB_SIZE

NUM_SPECIAL = 10
EOS_TOKEN_ID = 1
FIRST_BYTE = NUM_SPECIAL
CHAT_TEMPLATE = (
    "{% for message in messages %}<s0>{{ message.role }}\n{{ message.content }}<s1>\n{% endfor %}"
    "{% if add_generation_prompt %}<s0>assistant\n{% endif %}"
)


def byte_tokenizer(chat_template: str | None = CHAT_TEMPLATE) -> Tokenizer:
    """Token `FIRST_BYTE + b` is byte b; ids above the bytes are pairs of bytes, which only decoding meets."""
    characters = _byte_characters()
    spellings = [f"<s{index}>" for index in range(NUM_SPECIAL)]
    spellings += characters
    for index in range(VOCAB_SIZE - len(spellings)):
        # Pairs of a lead and a continuation byte, so that characters are cut in every way.
        spellings.append(characters[128 + index % 128] + characters[(0x80 + index * 7) % 256])
    vocabulary = {spelling: index for index, spelling in enumerate(spellings)}
    for index in range(len(spellings)):
        # A pair that came twice leaves its id without a token; such ids stand for a word.
        if vocabulary[spellings[index]] != index:
            vocabulary[f"w{index}"] = index
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(f"<s{index}>", special=True) for index in range(NUM_SPECIAL)])
    return Tokenizer(backend, chat_template=chat_template, special_tokens={"bos_token": "<s0>", "eos_token": "<s1>"})


def byte_ids(text: str) -> list[int]:
    """The token ids of a text, one a byte."""
    return [FIRST_BYTE + byte for byte in text.encode()]


def tiny_description() -> ModelDescription:
    """A description that fits the tokenizer; no weights belong to it."""
    return ModelDescription(
        family="llama",
        vocab_size=VOCAB_SIZE,
        hidden_size=8,
        intermediate_size=16,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        rotary_dim=8,
        rms_norm_eps=1e-5,
        layer_ropes=(Rope(10000.0),),
        layer_windows=(None,),
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        torch_dtype="float32",
        eos_token_ids=(EOS_TOKEN_ID,),
    )


def _byte_characters() -> list[str]:
    """The character that stands for each byte, asked of the library itself."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    # Printable bytes stand for themselves; the others follow from U+0100 on, in order.
    own = {ord(character): character for character in alphabet if ord(character) < 256}
    others = iter(character for character in alphabet if ord(character) >= 256)
    return [own[byte] if byte in own else next(others) for byte in range(256)]
