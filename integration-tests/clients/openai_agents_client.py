"""Runs an agent of the OpenAI Agents SDK with chat completions and with responses.

Usage: openai_agents_client.py http://HOST:PORT
The first turn must call the tool; the second turn answers with text.
"""

import sys
from typing import Literal

import openai
from agents import (Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool,
                    set_tracing_disabled)

set_tracing_disabled(True)
client = openai.AsyncOpenAI(base_url=sys.argv[1] + "/v1", api_key="unused", timeout=60, max_retries=0)
for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
    cities = []

    @function_tool
    def weather(city: Literal["Paris", "Rome"]) -> str:
        """The weather in a city."""
        cities.append(city)
        return "rain"

    agent = Agent(
        name="weather", instructions="Be brief.", tools=[weather], model=kind("smollm2-135m", client),
        model_settings=ModelSettings(tool_choice="required", max_tokens=60, parallel_tool_calls=False),
    )
    ran = Runner.run_sync(agent, "What is the weather in Rome?", max_turns=3)
    assert len(cities) == 1 and isinstance(ran.final_output, str), (kind, cities, ran)
print("ok")
