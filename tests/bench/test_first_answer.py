"""`bench/first_answer.py` with shell commands instead of the program."""

import os
import subprocess
import sys

import first_answer
import pytest
from first_answer import Subject


def test_the_clock_stops_at_the_answer_to_the_typed_question():
    script = "echo Type; read question; sleep 0.2; echo The answer to $question; sleep 60"
    subject = Subject(
        title="t",
        command=["sh", "-c", script],
        answer=b"The answer",
        target_s=9.0,
        prompt=b"Type",
        typed="why\n",
    )
    assert 0.2 <= first_answer.seconds_to_first_answer(subject) < 30


def test_the_output_of_a_command_that_ends_without_an_answer_is_in_the_error():
    subject = Subject(title="t", command=["sh", "-c", "echo failed"], answer=b"x", target_s=9.0)
    with pytest.raises(RuntimeError, match="t exited without an answer: failed"):
        first_answer.seconds_to_first_answer(subject)


def test_the_median_is_compared_with_the_target(capsys):
    subject = Subject(title="t", command=[], answer=b"", target_s=2.0)
    assert first_answer.report(subject, [9.0, 1.0, 2.0])
    assert not first_answer.report(subject, [2.1, 1.0, 3.0])
    assert "first answer of `t`: 2.00 s (1.00–9.00)" in capsys.readouterr().out


@pytest.mark.parametrize("subject", [first_answer.DEMO, first_answer.CHAT])
def test_commands_write_bytecode_to_the_directory_of_the_benchmarks(subject):
    program = "import sys; print(sys.dont_write_bytecode, sys.pycache_prefix)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **subject.env},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["False", str(first_answer.ROOT / ".bench" / "bytecode")]
