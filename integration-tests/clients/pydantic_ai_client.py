"""Runs an agent of Pydantic AI, whose output a grammar forces. Usage: pydantic_ai_client.py http://HOST:PORT"""

import sys
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


class Trip(BaseModel):
    city: Literal["Paris", "Rome"]


provider = OpenAIProvider(base_url=sys.argv[1] + "/v1", api_key="unused")
model = OpenAIChatModel("smollm2-135m", provider=provider)
for output in (ToolOutput(Trip), NativeOutput(Trip)):
    agent = Agent(model, output_type=output, model_settings={"max_tokens": 100, "temperature": 0})
    ran = agent.run_sync("A trip to Rome.")
    assert isinstance(ran.output, Trip) and ran.usage.output_tokens > 0, ran
print("ok")
