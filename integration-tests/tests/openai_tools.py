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

# Required calls match their schemas, even if the model would prefer free text.
trip = {"type": "function", "function": {
    "name": "book_trip", "description": "Books a trip.",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"enum": ["Paris", "Rome", "K\u00f6ln"]},
            "nights": {"type": "integer", "minimum": 1, "maximum": 14},
            "rooms": {"type": "array", "items": {"$ref": "#/$defs/room"}, "minItems": 1, "maxItems": 2},
        },
        "required": ["city", "nights", "rooms"],
        "additionalProperties": False,
        "$defs": {"room": {"enum": ["single", "double"]}},
    },
}}
ping = {"type": "function", "function": {"name": "ping"}}


def check(function):
    arguments = json.loads(function.arguments)
    if function.name == "ping":
        assert arguments == {}, arguments
        return
    assert function.name == "book_trip", function
    assert set(arguments) == {"city", "nights", "rooms"}, arguments
    assert arguments["city"] in ["Paris", "Rome", "K\u00f6ln"] and 1 <= arguments["nights"] <= 14, arguments
    assert 1 <= len(arguments["rooms"]) <= 2 and set(arguments["rooms"]) <= {"single", "double"}, arguments


def answer(**more):
    """Returns the request and its first choice."""
    request = {**asked, "messages": [{"role": "user", "content": "Tell me a joke."}],
               "tools": [trip, ping], "max_tokens": 160, **more}
    return request, client.chat.completions.create(**request).choices[0]


def both_ways(**more):
    """Asserts that the streamed answer equals the whole answer, and returns the choice."""
    request, whole = answer(**more)
    content, calls, reason = "", [], None
    for chunk in client.chat.completions.create(**request, stream=True):
        for part in chunk.choices:
            content += part.delta.content or ""
            reason = part.finish_reason or reason
            for piece in part.delta.tool_calls or []:
                if piece.index == len(calls):
                    calls.append({"name": piece.function.name, "arguments": ""})
                calls[piece.index]["arguments"] += piece.function.arguments
    assert calls == functions(whole.message), (calls, whole)
    assert (content or None) == (whole.message.content or None), (content, whole)
    assert reason == whole.finish_reason, (reason, whole)
    # The client's stream helper rejects an answer that `max_tokens` cut.
    if reason != "length":
        with client.chat.completions.stream(**request) as stream:
            for _ in stream:
                pass
            final = stream.get_final_completion().choices[0]
        assert functions(final.message) == functions(whole.message), (final, whole)
    return whole


for temperature, seed, is_streamed in [(0, 1, True), (1.5, 2, False), (1.5, 3, False)]:
    # A sampled answer may have up to 40 characters of white space between two JSON tokens, so it needs more tokens.
    drawn = dict(temperature=temperature, seed=seed, max_tokens=512 if temperature else 160)
    ask = both_ways if is_streamed else lambda **more: answer(**more)[1]
    one = ask(tool_choice="required", parallel_tool_calls=False, **drawn)
    assert one.finish_reason == "tool_calls" and not one.message.content, one
    assert len(one.message.tool_calls) == 1, one
    check(one.message.tool_calls[0].function)
    for name in ["book_trip", "ping"]:
        named = ask(tool_choice={"type": "function", "function": {"name": name}}, **drawn)
        # As in OpenAI and vLLM, the finish reason of a named function is `stop`, not `tool_calls`.
        assert named.finish_reason == "stop" and not named.message.content, named
        assert [call.function.name for call in named.message.tool_calls] == [name], named
        check(named.message.tool_calls[0].function)
    some = ask(tool_choice="required", **drawn)
    assert some.finish_reason in ["tool_calls", "length"] and some.message.tool_calls, some
    # `max_tokens` may have cut the last call.
    for call in some.message.tool_calls[:-1 if some.finish_reason == "length" else None]:
        check(call.function)

# Calls of a strict function match its schema even when the model decides whether to call.
strict = {**trip, "function": {**trip["function"], "strict": True}}
free = both_ways(tools=[strict])
if free.message.tool_calls and free.finish_reason != "length":
    for call in free.message.tool_calls:
        check(call.function)
assert free.finish_reason in ["stop", "length", "tool_calls"], free
earlier = {"id": "call_2", "type": "function", "function": {
    "name": "book_trip", "arguments": '{"city": "Paris", "nights": 2, "rooms": ["single"]}'}}
led = both_ways(tools=[strict], messages=[
    {"role": "user", "content": "Book me a trip to Paris."},
    {"role": "assistant", "content": None, "tool_calls": [earlier]},
    {"role": "tool", "tool_call_id": "call_2", "content": "booked"},
    {"role": "user", "content": "And to Rome? Call the function book_trip."},
])
for call in led.message.tool_calls or []:
    check(call.function)

# With a response format an answer consists of calls or matches the format.
colour = {"type": "json_schema", "json_schema": {"name": "colour", "schema": {"enum": ["red", "blue"]}}}
either = both_ways(response_format=colour)
if either.message.tool_calls:
    assert not either.message.content, either
else:
    assert json.loads(either.message.content) in ["red", "blue"], either

for wrong, param in [
    (dict(tools=[], tool_choice="required"), "tool_choice"),
    (dict(tool_choice={"type": "function", "function": {"name": "fly"}}), "tool_choice"),
    (dict(tools=[{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}],
          tool_choice="required"), "tools[0].function.parameters.type"),
]:
    try:
        client.chat.completions.create(**{**asked, "tools": [trip], **wrong})
    except openai.BadRequestError as error:
        assert error.body["param"] == param, error
    else:
        raise AssertionError(f"{wrong} must be refused")
print("ok")
