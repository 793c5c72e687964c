"""Writes the server section of the README: `python tests/docs/record_server.py`.

The script starts `dovetail serve --model smollm2` on a free port, runs the commands of the section
(curl, and the program with the package openai), and writes their output.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

README = Path(__file__).resolve().parents[2] / "README.md"
BEGIN, END = "<!-- recorded: dovetail serve -->", "<!-- end of serve -->"
ADDRESS = "127.0.0.1:8000"
"""The address in the section; the recorder replaces it."""
CURL = """\
curl -s http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\
    -d '{"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}'"""
PROGRAM = """\
from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
stream = client.chat.completions.create(
    model="smollm2",
    messages=[{"role": "user", "content": "Name the capital of France."}],
    temperature=0,
    max_tokens=40,
    stream=True,
)
for event in stream:
    print(event.choices[0].delta.content or "", end="", flush=True)
print()
"""
_READY = re.compile(r"http://(\S+:\d+)/v1")
CHANGING = ("id", "created")
"""Fields of a response that differ in each run."""


@contextmanager
def serving(model: str) -> Iterator[str]:
    """Run a server, and yield its address."""
    program = str(Path(sys.executable).with_name("dovetail"))
    options = ["--model", model, "--served-model-name", "smollm2", "--port", "0"]
    process = subprocess.Popen(
        [program, "serve", *options], stderr=subprocess.PIPE, text=True, bufsize=1
    )
    assert process.stderr is not None
    try:
        actual = next(filter(None, map(_READY.search, process.stderr)))
        yield actual[1]
    finally:
        process.terminate()
        process.communicate()


def record(model: str = "smollm2") -> str:
    """Return the text of the section."""
    with serving(model) as address:
        response = _run(["bash", "-c", CURL.replace(ADDRESS, address)])
        streamed = _run([sys.executable, "-c", PROGRAM.replace(ADDRESS, address)])
    fields = json.loads(response) | dict.fromkeys(CHANGING, "…")
    spaced = json.dumps(fields, ensure_ascii=False)
    shown = "\n".join(textwrap.wrap(spaced, 100, break_on_hyphens=False))
    return (
        f"```\n$ dovetail serve --model smollm2 &\n$ {CURL}\n{shown}\n```\n\n"
        f"```python\n{PROGRAM}```\n\n```\n{textwrap.fill(streamed, 100)}\n```\n"
    )


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return done.stdout.strip()


def recorded() -> str:
    """Return the section in the README."""
    return README.read_text("utf-8").partition(f"{BEGIN}\n")[2].partition(END)[0]


def main() -> None:
    """Write the section between its marks in the README."""
    text = README.read_text("utf-8")
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    README.write_text(f"{head}{BEGIN}\n{record()}{END}{tail}", "utf-8")


if __name__ == "__main__":
    main()
