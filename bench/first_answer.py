"""Measure the time from a command to its first answer on the terminal.

    python bench/first_answer.py            `dovetail demo`
    python bench/first_answer.py --chat     `dovetail chat` with smollm2 (downloaded before)
    python bench/first_answer.py --clone    `make chat` in a new clone, with empty caches

Method: the command runs on a pseudo-terminal. A question is typed as soon as the command waits for
it. The clock runs from the start of the process to the first token of the answer (demo: to the end
of the first line with an answer). One run warms the page cache; then the median and spread of five
runs are printed. Python keeps its bytecode in .bench/bytecode, as an installed package does.
`--clone` runs once, and includes cloning, installation and downloads, without pip's cache.
"""

from __future__ import annotations

import argparse
import os
import pty
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

NUM_RUNS = 5
ROOT = Path(__file__).resolve().parents[1]
PROMPT, QUESTION = b"lists the commands.", "Name the capital of France.\n"
BYTECODE = {
    "PYTHONDONTWRITEBYTECODE": "",
    "PYTHONPYCACHEPREFIX": str(ROOT / ".bench" / "bytecode"),
}
"""Environment variables with which a command does not compile Python's modules at each start."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A command to measure.

    prompt: output after which `typed` is typed. answer: the first bytes of the answer. target_s:
    the maximum time.
    """

    title: str
    command: Sequence[str]
    answer: bytes
    target_s: float
    prompt: bytes = b""
    typed: str = ""
    env: Mapping[str, str] = field(default_factory=dict)


DEMO = Subject(
    title="dovetail demo",
    command=[str(Path(sys.executable).with_name("dovetail")), "demo"],
    answer=b"99 + 15 = 114",  # the demo's first question
    target_s=3.0,
    env=BYTECODE,
)
CHAT = Subject(
    title="dovetail chat --model smollm2",
    command=[
        str(Path(sys.executable).with_name("dovetail")),
        *("chat", "--model", "smollm2", "--temperature", "0"),
    ],
    answer=b"The",
    target_s=2.0,
    prompt=PROMPT,
    typed=QUESTION,
    env=BYTECODE,
)


def clone(folder: Path) -> Subject:
    """Return `make chat` in a new clone of this repository in `folder`, with empty caches."""
    steps = f'git clone --quiet "{ROOT}" "{folder}/clone" && cd "{folder}/clone" && make chat'
    return Subject(
        title="make chat in a new clone",
        command=["sh", "-c", steps],
        answer=b"The capital",
        target_s=180.0,
        prompt=PROMPT,
        typed=QUESTION,
        env={"XDG_CACHE_HOME": str(folder / "cache"), "PIP_NO_CACHE_DIR": "1"},
    )


def seconds_to_first_answer(subject: Subject) -> float:
    """Run the command until its first answer is on the screen, then terminate it.

    Raises RuntimeError with the last output if the command exits without an answer.
    """
    master, slave = pty.openpty()
    env = {**os.environ, **subject.env}
    begin = time.perf_counter()
    with subprocess.Popen(
        subject.command, stdout=slave, stderr=slave, stdin=slave, env=env, start_new_session=True
    ) as process:
        os.close(slave)
        try:
            _converse(subject, master)
            return time.perf_counter() - begin
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            os.close(master)


def _converse(subject: Subject, master: int) -> None:
    """Read the output up to the answer. Type the question after the prompt."""
    seen, is_typed = b"", False
    while subject.answer not in seen:
        piece = _read(master)
        if not piece:
            end = seen[-400:].decode(errors="replace")
            raise RuntimeError(f"{subject.title} exited without an answer: {end}")
        seen += piece
        if subject.prompt in seen and not is_typed:
            os.write(master, subject.typed.encode())
            is_typed = True


def _read(master: int) -> bytes:
    """Return output of the terminal, or b"" after its last process has exited."""
    try:
        return os.read(master, 4096)
    except OSError:  # EIO: on Linux, the end of a pseudo-terminal
        return b""


def report(subject: Subject, runs: Sequence[float]) -> bool:
    """Print the median and the spread. Return whether the target is met."""
    median, is_met = statistics.median(runs), statistics.median(runs) <= subject.target_s
    print(f"first answer of `{subject.title}`: {median:.2f} s ({min(runs):.2f}–{max(runs):.2f})")
    print(f"target {subject.target_s} s: {is_met}")
    return is_met


def main() -> int:
    """Print the results. Return 1 if the target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chat", action="store_true", help="measure `dovetail chat`")
    parser.add_argument("--clone", action="store_true", help="measure `make chat` in a new clone")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the command
    if args.clone:
        with tempfile.TemporaryDirectory() as folder:
            subject = clone(Path(folder))
            return 1 - report(subject, [seconds_to_first_answer(subject)])
    subject = CHAT if args.chat else DEMO
    seconds_to_first_answer(subject)
    return 1 - report(subject, [seconds_to_first_answer(subject) for _ in range(NUM_RUNS)])


if __name__ == "__main__":
    raise SystemExit(main())
