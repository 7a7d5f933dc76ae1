"""Extracts a model of pydantic with Instructor. Usage: instructor_client.py http://HOST:PORT"""

import sys
from typing import Literal

import instructor
import openai
from pydantic import BaseModel, ConfigDict, Field


class Trip(BaseModel):
    model_config = ConfigDict(extra="forbid")
    city: Literal["Paris", "Rome"]
    days: int = Field(ge=1, le=9)


client = openai.OpenAI(base_url=sys.argv[1] + "/v1", api_key="unused", timeout=60)
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    trip = instructor.from_openai(client, mode=mode).chat.completions.create(
        model="smollm2-135m", response_model=Trip, max_retries=0, max_tokens=100, temperature=0,
        messages=[{"role": "user", "content": "Three days in Rome."}],
    )
    assert isinstance(trip, Trip), (mode, trip)
print("ok")
