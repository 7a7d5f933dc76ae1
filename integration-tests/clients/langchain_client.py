"""Uses LangChain with OpenAI's and Anthropic's API. Usage: langchain_client.py http://HOST:PORT"""

import sys
from typing import Literal

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

base = sys.argv[1]


@tool
def weather(city: Literal["Paris", "Rome"]) -> str:
    """The weather in a city."""
    return f"rain in {city}"


asked = dict(model="smollm2-135m", api_key="unused", max_tokens=100, timeout=60, max_retries=0)
for chat in (ChatOpenAI(base_url=base + "/v1", **asked), ChatAnthropic(base_url=base, **asked)):
    question = HumanMessage("What is the weather in Rome?")
    called = chat.bind_tools([weather], tool_choice="weather").invoke([question])
    (call,) = called.tool_calls
    assert call["name"] == "weather" and call["args"]["city"] in ("Paris", "Rome"), called
    result = weather.invoke(call)
    assert isinstance(result, ToolMessage), result
    answer = chat.invoke([question, called, result])
    assert answer.text and answer.usage_metadata["output_tokens"] > 0, answer
    streamed = "".join(chunk.text for chunk in chat.stream("What is the capital of France?"))
    assert streamed, chat
print("ok")
