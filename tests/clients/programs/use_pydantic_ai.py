"""Runs agents of pydantic-ai: output types and a tool."""

import sys

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


class Person(BaseModel):
    name: str
    age: int


model = OpenAIChatModel("demo", provider=OpenAIProvider(base_url=sys.argv[1], api_key="any"))
settings = {"temperature": 0, "max_tokens": 100}
for kind in (Person, NativeOutput(Person)):
    agent = Agent(model, output_type=kind, model_settings=settings, retries=0)
    found = agent.run_sync("Write this as JSON: name Yuki, age 7").output
    assert isinstance(found, Person)
agent = Agent(model, model_settings=settings)
seen = []


@agent.tool_plain
def add(a: int, b: int) -> int:
    "Add two numbers."
    seen.append((a, b))
    return a + b


result = agent.run_sync("What is 1234 + 4321?")
assert seen == [(1234, 4321)] and result.output == "1234 + 4321 = 5555."
print("done")
