"""`dovetail generate`: its output, rejected arguments and time limits."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import pytest

from dovetail.cli import main
from dovetail.cli.engine_options import EngineOptions, engine_args
from dovetail.cli.terminal import printable
from dovetail.config import EngineArgs
from dovetail.errors import ConfigError

BOUND_S = 1.0
SLOWER_HERE = 3  # other processes may slow the machine
RUN = (
    "import sys; from dovetail.cli import main; code = main(sys.argv[1:]);"
    "print('loaded', *[m for m in ('torch', 'transformers', 'tokenizers') if m in sys.modules]);"
    "sys.exit(code)"
)


def test_only_outputs_are_written_to_a_pipe(spell, capsys) -> None:
    assert main(["generate", *spell("abc"), "first ", "second "]) == 0
    assert capsys.readouterr().out == "abc\n\nabc\n"


def test_max_tokens_limits_the_output(spell, capsys) -> None:
    assert main(["generate", *spell("abc", loop=True), "--max-tokens", "5", " "]) == 0
    assert capsys.readouterr().out == "abc a\n"


def test_an_output_has_at_most_64_tokens_by_default(spell, capsys) -> None:
    assert main(["generate", *spell("abc", loop=True), " "]) == 0
    assert len(capsys.readouterr().out) == 64 + 1


def test_stop_strings_end_the_output(spell, capsys) -> None:
    options = spell("abcdef")
    assert main(["generate", *options, "--stop", "x", "--stop", "d", " "]) == 0
    assert capsys.readouterr().out == "abc\n"


DEEP = '{"a":' * 20_000


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (("--block-size", "0"), "block_size=0 must be an integer from 1 to 4096."),
        (("--max-tokens", "0"), "max_tokens=0 must be an integer from 1 to"),
        (("--revision", ""), "revision='' must be a branch, tag or commit."),
    ],
)
def test_the_error_of_an_option_lists_only_values_that_can_be_typed(
    spell, capsys, option, message
) -> None:
    assert main(["generate", *spell("abc"), *option, " "]) == 2
    assert message in capsys.readouterr().err


def test_help_pages_do_not_mention_none(capsys) -> None:
    assert main(["generate", "--help-all"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "Maximum number of running requests; default: 256." in output.replace(" │ │ ", " ")
    assert "None" not in output


def test_json_output_has_one_object_per_line(spell, capsys) -> None:
    assert main(["generate", *spell("aé"), "--json", "one ", "two "]) == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first["prompt"], second["prompt"]) == ("one ", "two ")
    assert first["text"] == "aé"
    assert first["token_ids"] == [ord("a"), 0xC3, 0xA9, 257]
    assert (first["finish_reason"], first["num_prompt_tokens"]) == ("stop", 5)
    assert 0 <= first["ttft_s"] <= first["latency_s"]


def test_the_chat_option_applies_the_chat_template(spell, capsys) -> None:
    assert main(["generate", *spell("abc"), "--chat", "--json", "hello"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert (output["prompt"], output["text"]) == ("hello", "abc")
    assert output["num_prompt_tokens"] == len("user: hello\nassistant: ")


def test_prompts_are_read_from_a_file_and_from_stdin(spell, capsys, monkeypatch, tmp_path) -> None:
    options = spell("abc")
    (tmp_path / "prompts.txt").write_text("one \n\ntwo \n")
    file = ["--prompts-file", str(tmp_path / "prompts.txt")]
    assert main(["generate", *options, *file, "--json", "zero "]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["prompt"] for line in lines] == ["zero ", "one ", "two "]
    monkeypatch.setattr(sys, "stdin", io.StringIO("a \nb \nc \n"))
    assert main(["generate", *options, "--prompts-file", "-"]) == 0
    assert capsys.readouterr().out.split() == ["abc"] * 3


def test_a_long_prompt_can_be_truncated_to_its_last_tokens(spell, capsys) -> None:
    options = [*spell("abc", length=16), "--truncate-prompt-tokens", "6", "--json"]
    assert main(["generate", *options, "much too long a prompt "]) == 0
    assert json.loads(capsys.readouterr().out)["num_prompt_tokens"] == 6


def test_a_rejected_prompt_is_reported_and_the_other_prompts_are_processed(spell, capsys) -> None:
    options = spell("abc", length=16)
    assert main(["generate", *options, "one ", "much too long a prompt ", "two "]) == 2
    output = capsys.readouterr()
    assert output.out == "abc\n\nabc\n"
    assert output.err.startswith("dovetail: prompt 2: ") and "16" in output.err


@pytest.mark.costly
@pytest.mark.parametrize(
    ("arguments", "output"),
    [
        ([], "No prompt was given"),
        (["--prompts-file", "no-such-file"], "no-such-file"),
        (["--prompts-file", "/dev/null"], "--prompts-file /dev/null contains no prompt."),
        (["--prompts-file", "/dev/zero"], "more than"),
        (["--max-num-seq", "3", "x"], "--max-num-seqs"),
        (["--max-num-seqs", "x", "x"], "--max-num-seqs"),
        (["--temperature", "-1", "x"], "temperature=-1"),
        (["--hf-overrides", "{", "x"], "--hf-overrides"),
        (["--hf-overrides", "[1]", "x"], "not a JSON object"),
        (["--hf-overrides", DEEP, "x"], "nested more than 64 levels deep"),
        (["--plugin-options", '{"a":' * 65 + "1" + "}" * 65, "x"], "nested more than 64 levels"),
        (["--trust-remote-code", "x"], "is not supported"),
        (["--scheduler-cls", "fcfz", "x"], "'fcfs'"),
        (["--scheduler-cls", "./mine.py:Mine", "x"], "names a file"),
        (["--executor-backend", "unproc", "x"], "'uniproc'"),
        (["--load-format", "dumy", "x"], "'dummy'"),
    ],
)
def test_invalid_arguments_are_reported_in_at_most_three_lines(
    spell, arguments, output, capsys
) -> None:
    assert main(["generate", *spell(), *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert output in captured.err
    assert len(captured.err.splitlines()) <= 3


@pytest.mark.parametrize("arguments", [["generate", "x"], ["chat"]])
def test_invalid_sampling_options_are_reported_before_the_model_is_read(arguments, capsys) -> None:
    assert main([*arguments, "--model", "nowhere", "--top-p", "2"]) == 2
    assert "top_p=2.0 must be above 0 and at most 1." in capsys.readouterr().err


@pytest.mark.clock
@pytest.mark.parametrize(
    ("arguments", "output"),
    [
        (["--model", "nowhere"], "'nowhre-llama'"),
        (["--model", "nowhre-llama", "--scheduler-cls", "fcfz"], "'fcfs'"),
    ],
)
def test_invalid_arguments_are_reported_before_the_engine_starts(
    tmp_path: Path, arguments, output
) -> None:
    (tmp_path / "nowhre-llama").mkdir()
    (tmp_path / "nowhre-llama" / "config.json").write_text('{"architectures": ["Llama"]}')
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", RUN, "generate", *arguments, "x"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    elapsed = time.perf_counter() - start
    assert (done.returncode, done.stdout) == (2, "loaded\n")
    assert output in done.stderr
    assert len(done.stderr.splitlines()) <= 3
    assert elapsed < SLOWER_HERE * BOUND_S


def test_every_engine_option_has_a_command_line_flag() -> None:
    assert [f.name for f in fields(EngineOptions)] == [f.name for f in fields(EngineArgs)]


def test_omitted_flags_keep_the_defaults() -> None:
    assert engine_args(EngineOptions(model="m")) == EngineArgs("m")


def test_flags_set_the_engine_options() -> None:
    arguments = EngineOptions(
        model="m", max_num_seqs=3, enforce_eager=True, plugin_options='{"a": {"b": 1}}'
    )
    expected = EngineArgs("m", max_num_seqs=3, enforce_eager=True, plugin_options={"a": {"b": 1}})
    assert engine_args(arguments) == expected
    with pytest.raises(ConfigError, match="--plugin-options"):
        engine_args(EngineOptions(model="m", plugin_options="nonsense"))


def test_help_lists_every_option_with_its_description(capsys) -> None:
    assert main(["generate", "--help"]) == 0
    output = capsys.readouterr().out
    for words in (
        "--max-num-seqs",
        "Maximum number of tokens in an output.",
        "Engine options",
        "--model",
    ):
        assert words in output
    assert "--trust-remote-code" not in output


def test_a_model_cannot_send_terminal_control_sequences() -> None:
    assert printable("a\x1b[2J\x07é\n\tb\x9b") == "a␛[2J␇é\n\tb\ufffd"
