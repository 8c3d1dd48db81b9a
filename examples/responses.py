"""The Responses API of a running server: make serve, then python examples/responses.py [URL]."""

from __future__ import annotations

import json
import sys
import time

from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
client = OpenAI(base_url=url, api_key="none")

print("Two turns; the server remembers the first:")
first = client.responses.create(model="demo", input="Name a colour of autumn leaves.", max_output_tokens=48)
print(first.output_text)
second = client.responses.create(
    model="demo", input="And one of spring?", previous_response_id=first.id, max_output_tokens=48
)
print(second.output_text)

print("\nThe events of a call that the model must make:")
tool = {
    "type": "function",
    "name": "paint",
    "description": "Paints a leaf.",
    "parameters": {
        "type": "object",
        "properties": {"colour": {"type": "string", "enum": ["red", "yellow", "brown"]}},
        "required": ["colour"],
        "additionalProperties": False,
    },
    "strict": True,
}
stream = client.responses.create(
    model="demo",
    input="Paint it.",
    tools=[tool],
    tool_choice="required",
    parallel_tool_calls=False,
    max_output_tokens=200,
    stream=True,
)
for event in stream:
    if event.type == "response.function_call_arguments.delta":
        print(event.delta, end="", flush=True)
    elif event.type == "response.function_call_arguments.done":
        print(f"\n{event.name} gets {json.loads(event.arguments)}")

print("\nIn the background, and cancelled:")
running = client.responses.create(
    model="demo", input="Tell a long story.", background=True, max_output_tokens=4000, extra_body={"ignore_eos": True}
)
time.sleep(0.3)
cancelled = client.responses.cancel(running.id)
print(cancelled.status, "after", len(cancelled.output_text), "characters")
