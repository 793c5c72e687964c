"""The agent of agent_loop.py through OpenAI's client.

    python examples/agent_over_http.py [URL]

URL is the address of a server's API, such as http://127.0.0.1:8000/v1; without it, the program
starts a server for itself.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date, timedelta
from pathlib import Path

from openai import APIConnectionError, OpenAI

FUNCTIONS = {
    "add": lambda a, b: a + b,
    "weekday": lambda date_, days: f"{date.fromisoformat(date_) + timedelta(days=days):%A}",
}
NUMBER, TEXT = {"type": "integer"}, {"type": "string"}
PARAMETERS = {"add": {"a": NUMBER, "b": NUMBER}, "weekday": {"date": TEXT, "days": NUMBER}}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": arguments, "required": list(arguments)},
        },
    }
    for name, arguments in PARAMETERS.items()
]
QUESTIONS = ["What is 4728 + 1365?", "What day of the week is 40 days after 2026-11-23?"]


@contextmanager
def server() -> Iterator[str]:
    """Start a server with the demo model on a free port. Yield its address."""
    command = [Path(sys.executable).with_name("dovetail"), "serve", "--model", "demo"]
    process = subprocess.Popen([*command, "--port", "0"], stderr=subprocess.PIPE, text=True)
    try:
        for line in process.stderr or ():
            if ready := re.search(r"Ready: .* on (http\S+)", line):
                yield ready[1]
                break
            sys.stderr.write(line)
        else:
            raise SystemExit("The server did not start.")
    finally:
        process.terminate()
        process.communicate()


def answer(client: OpenAI, question: str) -> None:
    """Answer a question. Call the functions that the model requests."""
    messages = [{"role": "user", "content": question}]
    for _ in range(4):  # at most three rounds of calls
        kwargs = {"model": "demo", "messages": messages, "tools": TOOLS, "temperature": 0}
        message = client.chat.completions.create(**kwargs).choices[0].message
        messages.append(message.to_dict())
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            arguments = json.loads(call.function.arguments)
            result = FUNCTIONS[call.function.name](*arguments.values())
            print(f"call:     {call.function.name}({call.function.arguments}) -> {result}")
            messages.append(
                {"role": "tool", "tool_call_id": call.id, "content": json.dumps(result)}
            )
    print(f"answer:   {message.content}\n")


def main(address: str) -> None:
    """Answer all questions. address: the address of a server's API."""
    client = OpenAI(base_url=address, api_key="any")
    try:
        for question in QUESTIONS:
            print(f"question: {question}")
            answer(client, question)
    except APIConnectionError as error:
        sys.exit(f"No connection to {address}: {error.__cause__ or error}")


if sys.argv[1:]:
    main(sys.argv[1])
else:
    with server() as own_address:
        main(own_address)
