"""An agent: the demo model calls functions of this program and answers from their results."""

import json
from datetime import date, timedelta

from dovetail import LLM, SamplingParams


def add(a: int, b: int) -> int:
    """Return the sum."""
    return a + b


def weekday(date_: str, days: int) -> str:
    """Return the weekday some days after a date."""
    return f"{date.fromisoformat(date_) + timedelta(days=days):%A}"


FUNCTIONS = {"add": add, "weekday": weekday}


def tool(name: str, description: str, **types: str) -> dict:
    """Return the definition of a function. types: the JSON type of each parameter."""
    properties = {key: {"type": kind} for key, kind in types.items()}
    schema = {"type": "object", "properties": properties, "required": list(types)}
    function = {"name": name, "description": description, "parameters": schema}
    return {"type": "function", "function": function}


TOOLS = [
    tool("add", "Add two numbers.", a="integer", b="integer"),
    tool("weekday", "Return a weekday some days after a date.", date="string", days="integer"),
]
PARAMS = SamplingParams(temperature=0, max_tokens=100)
QUESTIONS = ["What is 4728 + 1365?", "What day of the week is 40 days after 2026-11-23?"]

with LLM("demo") as llm:
    for question in QUESTIONS:
        print(f"question: {question}")
        messages = [{"role": "user", "content": question}]
        for _ in range(4):  # at most three rounds of calls
            (output,) = llm.chat(messages, PARAMS, tools=TOOLS)
            message = output.outputs[0].message
            messages.append(message.to_dict())
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                arguments = json.loads(call.arguments)
                result = FUNCTIONS[call.name](*arguments.values())
                print(f"call:     {call.name}({call.arguments}) -> {result}")
                messages.append(
                    {"role": "tool", "tool_call_id": call.id, "content": json.dumps(result)}
                )
        print(f"answer:   {message.content}\n")
