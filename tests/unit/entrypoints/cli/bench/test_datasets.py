"""The datasets by their flags: lengths, what is shared, and prompts files of every form."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from evensong.entrypoints.cli.bench.datasets import Sample, add_dataset_flags, check_dataset_flags, load_samples
from evensong.entrypoints.cli.bench.load import arrivals
from evensong.entrypoints.cli.bench.prompt_files import read_prompts
from evensong.entrypoints.cli.bench.units import WORDS, Units, single_tokens
from evensong.entrypoints.cli.flags import Parser
from evensong.protocol.errors import ConfigError

PROMPTS = Path(__file__).resolve().parents[6] / "shared" / "data" / "prompts"


def samples(*words: str, seed: int = 0) -> list[Sample]:
    parser = Parser()
    add_dataset_flags(parser, num_prompts=20, input_len=10, output_len=5)
    options = parser.parse_args(list(words))
    options.seed = seed
    check_dataset_flags(options)
    return load_samples(options, lambda: Units(range(5000)))


def test_random_lengths_are_exact() -> None:
    made = samples()
    assert len(made) == 20 and {(len(s.prompt), s.prompt_len, s.output_len) for s in made} == {(10, 10, 5)}
    assert len({tuple(s.prompt) for s in made}) == 20
    assert made == samples() != samples(seed=1)


def test_random_lengths_vary_within_the_ratio() -> None:
    made = samples("--input-len", "100", "--output-len", "50", "--random-range-ratio", "0.2")
    lengths = {len(s.prompt) for s in made}
    assert len(lengths) > 5 and min(lengths) >= 80 and max(lengths) <= 120
    assert all(40 <= s.output_len <= 60 for s in made)


def test_a_random_prefix_is_shared_by_all() -> None:
    made = samples("--random-prefix-len", "7")
    assert len({tuple(s.prompt[:7]) for s in made}) == 1 and len({tuple(s.prompt[7:]) for s in made}) == 20
    assert {s.prompt_len for s in made} == {17}


def test_prefixes_are_shared_in_groups() -> None:
    words = ["--dataset-name", "prefix_repetition", "--prefix-repetition-num-prefixes", "4"]
    words += ["--prefix-repetition-prefix-len", "6", "--prefix-repetition-suffix-len", "3"]
    made = samples(*words, "--prefix-repetition-output-len", "2")
    heads = [tuple(s.prompt[:6]) for s in made]
    assert {heads.count(head) for head in heads} == {5} and {(len(s.prompt), s.output_len) for s in made} == {(9, 2)}


FORMS = [
    ({"prompt": "code", "task_id": "x/0", "canonical_solution": "", "test": ""}, "code"),
    ({"prompt": "own", "output_tokens": 9}, "own"),
    ({"question": "how many?", "answer": "3"}, "how many?"),
    ({"question_id": 1, "category": "c", "turns": ["first", "second"]}, "first"),
    ({"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}, "u"),
    ({"id": "a", "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]}, "hi"),
]


@pytest.mark.parametrize(("entry", "prompt"), FORMS)
@pytest.mark.parametrize("array", [False, True])
def test_prompt_files_are_recognized(tmp_path: Path, entry: dict[str, object], prompt: str, array: bool) -> None:
    path = tmp_path / "file"
    path.write_text(json.dumps([entry, entry]) if array else f"{json.dumps(entry)}\n{json.dumps(entry)}\n")
    made = samples("--dataset-name", "custom", "--dataset-path", str(path))
    assert [s.prompt for s in made] == [prompt] * 2
    assert made[0].output_len == entry.get("output_tokens", 256)
    assert samples("--dataset-name", "custom", "--dataset-path", str(path), "--output-len", "3")[0].output_len == 3


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "holds no prompt"),
        ('{"text": "a"}', "none of the keys"),
        ("1\n", "none of the keys"),
        ('{"prompt": "a"}\n{"promt": "b"}\n', "entry 2"),
        ('{"prompt": 3}', "holds no text"),
        ('{"turns": []}', "entry 1"),
        ('{"prompt": "a"}\nnot json\n', "line 2"),
        ("[1, ", "is not JSON"),
    ],
)
def test_files_that_cannot_be_used_are_named(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "file"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        read_prompts(path, 10)


@pytest.mark.skipif(not PROMPTS.exists(), reason="the shared prompts are not beside this checkout")
@pytest.mark.parametrize(
    ("name", "count"),
    [("mt_bench_question", 80), ("spec_bench_question", 480), ("gsm8k_test", 1319), ("HumanEval", 164)],
)
def test_the_shared_prompt_files(name: str, count: int) -> None:
    assert len(read_prompts(PROMPTS / f"{name}.jsonl", 10**6)) == count


def test_arrivals_offer_the_rate() -> None:
    made = samples("--num-prompts", "500")
    assert arrivals(made, float("inf"), 1.0, random.Random(0)) == [0.0] * 500
    even = arrivals(made, 10.0, float("inf"), random.Random(0))
    assert even[0] == pytest.approx(0.1) and even[-1] == pytest.approx(50.0)
    spread = []
    for burstiness in (0.2, 1.0, 20.0):
        times = arrivals(made, 10.0, burstiness, random.Random(0))
        gaps = [b - a for a, b in zip(times, times[1:], strict=False)]
        assert times[-1] == pytest.approx(50.0) and min(gaps) >= 0
        spread.append(sum(gap < 0.02 for gap in gaps))
    assert spread[0] > spread[1] > spread[2]


def test_only_words_of_one_token_are_kept() -> None:
    def tokenize(text: str) -> list[int]:
        words = text.replace("\n", " | ").split()
        return [len(word) for word in words for _ in range(2 if word in ("about", "green") else 1)]

    ids, words = single_tokens(tokenize)
    assert 0 < len(words) < len(WORDS) and not {"about", "green"} & set(words)
    assert all(len(tokenize(word)) == 1 for word in words) and ids
