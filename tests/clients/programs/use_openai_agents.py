"""Runs agents of openai-agents: tools, streams, output types, handoffs and stored responses.

Both of its models are used: the one for the Responses API and the one for chat completions.
"""

import asyncio
import sys

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI, BadRequestError
from pydantic import BaseModel

SUM, ANSWER = "What is 1234 + 4321?", "1234 + 4321 = 5555."
SETTINGS = ModelSettings(temperature=0, max_tokens=64)


class Person(BaseModel):
    name: str
    age: int


async def check(model):
    seen = []

    @function_tool
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        seen.append((a, b))
        return a + b

    agent = Agent(name="adder", model=model, model_settings=SETTINGS, tools=[add])
    assert (await Runner.run(agent, SUM)).final_output == ANSWER
    streamed, text = Runner.run_streamed(agent, SUM), ""
    async for event in streamed.stream_events():
        if event.type == "raw_response_event" and event.data.type.endswith("output_text.delta"):
            text += event.data.delta
    assert text == streamed.final_output == ANSWER and seen == [(1234, 4321)] * 2
    writer = Agent(name="writer", model=model, model_settings=SETTINGS, output_type=Person)
    result = await Runner.run(writer, "Write this as JSON: name Yuki, age 7")
    assert result.final_output == Person(name="Yuki", age=7)
    forced = ModelSettings(temperature=0, max_tokens=64, tool_choice="required")
    helper = Agent(name="helper", model=model, model_settings=SETTINGS)
    first = Agent(name="first", model=model, model_settings=forced, handoffs=[helper])
    assert (await Runner.run(first, "What is 27 + 58?")).last_agent is helper
    invalid = ModelSettings(temperature=-1)
    try:
        await Runner.run(Agent(name="invalid", model=model, model_settings=invalid), "Anna")
    except BadRequestError as error:
        assert error.param == "temperature"
    else:
        raise AssertionError("an invalid temperature is accepted")


async def check_stored(model):
    agent = Agent(name="plain", model=model, model_settings=SETTINGS)
    first = await Runner.run(agent, "What is 27 + 58?")
    second = await Runner.run(
        agent, "What is 99 + 15?", previous_response_id=first.last_response_id
    )
    assert (first.final_output, second.final_output) == ("27 + 58 = 85.", "99 + 15 = 114.")
    sizes = [result.raw_responses[0].usage.input_tokens for result in (first, second)]
    assert sizes[0] < sizes[1]


async def main():
    set_tracing_disabled(True)
    async with AsyncOpenAI(base_url=sys.argv[1], api_key="any", max_retries=0) as client:
        await check(OpenAIResponsesModel("demo", client))
        await check(OpenAIChatCompletionsModel("demo", client))
        await check_stored(OpenAIResponsesModel("demo", client))
    print("done")


asyncio.run(main())
