"""Anthropic's client: messages, streams, stop sequences, tools, counts, errors. python with_anthropic.py [URL]"""

# /// script
# requires-python = ">=3.11"
# dependencies = ["anthropic==2.14.0"]
# ///

from __future__ import annotations

import json
import sys
import urllib.request

from anthropic import Anthropic, BadRequestError, NotFoundError

url = (sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1").removesuffix("/v1")
client = Anthropic(base_url=url, api_key="none")
with urllib.request.urlopen(f"{url}/v1/models") as response:
    model = json.load(response)["data"][0]["id"]
messages = [{"role": "user", "content": "Name three colours of autumn leaves."}]

answer = client.messages.create(model=model, messages=messages, max_tokens=24)
print("message:", answer.content[0].text)

# The seed that the server drew gives the same answer again, streamed or not.
seed = {"seed": answer.model_extra["seed"]}
with client.messages.stream(model=model, messages=messages, max_tokens=24, extra_body=seed) as stream:
    text = "".join(stream.text_stream)
    final = stream.get_final_message()
assert text == final.content[0].text == answer.content[0].text, "the same seed must give the same text"
assert final.usage.output_tokens == answer.usage.output_tokens
print("stream: the same text,", final.usage.output_tokens, "tokens")

stop = answer.content[0].text[4:8]
cut = client.messages.create(model=model, messages=messages, max_tokens=24, stop_sequences=[stop], extra_body=seed)
assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)
counted = client.messages.count_tokens(model=model, messages=messages).input_tokens
assert counted == cut.usage.input_tokens + cut.usage.cache_read_input_tokens
print("stop sequences and counts: as asked")

colour = {"type": "string", "enum": ["red", "yellow", "brown"]}
tool = {
    "name": "paint",
    "description": "Paints a leaf.",
    "input_schema": {
        "type": "object",
        "properties": {"colour": colour},
        "required": ["colour"],
        "additionalProperties": False,
    },
}
called = client.messages.create(
    model=model,
    messages=messages,
    max_tokens=400,
    tools=[tool],
    tool_choice={"type": "tool", "name": "paint", "disable_parallel_tool_use": True},
)
assert called.stop_reason == "tool_use" and called.content[-1].input["colour"] in colour["enum"]
print("tool:", called.content[-1].input)

try:
    client.messages.create(model="no-such-model", messages=messages, max_tokens=4)
    raise SystemExit("an unknown model was served")
except NotFoundError as error:
    print("unknown model:", error.message)
try:
    client.messages.create(model=model, messages=messages, max_tokens=0)
    raise SystemExit("a message of no tokens was made")
except BadRequestError as error:
    print("bad length:", error.message)
