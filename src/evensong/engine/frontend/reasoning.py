"""How models write their reasoning: the texts around it, and whether an output begins inside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from evensong.protocol.structured import ReasoningSpec
from evensong.sources.tokenizer import Tokenizer

# open: the output begins inside reasoning. done: reasoning is over, or there is none. undecided: it begins where the
# output begins with the start marker, white space aside, and else there is none.
Phase = Literal["open", "done", "undecided"]


@dataclass(frozen=True)
class ReasoningFormat:
    """One family's way. With `assumed` an output begins with reasoning, unless the prompt has ended it."""

    name: str
    start_marker: str
    end_marker: str
    assumed: bool = False

    def phase(self, prompt: str, continued: str = "") -> Phase:
        """Where the output of `prompt` begins. `continued` is the text of a final message that goes on.

        Markers elsewhere in the prompt say nothing: a user may have written them.
        """
        if continued:
            start, end = continued.rfind(self.start_marker), continued.rfind(self.end_marker)
            if start >= 0 or end >= 0:
                return "open" if start > end else "done"
            # What is there is no reasoning, unless the family has it without a start marker.
            return "open" if self.assumed else "done"
        head = prompt.rstrip()
        if head.endswith(self.start_marker):
            return "open"
        if head.endswith(self.end_marker):
            return "done"
        return "open" if self.assumed else "undecided"

    def spec(self, phase: Phase, tokenizer: Tokenizer) -> ReasoningSpec | None:
        """What a core needs to find where the reasoning ends; None where there is none left."""
        if phase == "done":
            return None
        begins = tokenizer.encode(self.start_marker, add_special_tokens=False) if phase == "undecided" else []
        ends = tokenizer.encode(self.end_marker, add_special_tokens=False)
        return ReasoningSpec(self.end_marker, ends, begins)


REASONING_FORMATS = {
    one.name: one
    for one in (
        ReasoningFormat("deepseek_r1", "<think>", "</think>", assumed=True),
        ReasoningFormat("qwen3", "<think>", "</think>"),
        ReasoningFormat("think", "<think>", "</think>"),
        ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
    )
}
