"""Whether an output begins inside reasoning, by its prompt."""

from __future__ import annotations

import pytest

from evensong.engine.frontend.reasoning import REASONING_FORMATS

HEAD = "<|im_start|>user\nWhat is <think>?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("prompt", "continued", "qwen3", "deepseek_r1"),
    [
        (HEAD, "", "undecided", "open"),
        (HEAD + "<think>\n", "", "open", "open"),
        (HEAD + "<think>\n\n</think>\n\n", "", "done", "done"),
        (HEAD + "Well", "Well", "done", "open"),
        (HEAD + "<think>Well", "<think>Well", "open", "open"),
        (HEAD + "<think>a</think>b", "<think>a</think>b", "done", "done"),
        (HEAD + "a</think>b", "a</think>b", "done", "done"),
        ("", "", "undecided", "open"),
    ],
)
def test_phase(prompt: str, continued: str, qwen3: str, deepseek_r1: str) -> None:
    assert REASONING_FORMATS["qwen3"].phase(prompt, continued) == qwen3
    assert REASONING_FORMATS["deepseek_r1"].phase(prompt, continued) == deepseek_r1
