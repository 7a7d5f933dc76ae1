"""Checks streamed answers of a Baton router against the router's OpenAPI description.

Usage: openapi_stream.py http://HOST:PORT
Any chunk that is not as described is an exception.
"""

import json
import sys

import jsonschema_rs
import requests

base = sys.argv[1]
document = requests.get(base + "/openapi.json", timeout=30).json()


def validator(name):
    schema = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
    return jsonschema_rs.Draft202012Validator(schema)


def events(path, body, headers):
    answer = requests.post(base + path, json=body, headers=headers, stream=True, timeout=60)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/event-stream"
    for line in answer.iter_lines():
        if line.startswith(b"data: "):
            yield line[len(b"data: "):]


messages = [{"role": "user", "content": "Name a colour."}]
variants = [
    {},
    {"n": 2, "temperature": 1.0, "seed": 3},
    {"return_token_ids": True, "stop": ["e"], "include_stop_str_in_output": True},
    {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    {"stop_token_ids": list(range(200)), "min_tokens": 2},
]
chunks = 0
for path, prompt, schema, logprobs in [
    ("/v1/chat/completions", {"messages": messages}, "ChatCompletionChunk", {"logprobs": True, "top_logprobs": 2}),
    ("/v1/completions", {"prompt": "A colour is"}, "CompletionChunk", {"logprobs": 2}),
]:
    check = validator(schema)
    for fields in [*variants, logprobs]:
        for headers in [{}, {"x-baton-stats": "1"}]:
            body = {**prompt, "model": "latest", "max_tokens": 6, "stream": True, **fields}
            *data, last = events(path, body, headers)
            assert last == b"[DONE]", last
            for chunk in data:
                check.validate(json.loads(chunk))
            chunks += len(data)
assert chunks > 100, chunks
print("ok")
