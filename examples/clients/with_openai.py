"""The official client: models, chat, responses, streams, log-probabilities, errors. python with_openai.py [URL]"""

# /// script
# requires-python = ">=3.11"
# dependencies = ["openai==3.57.0"]
# ///

from __future__ import annotations

import sys

from openai import BadRequestError, NotFoundError, OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
client = OpenAI(base_url=url, api_key="none")
model = client.models.list().data[0].id
messages = [{"role": "user", "content": "Name three colours of autumn leaves."}]

answer = client.chat.completions.create(model=model, messages=messages, max_tokens=24)
print("chat:", answer.choices[0].message.content)

# The seed that the server drew gives the same answer again, streamed or not.
seed = answer.model_extra["seed"]
stream = client.chat.completions.create(
    model=model, messages=messages, max_tokens=24, seed=seed, stream=True, stream_options={"include_usage": True}
)
text, usage = "", None
for chunk in stream:
    usage = chunk.usage or usage
    for choice in chunk.choices:
        text += choice.delta.content or ""
assert text == answer.choices[0].message.content, "the same seed must give the same text"
assert usage is not None and usage.completion_tokens == answer.usage.completion_tokens
print("stream: the same text, usage", usage.total_tokens, "tokens")

best = client.chat.completions.create(
    model=model, messages=messages, max_tokens=4, temperature=0, logprobs=True, top_logprobs=2, n=2
)
assert best.choices[0].message.content == best.choices[1].message.content
assert len(best.choices[0].logprobs.content[0].top_logprobs) == 2
completion = client.completions.create(model=model, prompt=["The sea is", "The sky is"], max_tokens=8, logprobs=1)
assert [choice.index for choice in completion.choices] == [0, 1]
assert len(completion.choices[0].logprobs.tokens) > 0
print("logprobs, n, lists of prompts: as asked")

response = client.responses.create(model=model, input=messages, max_output_tokens=24, extra_body={"seed": seed})
assert response.output_text == text, "the same seed must give the same text over every API"
with client.responses.stream(
    model=model, input="And of spring?", previous_response_id=response.id, temperature=0, max_output_tokens=400
) as events:
    followed = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert events.get_final_response().output_text == followed
print("responses: the same text, and a second turn:", followed)

try:
    client.completions.create(model="no-such-model", prompt="a")
    raise SystemExit("an unknown model was served")
except NotFoundError as error:
    print("unknown model:", error.message)
try:
    client.completions.create(model=model, prompt="a", temperature=-1)
    raise SystemExit("a negative temperature was taken")
except BadRequestError as error:
    assert error.param == "temperature"
    print("bad temperature:", error.message)
