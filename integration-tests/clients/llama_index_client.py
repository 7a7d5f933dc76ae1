"""Uses LlamaIndex with a server in the style of OpenAI. Usage: llama_index_client.py http://HOST:PORT"""

import sys

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

llm = OpenAILike(model="smollm2-135m", api_base=sys.argv[1] + "/v1", api_key="unused", temperature=0, max_tokens=32,
                 is_chat_model=True, is_function_calling_model=True, context_window=8192, max_retries=0)
question = [ChatMessage(role="user", content="What is the capital of France? Answer in one sentence.")]
whole = llm.chat(question)
assert "Paris" in whole.message.content, whole
assert "".join(part.delta or "" for part in llm.stream_chat(question)) == whole.message.content
print("ok")
