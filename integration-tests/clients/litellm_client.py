"""Calls a Baton router through LiteLLM, as an OpenAI and as an Anthropic server. Usage: litellm_client.py http://HOST:PORT"""

import os
import sys

# Without it LiteLLM fetches prices.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import litellm  # noqa: E402

base = sys.argv[1]
litellm.suppress_debug_info = True
messages = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
for server in [
    {"model": "openai/smollm2-135m", "api_base": base + "/v1"},
    {"model": "anthropic/smollm2-135m", "api_base": base},
]:
    asked = dict(**server, api_key="unused", messages=messages, max_tokens=32, temperature=0)
    whole = litellm.completion(**asked)
    assert "Paris" in whole.choices[0].message.content and whole.choices[0].finish_reason == "stop", whole
    assert whole.usage.completion_tokens > 3, whole
    chunks = list(litellm.completion(**asked, stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content, chunks
print("ok")
