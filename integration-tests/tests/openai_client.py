"""Drives a Baton router with the OpenAI client, unmodified, as an application would.

Usage: openai_client.py http://HOST:PORT
Prints "ok" at the end; any difference from what the client expects is an exception.
"""

import sys
from typing import Literal

import openai
import pydantic

client = openai.OpenAI(base_url=sys.argv[1] + "/v1", api_key="unused", timeout=60, max_retries=0)
model = client.models.list().data[0].id
question = [{"role": "user", "content": "What is the capital of France?"}]

text, usage, finish = "", None, None
for chunk in client.chat.completions.create(
    model=model, messages=question, max_tokens=24, temperature=0, stream=True,
    stream_options={"include_usage": True},
):
    if chunk.choices:
        text += chunk.choices[0].delta.content or ""
        finish = chunk.choices[0].finish_reason or finish
    usage = chunk.usage or usage
assert "Paris" in text, text
assert finish in ("stop", "length"), finish
assert usage.prompt_tokens > 0 and usage.completion_tokens > 0, usage
assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens, usage

whole = client.chat.completions.create(
    model=model, messages=question, max_tokens=24, temperature=0, logprobs=True, top_logprobs=3,
)
assert whole.choices[0].message.content == text, (whole.choices[0].message.content, text)
assert whole.usage.completion_tokens == usage.completion_tokens
first = whole.choices[0].logprobs.content[0]
assert len(first.top_logprobs) == 3 and first.top_logprobs[0].token == first.token, first
assert all(a.logprob >= b.logprob for a, b in zip(first.top_logprobs, first.top_logprobs[1:]))

several = client.completions.create(
    model=model, prompt="Once upon a time", n=3, seed=7, temperature=0.9, max_tokens=12, stop=["."],
)
again = client.completions.create(
    model=model, prompt="Once upon a time", n=3, seed=7, temperature=0.9, max_tokens=12, stop=["."],
)
texts = [choice.text for choice in several.choices]
assert len(texts) == 3 and len(set(texts)) > 1, texts
assert texts == [choice.text for choice in again.choices], "a seed is reproducible"
assert not any("." in text for text in texts), texts

first = client.responses.create(model=model, input="What is the capital of France?", max_output_tokens=24, temperature=0)
assert first.output_text == text and first.status in ("completed", "incomplete"), first
assert client.responses.retrieve(first.id).output_text == text
with client.responses.stream(
    model=model, input="And of Italy?", previous_response_id=first.id, max_output_tokens=24, temperature=0,
) as stream:
    events = list(stream)
deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
# The client's own helper for the final response refuses an incomplete one.
second = events[-1].response
assert deltas == second.output_text and second.previous_response_id == first.id, second
items = client.responses.input_items.list(second.id, order="asc").data
assert [item.role for item in items] == ["user", "assistant", "user"], items
assert second.usage.input_tokens > first.usage.total_tokens, second.usage


class City(pydantic.BaseModel):
    name: Literal["Paris", "Rome"]
    inhabitants: int = pydantic.Field(ge=0, le=9)


parsed = client.responses.parse(model=model, input="A city?", text_format=City, temperature=0)
assert parsed.output_parsed.name in ("Paris", "Rome"), parsed
client.responses.delete(first.id)

for status, call in [
    (openai.BadRequestError, lambda: client.completions.create(model=model, prompt="x", temperature=9)),
    (openai.NotFoundError, lambda: client.completions.create(model="nobody", prompt="x")),
    (openai.NotFoundError, lambda: client.responses.retrieve(first.id)),
    (openai.BadRequestError, lambda: client.completions.create(model=model, prompt=[5] * 9000)),
]:
    try:
        call()
    except status as error:
        assert error.body["message"], error
    else:
        raise AssertionError(f"{status} was expected")
print("ok")
