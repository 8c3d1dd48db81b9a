"""The best continuations of a prompt: python examples/beam_search.py [MODEL].

Over HTTP: {"prompt": …, "use_beam_search": true, "n": 3, "max_tokens": 12}.
"""

from __future__ import annotations

import sys

from evensong import LLM, BeamSearchParams

llm = LLM(sys.argv[1] if len(sys.argv) > 1 else "demo")
(output,) = llm.beam_search(["The capital of France is"], BeamSearchParams(beam_width=3, max_tokens=12))
for sequence in output.sequences:
    print(f"{sequence.cum_logprob:8.3f}", repr(sequence.text))
