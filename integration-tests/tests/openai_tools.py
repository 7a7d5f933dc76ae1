"""Offers tools to a Baton router with the OpenAI client, unmodified.

Usage: openai_tools.py http://HOST:PORT
Prints "ok" at the end; any difference from what the client expects is an exception.
"""

import json
import sys

import openai

client = openai.OpenAI(base_url=sys.argv[1] + "/v1", api_key="unused", timeout=60, max_retries=0)
model = client.models.list().data[0].id
tool = {"type": "function", "function": {
    "name": "weather", "description": "The weather in a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}}
call = {"id": "call_1", "type": "function",
        "function": {"name": "weather", "arguments": json.dumps({"city": "Paris"})}}
messages = [
    {"role": "user", "content": "What is the weather in Paris?"},
    {"role": "assistant", "content": None, "tool_calls": [call]},
    {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    {"role": "user", "content": "And in Rome? Call the function weather."},
]
asked = dict(model=model, messages=messages, tools=[tool], max_tokens=48, temperature=0)

whole = client.chat.completions.create(**asked)
choice = whole.choices[0]
with client.chat.completions.stream(**asked) as stream:
    for _ in stream:
        pass
    streamed = stream.get_final_completion().choices[0]
expected = [{"name": "weather", "arguments": json.dumps({"city": "Rome"})}]
functions = lambda message: [call.function.model_dump(include={"name", "arguments"}) for call in message.tool_calls or []]
assert functions(choice.message) == expected and choice.finish_reason == "tool_calls", choice
assert functions(streamed.message) == expected, streamed
assert (streamed.message.content or None) == (choice.message.content or None), (streamed, choice)
assert streamed.finish_reason == choice.finish_reason, (streamed, choice)

without = client.chat.completions.create(**{**asked, "tools": openai.NOT_GIVEN})
shown = whole.usage.prompt_tokens - without.usage.prompt_tokens
assert shown > 40, f"the prompt has {shown} tokens more with a tool"
hidden = client.chat.completions.create(**asked, tool_choice="none")
assert hidden.usage.prompt_tokens == without.usage.prompt_tokens
assert hidden.choices[0].message.tool_calls is None

for choice in ["required", {"type": "function", "function": {"name": "weather"}}]:
    try:
        client.chat.completions.create(**asked, tool_choice=choice)
    except openai.BadRequestError as error:
        assert error.body["param"] == "tool_choice", error
    else:
        raise AssertionError("a call cannot be demanded")
print("ok")
