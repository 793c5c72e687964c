"""Other programs work with the server: litellm, langchain-openai, instructor, pydantic-ai and
openai in Node, and schemathesis.

Each is installed in a separate folder, outside of the tree, from the package registries. Without
them the test is skipped, with the reason.
"""

import subprocess
import venv

import pytest

pytestmark = pytest.mark.soak

INSTALL_S, RUN_S = 900, 120
SCHEMATHESIS_S = 600
UNSUITED_CHECKS = ("positive_data_acceptance",)
"""A document cannot state the vocabulary, the model's length and which fields contradict others."""
LITELLM = """
import sys, litellm
given = {"model": "openai/demo", "api_base": sys.argv[1], "api_key": "any", "max_tokens": 8,
         "messages": [{"role": "user", "content": "Anna"}], "temperature": 0}
whole = litellm.completion(**given).choices[0].message.content
pieces = litellm.completion(stream=True, **given)
assert "".join(p.choices[0].delta.content or "" for p in pieces) == whole and whole
try:
    litellm.completion(**{**given, "temperature": -1})
except litellm.BadRequestError:
    print("done")
"""
LANGCHAIN = """
import sys
from langchain_openai import ChatOpenAI
from openai import BadRequestError
given = {"model": "demo", "base_url": sys.argv[1], "api_key": "any", "max_tokens": 8}
chat = ChatOpenAI(temperature=0, **given)
whole = chat.invoke("Anna")
assert whole.content and whole.usage_metadata["output_tokens"]
assert "".join(piece.content for piece in chat.stream("Anna")) == whole.content
try:
    ChatOpenAI(temperature=-1, **given).invoke("Anna")
except BadRequestError:
    print("done")
"""
INSTRUCTOR = """
import sys
import instructor
from openai import OpenAI
from pydantic import BaseModel

class Person(BaseModel):
    name: str
    age: int

base = OpenAI(base_url=sys.argv[1], api_key="any", max_retries=0)
given = {"model": "demo", "temperature": 0, "max_tokens": 100, "max_retries": 0,
         "messages": [{"role": "user", "content": "Write this as JSON: name Yuki, age 7"}]}
for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(base, mode=mode)
    found = client.chat.completions.create(response_model=Person, **given)
    assert isinstance(found, Person)
client = instructor.from_openai(base, mode=instructor.Mode.TOOLS)
parts = list(client.chat.completions.create_partial(response_model=Person, **given))
assert parts[-1].age is not None
print("done")
"""
PYDANTIC_AI = """
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
    'Add two numbers.'
    seen.append((a, b))
    return a + b
result = agent.run_sync("What is 1234 + 4321?")
assert seen == [(1234, 4321)] and result.output == "1234 + 4321 = 5555."
print("done")
"""
JAVASCRIPT = """
import OpenAI from "openai";
const client = new OpenAI({ baseURL: process.argv[2], apiKey: "any", maxRetries: 0 });
const given = { model: "demo", max_tokens: 8, temperature: 0,
                messages: [{ role: "user", content: "Anna" }] };
const whole = (await client.chat.completions.create(given)).choices[0].message.content;
let text = "";
for await (const part of await client.chat.completions.create({ ...given, stream: true }))
  text += part.choices[0]?.delta?.content ?? "";
if (!whole || text !== whole) throw new Error(`${text} is not ${whole}`);
try {
  await client.chat.completions.create({ ...given, temperature: -1 });
} catch (error) {
  if (error instanceof OpenAI.BadRequestError && error.param === "temperature") console.log("done");
}
"""


def install(*command, folder):
    """Run a package manager. Skip the test with its reason if it fails."""
    try:
        completed = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=INSTALL_S, check=False
        )
    except (FileNotFoundError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"the client cannot be installed: {error}")
    if completed.returncode:
        pytest.skip(f"the client cannot be installed: {completed.stderr.strip()[-300:]}")


def check_program(command, server):
    address = f"http://{server.host}:{server.port}/v1"
    completed = subprocess.run(
        [*command, address], capture_output=True, text=True, timeout=RUN_S, check=False
    )
    assert completed.returncode == 0 and completed.stdout.endswith("done\n"), completed.stderr


@pytest.mark.timeout(INSTALL_S + RUN_S)
@pytest.mark.parametrize(
    ("package", "program"),
    [
        ("litellm", LITELLM),
        ("langchain-openai", LANGCHAIN),
        ("instructor", INSTRUCTOR),
        ("pydantic-ai-slim[openai]", PYDANTIC_AI),
    ],
)
def test_a_python_client_works_unchanged(server, tmp_path, package, program):
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    install(python, "-m", "pip", "install", "-q", package, folder=tmp_path)
    check_program([python, "-c", program], server)


@pytest.mark.timeout(INSTALL_S + 2 * SCHEMATHESIS_S)
def test_schemathesis_finds_no_failure(server, tmp_path):
    """Valid and invalid requests, from the OpenAPI document of the server."""
    venv.create(tmp_path / "venv", with_pip=True)
    programs = tmp_path / "venv" / "bin"
    install(programs / "python", "-m", "pip", "install", "-q", "schemathesis", folder=tmp_path)
    expected = server.complete(prompt="Anna").json["choices"]
    command = [
        *(programs / "schemathesis", "run", f"http://{server.host}:{server.port}/openapi.json"),
        *("--checks", "all", "--exclude-checks", ",".join(UNSUITED_CHECKS)),
        *("--phases", "coverage,fuzzing", "--mode", "all", "--continue-on-failure"),
        *("--max-examples", "500", "--max-time", str(SCHEMATHESIS_S), "--seed", "1"),
    ]
    completed = subprocess.run(
        command,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=2 * SCHEMATHESIS_S,
        check=False,
    )
    assert completed.returncode == 0, completed.stdout[-5000:]
    assert server.complete(prompt="Anna").json["choices"] == expected


@pytest.mark.timeout(INSTALL_S + RUN_S)
def test_the_javascript_client_works_unchanged(server, tmp_path):
    install("npm", "install", "--no-audit", "--no-fund", "--silent", "openai", folder=tmp_path)
    program = tmp_path / "client.mjs"
    program.write_text(JAVASCRIPT)
    check_program(["node", program], server)
