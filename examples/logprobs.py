"""How likely each token was, and scoring a text: make serve, then python examples/logprobs.py [URL]."""

from __future__ import annotations

import sys

from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
client = OpenAI(base_url=url, api_key="none")
# Two choices; each token with its two best alternatives.
answer = client.completions.create(
    model="demo", prompt="The opposite of cold is", max_tokens=4, n=2, logprobs=2, temperature=0.8, seed=1
)
for choice in answer.choices:
    assert choice.logprobs is not None
    print(choice.index, list(zip(choice.logprobs.tokens or [], choice.logprobs.token_logprobs or [], strict=True)))
# max_tokens=0 scores the prompt and writes nothing. The first token follows nothing and has no log-probability.
for text in ("The opposite of cold is hot.", "The opposite of cold is blue."):
    scored = client.completions.create(model="demo", prompt=text, max_tokens=0, echo=True, logprobs=0).choices[0]
    assert scored.logprobs is not None and scored.text == text
    print(f"{sum(p for p in scored.logprobs.token_logprobs or [] if p is not None):8.2f}  {text}")
