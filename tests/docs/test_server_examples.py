"""The commands in docs/server.md and docs/client_tools.md and the program in server.md run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from docs.record_server import serving

DOCS = Path(__file__).resolve().parents[2] / "docs"
PROGRAMS = Path(sys.executable).parent
ADDRESS = "127.0.0.1:8000"
SHORTER = {
    ADDRESS: "{address}",
    "dovetail complete": "dovetail complete --url http://{address}",
    "dovetail top": "dovetail top --once",
    "--request-rate 1:8:4 --num-prompts 200": "--request-rate 20:40:2 --num-prompts 8",
    "--duration-s 30": "--duration-s 1",
}
"""Replacements in a command, so that it ends soon and finds the server of the test."""
_COMMAND = re.compile(r"^(?:\$ | {4})((?:dovetail|curl) (?:.*\\\n)*.*)$", re.MULTILINE)
_OUTPUT = re.compile(r"(?:--html|--json|--perfetto) (\S+)")


def commands() -> list[str]:
    """Return the commands of the pages, except those that start the server."""
    texts = [(DOCS / name).read_text("utf-8") for name in ("server.md", "client_tools.md")]
    listed = [command for text in texts for command in _COMMAND.findall(text)]
    return [command for command in listed if not command.startswith("dovetail serve")]


@pytest.fixture(scope="module")
def address():
    with serving("demo") as running:
        yield running


@pytest.fixture
def folder(tmp_path):
    """Return a directory with the files that the examples read."""
    body = {"prompt": "Anna", "max_tokens": 4}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    (tmp_path / "requests.jsonl").write_text(json.dumps(line))
    chat = line | {"url": "/v1/chat/completions"}
    chat["body"] = {"messages": [{"role": "user", "content": "What is 27 + 58?"}]}
    (tmp_path / "lines.jsonl").write_text(json.dumps(chat))
    (tmp_path / "key.txt").write_text("a-key\n")
    return tmp_path


def run(command: str, folder: Path) -> str:
    environment = os.environ | {"PATH": f"{PROGRAMS}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["sh", "-c", command],
        cwd=folder,
        env=environment,
        input="What is 27 + 58?\n",
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_pages_have_an_example_of_each_command():
    names = {command.split()[0 if command.startswith("curl") else 1] for command in commands()}
    assert names == {"curl", "complete", "chat", "bench", "top", "trace", "run-batch"}


@pytest.mark.costly
@pytest.mark.sampled(4)
@pytest.mark.parametrize("command", commands(), ids=lambda command: command[:60])
def test_a_documented_command_runs(command, address, folder):
    if "run.log" in command:
        run('dovetail generate --model demo --decision-log run.log "Anna"', folder)
    for text, replacement in SHORTER.items():
        command = command.replace(text, replacement.format(address=address))
    printed = run(command, folder)
    files = _OUTPUT.findall(command) or re.findall(r"records\.jsonl", command)
    assert printed.strip() or files
    assert [name for name in files if not (folder / name).stat().st_size] == []


@pytest.mark.costly
def test_the_program_that_executes_a_batch_prints_its_records(address, folder):
    pytest.importorskip("openai")
    (program,) = re.findall(
        r"^```python\n(.*?)^```$", (DOCS / "server.md").read_text("utf-8"), re.MULTILINE | re.DOTALL
    )
    (folder / "program.py").write_text(program.replace(ADDRESS, address))
    record = json.loads(run("python program.py", folder))
    assert record["custom_id"] == "a" and record["response"]["status_code"] == 200
