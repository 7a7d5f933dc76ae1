"""Compares docs/api.md with the requests of the installed clients of OpenAI and Anthropic: api_fields.py API.md

Every field of a request must be named in a section about that request.
"""
import re
import sys
import typing

from anthropic.types.message_count_tokens_params import MessageCountTokensParams
from anthropic.types.message_create_params import MessageCreateParamsBase
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsBase as CompletionParams
from openai.types.embedding_create_params import EmbeddingCreateParams
from openai.types.responses.response_create_params import ResponseCreateParamsBase

SECTIONS = {
    ChatParams: ["Requests", "Tools", "Reasoning", "Structured output"],
    CompletionParams: ["Requests", "Structured output", "Evaluation"],
    EmbeddingCreateParams: ["Embeddings and scores"],
    ResponseCreateParamsBase: ["Responses"],
    MessageCreateParamsBase: ["Messages"],
    MessageCountTokensParams: ["Messages"],
}

page = open(sys.argv[1]).read()
sections = {section.partition("\n")[0]: section for section in page.split("\n## ")}
missing, checked = [], 0
for request, titles in SECTIONS.items():
    text = "".join(sections[title] for title in titles)
    for field in typing.get_type_hints(request):
        checked += 1
        if not re.search(rf"`{field}[`=.\[ ]", text):
            missing.append(f"{request.__module__}: {field} in {' or '.join(titles)}")
assert checked > 100, checked
sys.exit("docs/api.md does not name these fields:\n" + "\n".join(missing) if missing else 0)
