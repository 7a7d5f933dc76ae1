"""Embeds texts with the OpenAI client, unmodified, and compares the vectors with those of transformers.

Usage: openai_embeddings.py http://HOST:PORT golden.json
Prints "ok" at the end; any difference from what the client expects is an exception.
"""

import json
import sys

import openai

client = openai.OpenAI(base_url=sys.argv[1] + "/v1", api_key="unused", timeout=60, max_retries=0)
model = client.models.list().data[0].id
golden = json.load(open(sys.argv[2]))["qwen3_embedding"]
texts = [row["text"] for row in golden]

# The client asks for base64 where the caller names no format, and decodes it.
for options in ({}, {"encoding_format": "float"}):
    answer = client.embeddings.create(model=model, input=texts, **options)
    assert answer.usage.prompt_tokens == sum(len(row["tokens"]) for row in golden), answer.usage
    assert [entry.index for entry in answer.data] == list(range(len(texts)))
    for entry, row in zip(answer.data, golden):
        worst = max(abs(a - b) for a, b in zip(entry.embedding, row["embedding"], strict=True))
        assert worst < 1e-5, (row["text"], worst)

one = client.embeddings.create(model=model, input=golden[0]["tokens"], user="me", encoding_format="float")
assert one.data[0].embedding == answer.data[0].embedding, "texts and their token ids have equal vectors"

for call in (
    lambda: client.embeddings.create(model=model, input=[]),
    lambda: client.embeddings.create(model=model, input="a", dimensions=8),
    lambda: client.embeddings.create(model=model, input=["a", "x" * 9000]),
):
    try:
        call()
    except openai.BadRequestError as error:
        assert error.body["message"], error
    else:
        raise AssertionError("a bad request was accepted")
print("ok")
