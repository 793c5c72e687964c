"""`dovetail chat`: streaming, history, commands, Ctrl-C and long conversations."""

from __future__ import annotations

import io
import os
import pty
import select
import signal
import subprocess
import sys
import time

import pytest

from dovetail import LLMEngine, SamplingParams
from dovetail.cli import main
from dovetail.cli.chat_session import ChatSession
from dovetail.cli.engine_options import EngineOptions, engine_args
from dovetail.cli.sampling_options import with_settings
from dovetail.cli.terminal import read_message
from dovetail.entrypoints.interrupts import watch_for_interrupt

PATIENCE_S = 20
TYPING_PAUSE_S = 0.4
ON_TERMINAL = (  # runs in the new process, so that no code runs between fork and exec
    "import fcntl, signal, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0);"
    # A suite started in the background inherits an ignored SIGINT.
    "signal.signal(signal.SIGINT, signal.default_int_handler);"
    "from dovetail.cli import main; sys.exit(main(sys.argv[1:]))"
)


def converse(monkeypatch, options, *lines: str) -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    return main(["chat", *options])


@pytest.fixture
def session(spell):
    engines = []

    def make(text: str = "abc", *, system: str = "", length: int = 4096, **speller) -> ChatSession:
        words = spell(text, length=length, **speller)
        names = [word.removeprefix("--").replace("-", "_") for word in words[::2]]
        options = EngineOptions(**dict(zip(names, words[1::2], strict=True)))
        engines.append(LLMEngine.from_engine_args(engine_args(options)))
        params = SamplingParams(temperature=0.0, max_tokens=32)
        return ChatSession(engines[-1], params, system=system)

    yield make
    for engine in engines:
        engine.shutdown()


def never() -> bool:
    return False


def after(count: int):
    """Return a predicate that is true from its `count`-th call on."""
    requested = []
    return lambda: bool(requested.append(None)) or len(requested) >= count


def test_only_outputs_are_written_to_a_pipe(spell, monkeypatch, capsys) -> None:
    assert converse(monkeypatch, spell("abc"), "hello", "", "again") == 0
    output = capsys.readouterr()
    assert (output.out, output.err) == ("abc\nabc\n", "")


def test_the_chat_history_is_kept_until_it_is_reset(session) -> None:
    chat = session(system="Be brief.")
    assert list(chat.answer("one", interrupted=never)) == ["a", "b", "c", ""]
    assert "".join(chat.answer("two", interrupted=never)) == "abc"
    assert [message["content"] for message in chat.messages] == ["one", "abc", "two", "abc"]
    assert [message["role"] for message in chat.messages] == ["user", "assistant"] * 2
    chat.reset()
    assert chat.messages == []


def test_the_model_receives_the_system_prompt_and_the_history(session, monkeypatch) -> None:
    chat = session(system="Be brief.")
    seen = []
    add_request = LLMEngine.add_request

    def spy(self, request_id, prompt, *rest, **options):
        seen.append(bytes(prompt["prompt_token_ids"]).decode())
        return add_request(self, request_id, prompt, *rest, **options)

    monkeypatch.setattr(LLMEngine, "add_request", spy)
    list(chat.answer("one", interrupted=never))
    list(chat.answer("two", interrupted=never))
    assert seen == [
        "system: Be brief.\nuser: one\nassistant: ",
        "system: Be brief.\nuser: one\nassistant: abc\nuser: two\nassistant: ",
    ]


def test_a_partial_character_is_not_printed(session) -> None:
    chat = session("aé€𝄞b")
    pieces = list(chat.answer("hello", interrupted=never))
    assert "".join(pieces) == "aé€𝄞b"
    assert not any("\ufffd" in piece for piece in pieces)
    for limit, whole in ((2, "a"), (3, "aé"), (5, "aé"), (9, "aé€"), (10, "aé€𝄞")):
        chat.reset()
        chat.params = SamplingParams(temperature=0.0, max_tokens=limit)
        assert "".join(chat.answer("hello", interrupted=never)) == whole
        assert chat.messages[-1]["content"] == whole


def test_an_interrupted_response_is_kept_in_the_chat_history(session) -> None:
    chat = session("abcdefgh", loop=True)
    partial = "".join(chat.answer("one", interrupted=after(3)))
    assert partial == "abc"
    assert chat.messages[-1] == {"role": "assistant", "content": "abc"}
    assert "".join(chat.answer("two", interrupted=never)).startswith("abcdefgh abc")
    assert len(chat.messages) == 4


def test_closing_the_stream_of_a_response_aborts_its_request(session) -> None:
    chat = session("abcdefgh", loop=True)
    response = chat.answer("one", interrupted=never)
    assert next(response) == "a"
    response.close()
    assert chat.messages[-1]["content"] == "a"
    assert "".join(chat.answer("two", interrupted=after(2))) == "ab"


def test_the_oldest_turns_of_a_long_chat_are_dropped_first(session) -> None:
    chat = session("abc", length=128)
    for number in range(8):
        list(chat.answer(f"question {number}", interrupted=never))
    dropped = chat.num_dropped
    assert dropped == 2
    assert chat.messages[0]["role"] == "user"
    assert chat.messages[-2]["content"] == "question 7"
    assert len(chat.messages) < 16


def test_dropped_turns_of_a_chat_are_reported(spell, monkeypatch, capsys) -> None:
    lines = [f"a longer question {number}" for number in range(5)]
    assert converse(monkeypatch, spell("abc", length=128), *lines) == 0
    output = capsys.readouterr()
    assert output.out == "abc\n" * 5
    assert "messages omitted: 2" in output.err


def test_a_message_longer_than_the_context_is_rejected_and_dropped(
    spell, monkeypatch, capsys
) -> None:
    assert converse(monkeypatch, spell("abc", length=64), "x" * 80, "ok") == 0
    output = capsys.readouterr()
    assert output.out == "abc\n"
    assert len(output.err.splitlines()) == 1 and "64" in output.err


def test_the_parameter_that_the_error_of_a_long_message_names_can_be_set(
    spell, monkeypatch, capsys
) -> None:
    lines = ("x" * 80, "/params truncate_prompt_tokens=60", "x" * 80)
    assert converse(monkeypatch, spell("abc", length=64), *lines) == 0
    output = capsys.readouterr()
    assert "set truncate_prompt_tokens=" in output.err and len(output.err.splitlines()) == 1
    assert output.out.splitlines()[-1] == "abc"


def test_the_params_command_shows_and_sets_parameters(spell, monkeypatch, capsys) -> None:
    options = spell("abc", loop=True)
    lines = ("/params max_tokens=5 temperature=0", "hello", "/params", "/exit", "never")
    assert converse(monkeypatch, options, *lines) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].split() == ["max_tokens", "5"] and out[1].split() == ["temperature", "0.0"]
    assert out[2] == "abc a"
    assert ["top_p", "1.0"] in [line.split() for line in out[3:]]
    assert "abc" not in "".join(out[3:])


@pytest.mark.costly
@pytest.mark.parametrize(
    ("line", "output"),
    [
        ("/params temprature=1", "'temperature'"),
        ("/params temperature=-1", "temperature=-1"),
        ("/params max_tokens=many", "max_tokens='many' must be none or an integer"),
        ("/params temperature", "temperature=…"),
        ("/params stop='x", "cannot be split"),
        ("/params n=2", "not a parameter"),
        ("/rest", "'/reset'"),
    ],
)
def test_an_invalid_command_prints_one_line_and_the_session_continues(
    spell, monkeypatch, capsys, line, output
) -> None:
    assert converse(monkeypatch, spell("abc"), line, "hello") == 0
    captured = capsys.readouterr()
    assert captured.out == "abc\n"
    assert len(captured.err.splitlines()) == 1
    assert output in captured.err


def test_the_help_command_names_every_command(spell, monkeypatch, capsys) -> None:
    assert converse(monkeypatch, spell(), "/help") == 0
    output = capsys.readouterr().out
    assert all(word in output for word in ("/params", "/reset", "/help", "/exit", "Ctrl-C", '"""'))


def test_a_message_that_begins_with_a_path_is_not_a_command(spell, monkeypatch, capsys) -> None:
    assert converse(monkeypatch, spell("abc"), "/usr/bin is what") == 0
    assert capsys.readouterr().out == "abc\n"


def test_parameter_values_are_parsed_as_json_or_text() -> None:
    params = with_settings(SamplingParams(), r"""stop='["a", "b"]' seed=7 top_k=3""")
    assert (params.stop, params.seed, params.top_k) == (("a", "b"), 7, 3)
    assert with_settings(params, r"stop='x\n'").stop == ("x\n",)
    assert with_settings(params, "stop=END seed=none").seed is None


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["one"], "one"),
        (["one \\", "two\\", "three"], "one \ntwo\nthree"),
        (['"""', "one", "", "two", '"""'], "one\n\ntwo"),
        (['"""one', 'two"""'], "one\ntwo"),
        (['"""one"""'], "one"),
        (['"""one', "two"], "one\ntwo"),
        (["one\\"], "one"),
    ],
)
def test_chat_messages_can_have_several_lines(lines: list[str], message: str) -> None:
    rest = iter(lines)

    def ask(prompt: str) -> str:
        try:
            return next(rest)
        except StopIteration:
            raise EOFError from None

    assert read_message(ask) == message
    with pytest.raises(EOFError):
        read_message(ask)


def test_the_second_ctrl_c_raises_keyboard_interrupt() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), watch_for_interrupt() as interrupted:
        assert not interrupted()
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupted()
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


class Terminal:
    """A process with its own pseudo-terminal."""

    def __init__(self, *command: str) -> None:
        self.master, slave = pty.openpty()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TERM": "dumb"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", ON_TERMINAL, *command],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment,
            start_new_session=True,
        )
        os.close(slave)
        self.text = ""

    def type(self, keys: str) -> None:
        # The line editor loses keys while it configures the terminal.
        time.sleep(TYPING_PAUSE_S)
        os.write(self.master, keys.encode())

    def wait_for(self, words: str, times: int = 1) -> None:
        end = time.monotonic() + PATIENCE_S
        while self.text.count(words) < times:
            ready, _, _ = select.select([self.master], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"{words!r} was not seen in {self.text!r}"
            self.text += os.read(self.master, 4096).decode()


@pytest.mark.costly
def test_ctrl_c_interrupts_a_response_and_ctrl_d_ends_the_chat(spell) -> None:
    options = spell("abc", loop=True, length=1 << 20)
    terminal = Terminal("chat", *options, "--max-num-seqs", "1", "--max-tokens", "1000000")
    try:
        terminal.wait_for("> ")
        terminal.type("half a line")
        terminal.type("half a line\x03")
        terminal.wait_for("> ", times=2)
        terminal.type("go\n")
        terminal.wait_for("abc abc")
        terminal.type("\x03")
        terminal.wait_for("(interrupted)\r\n> ")
        terminal.type("/params max_tokens=3\n")
        terminal.wait_for("max_tokens           3\r\n> ")
        terminal.type("again\n")
        terminal.wait_for("\nabc\r\n> ")
        terminal.type("\x04")
        assert terminal.process.wait(timeout=PATIENCE_S) == 0
    finally:
        terminal.process.kill()
        terminal.process.wait()
        os.close(terminal.master)
    assert "half a line" not in terminal.text.split("(interrupted)")[1]
