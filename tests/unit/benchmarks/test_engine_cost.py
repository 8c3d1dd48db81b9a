"""The tiny model, and what engine_cost makes of its measurements."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
from benchmarks.advantages import Turns, row_of
from benchmarks.http_load import count_events
from benchmarks.tiny_model import VOCAB_SIZE, tokenizer, write_tiny_model
from safetensors import safe_open

from evensong.sources.model_config import load_model_description
from evensong.sources.resolve import resolve_model
from evensong.sources.tokenizer import load_tokenizer


def test_the_tiny_model_is_a_model_and_always_the_same(tmp_path: Path) -> None:
    folders = [write_tiny_model(tmp_path / name) for name in ("a", "b")]
    digests = [
        {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()} for folder in folders
    ]
    assert digests[0] == digests[1] and len(digests[0]) == 4
    source = resolve_model(str(folders[0]))
    description = load_model_description(source)
    assert (description.num_layers, description.hidden_size, description.vocab_size) == (2, 64, VOCAB_SIZE)
    own = load_tokenizer(source)
    text = "how a text is cut, and joined again"
    assert own.decode(own.encode(text), True) == text
    with safe_open(str(folders[0] / "model.safetensors"), "pt") as file:
        embedding = file.get_tensor("model.embed_tokens.weight").float().numpy()
    assert embedding.shape == (VOCAB_SIZE, 64) and 0.015 < float(np.std(embedding)) < 0.025


def test_its_tokenizer_has_exactly_its_vocabulary() -> None:
    made = tokenizer()
    assert made.get_vocab_size() == VOCAB_SIZE
    assert sorted(made.get_vocab().values()) == list(range(VOCAB_SIZE))
    assert made.token_to_id("<|end|>") == VOCAB_SIZE - 2


def test_events_and_tokens_of_a_stream() -> None:
    event = 'data: {"choices": [{"text": "data: {"}], "usage": null}'
    usage = 'data: {"choices": [], "usage": {"completion_tokens": 5}}'
    assert count_events("\n\n".join([event, event, usage, "data: [DONE]", ""])) == (2, 5)


def test_pairs_are_compared_one_by_one() -> None:
    values = {
        "evensong": {"tokens_per_s": [300.0, 200.0], "cpu_us_per_token": [10.0, 20.0]},
        "vllm": {"tokens_per_s": [100.0, 50.0], "cpu_us_per_token": [40.0, 40.0]},
    }
    advantage = row_of(values, list)["advantage"]["vllm"]
    assert advantage == {"tokens_per_s": [3.0, 4.0], "cpu_us_per_token": [4.0, 2.0]}


def test_who_begins_alternates_and_no_seed_comes_twice() -> None:
    turns = Turns(3)
    first = [*turns.of(["a", "b"])]
    assert [name for name, _ in first] == ["a", "b", "b", "a", "a", "b"]
    seeds = [seed for _, seed in first] + [turns.seed()]
    assert len(set(seeds)) == 4
