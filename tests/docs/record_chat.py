"""Writes a conversation with SmolLM2 into the README: `python tests/docs/record_chat.py`.

`dovetail chat` runs in a pseudo-terminal of 100 columns, with greedy sampling. With `--time`, the
script instead prints the time from the command to the first token, and the time of `import torch`;
use it on an idle machine.
"""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from statistics import median

README = Path(__file__).resolve().parents[2] / "README.md"
BEGIN, END = "<!-- recorded: dovetail chat -->", "<!-- end of chat -->"
QUESTIONS = (
    "Name the capital of France.",
    "What is it famous for? Answer in one sentence.",
    "Why do leaves fall in autumn?",
)
OPTIONS = ("--temperature", "0", "--max-tokens", "60")
NUM_RUNS = 3
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\r")
_PROMPT = "\n> "


def command(model: str) -> list[str]:
    program = str(Path(sys.executable).with_name("dovetail"))
    return [program, "chat", "--model", model, "--served-model-name", "smollm2", *OPTIONS]


def record(model: str = "smollm2") -> str:
    """Return the conversation as a terminal shows it, without the commands' own messages."""
    environment = {**os.environ, "COLUMNS": "100", "TERM": "dumb", "NO_COLOR": "1"}
    parent, child = pty.openpty()
    process = subprocess.Popen(
        command(model), stdin=child, stdout=child, stderr=subprocess.DEVNULL, env=environment
    )
    os.close(child)
    text = ""
    try:
        for question in QUESTIONS:
            text = _read_until_prompt(parent, text)
            os.write(parent, f"{question}\n".encode())
        text = _read_until_prompt(parent, text)
    finally:
        process.kill()
        process.wait()
        os.close(parent)
    return text.removesuffix(_PROMPT).strip()


def _read_until_prompt(terminal: int, text: str) -> str:
    """Return `text` with the output up to the next prompt."""
    text += "\n" if not text else ""
    length = len(text)
    while not (text.endswith(_PROMPT) and len(text) > length):
        text += _ESCAPES.sub("", os.read(terminal, 4096).decode("utf-8"))
    return text


def seconds_to_output(arguments: list[str], question: str = "") -> float:
    """Return the time from the start of a command to its first byte of output."""
    start, pipe = time.monotonic(), subprocess.PIPE
    writes_bytecode = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
    with subprocess.Popen(
        arguments, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=writes_bytecode
    ) as process:
        process.stdin.write(question.encode())
        process.stdin.close()
        process.stdout.read(1)
        passed = time.monotonic() - start
        process.stdout.read()
    return passed


def measure(model: str = "smollm2") -> tuple[float, float]:
    """Return the median times to the first token and to the end of `import torch`."""
    torch_import = [sys.executable, "-c", "import torch; print()"]
    first, imported = [], []
    for _ in range(NUM_RUNS):
        first.append(seconds_to_output(command(model), f"{QUESTIONS[0]}\n"))
        imported.append(seconds_to_output(torch_import))
    return median(first), median(imported)


def page_text(conversation: str) -> str:
    """Return the conversation in lines of at most 100 characters."""
    lines = (textwrap.fill(line, 100) for line in conversation.splitlines())
    return "\n".join(line.rstrip() for line in lines)


def recorded() -> str:
    """Return the conversation in the README."""
    _, _, rest = README.read_text("utf-8").partition(f"{BEGIN}\n```\n")
    return rest.partition("\n```\n")[0].partition("\n")[2]


def main() -> None:
    """Write the conversation between its marks in the README, or print the times."""
    if "--time" in sys.argv[1:]:
        first, imported = measure()
        print(f"first token {first:.1f} s, import of torch {imported:.1f} s after the command")
        return
    text = README.read_text("utf-8")
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    block = f"```\n$ dovetail chat --model smollm2 {' '.join(OPTIONS)}\n{page_text(record())}\n```"
    README.write_text(f"{head}{BEGIN}\n{block}\n{END}{tail}", "utf-8")


if __name__ == "__main__":
    main()
