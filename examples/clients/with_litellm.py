"""LiteLLM with this server behind its OpenAI provider. python with_litellm.py [URL]"""

# /// script
# requires-python = ">=3.11"
# dependencies = ["litellm==1.110.2"]
# ///

from __future__ import annotations

import asyncio
import json
import os
import sys
import urllib.request

# Its table of prices comes with it; without this it asks the network for a newer one.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm

litellm.suppress_debug_info = True

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
with urllib.request.urlopen(f"{url}/models") as response:
    model = "openai/" + json.load(response)["data"][0]["id"]
where = {"model": model, "api_base": url, "api_key": "none"}
messages = [{"role": "user", "content": "Name three colours of autumn leaves."}]

answer = litellm.completion(messages=messages, max_tokens=24, temperature=0, **where)
text = answer.choices[0].message.content
print("completion:", text)
assert answer.usage.completion_tokens > 0

chunks = list(litellm.completion(messages=messages, max_tokens=24, temperature=0, stream=True, **where))
assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
rebuilt = litellm.stream_chunk_builder(chunks, messages=messages)
assert rebuilt.choices[0].message.content == text
print("stream: the same text")


async def several() -> list[str]:
    """Two at once."""
    calls = [litellm.acompletion(messages=messages, max_tokens=8, seed=seed, **where) for seed in (1, 1)]
    return [answer.choices[0].message.content for answer in await asyncio.gather(*calls)]


first, second = asyncio.run(several())
assert first == second, "the same seed must give the same text"
print("async, seed: the same text twice")

raw = litellm.text_completion(prompt="The sea is", max_tokens=8, **where | {"model": f"text-completion-{model}"})
print("text completion:", raw.choices[0].text)
try:
    litellm.completion(messages=messages, **where | {"model": "openai/no-such-model"})
    raise SystemExit("an unknown model was served")
except litellm.NotFoundError as error:
    print("unknown model:", error.message)
