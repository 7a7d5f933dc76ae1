"""Uses a Baton router with the Anthropic client, unmodified.

Usage: anthropic_client.py http://HOST:PORT
Prints "ok" at the end; any difference from what the client expects is an exception.
"""

import json
import sys

import anthropic

client = anthropic.Anthropic(base_url=sys.argv[1], api_key="unused", timeout=60, max_retries=0)
model = client.models.list().data[0].id
question = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
# The client has no argument for the temperature any more.
asked = dict(model=model, messages=question, max_tokens=100, extra_body={"temperature": 0})

whole = client.messages.create(**asked)
assert (whole.type, whole.role, whole.stop_reason) == ("message", "assistant", "end_turn"), whole
assert [block.type for block in whole.content] == ["text"] and "Paris" in whole.content[0].text, whole
counted = client.messages.count_tokens(model=model, messages=question, system="Be brief.")
plain = client.messages.count_tokens(model=model, messages=question)
assert plain.input_tokens == whole.usage.input_tokens + whole.usage.cache_read_input_tokens, whole
assert counted.input_tokens > plain.input_tokens
with client.messages.stream(**asked) as stream:
    text = "".join(stream.text_stream)
    streamed = stream.get_final_message()
assert text == streamed.content[0].text == whole.content[0].text, streamed
assert streamed.usage.output_tokens == whole.usage.output_tokens

# A call that the grammar forces, its result, and the answer.
schema = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
tool = {"name": "forecast", "description": "The weather of the next days.", "input_schema": schema}
forced = dict(tools=[tool], tool_choice={"type": "tool", "name": "forecast"})
called = client.messages.create(**asked, **forced)
(call,) = called.content
assert called.stop_reason == "tool_use" and call.type == "tool_use", called
assert call.input["city"] in ("Paris", "Rome") and 1 <= call.input["days"] <= 9, call
with client.messages.stream(**asked, **forced) as stream:
    (again,) = stream.get_final_message().content
assert again.input == call.input and again.name == "forecast", again
result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "rain"}]}
history = [*question, {"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
answer = client.messages.create(**{**asked, "messages": history}, tools=[tool], tool_choice={"type": "none"})
assert answer.content[0].type == "text", answer

# Structured output, stop sequences, and the beginning of an answer.
format = {"type": "json_schema", "schema": schema}
structured = client.messages.create(**asked, output_config={"format": format})
assert json.loads(structured.content[0].text).keys() == {"city", "days"}, structured
stopped = client.messages.create(**asked, stop_sequences=["capital"])
assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "capital"), stopped
begun = [*question, {"role": "assistant", "content": "The capital of France is"}]
assert "Paris" in client.messages.create(**{**asked, "messages": begun}).content[0].text

# Errors have their class and name the field.
for wrong, error, words in [
    ({"model": "nobody"}, anthropic.NotFoundError, "nobody"),
    ({"max_tokens": -1}, anthropic.BadRequestError, "max_tokens is -1; allowed: "),
    ({"extra_body": {"temperature": 7}}, anthropic.BadRequestError, "temperature is 7; allowed: "),
]:
    try:
        client.messages.create(**{**asked, **wrong})
        raise AssertionError(f"{wrong} was accepted")
    except error as caught:
        assert words in str(caught) and caught.request_id, caught
print("ok")
