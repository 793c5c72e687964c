"""Configuration files of commands, and `dovetail config show`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dovetail.cli import main
from dovetail.cli.frame.config_file import MAX_BYTES, MAX_DEPTH


@pytest.fixture
def write(tmp_path: Path):
    """Return a function that writes a configuration file and returns its path."""

    def write(text: str | bytes) -> str:
        path = tmp_path / "options.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return str(path)

    return write


@pytest.fixture
def show(capsys: pytest.CaptureFixture[str]):
    """Return a function that returns (value, origin) of each option of `generate`."""

    def show(*options: str) -> dict[str, tuple[str, str]]:
        code = main(["config", "show", "--command", "generate", "--json", *options])
        assert code == 0, capsys.readouterr().err
        rows = json.loads(capsys.readouterr().out)
        return {row["option"]: (row["value"], row["origin"]) for row in rows}

    return show


def test_a_file_sets_options_and_the_command_line_has_precedence(write, show) -> None:
    file = write(
        "model: demo\n"
        "max_model_len: 64\n"
        "--seed: 7\n"
        "enforce-eager: yes\n"
        "enable-prefix-caching: false\n"
        "gpu-memory-utilization: 0.5\n"
        "stop: [one, two]\n"
        "max-num-seqs: null\n"
        "plugin-options: {fcfs: {deep: [1, 2.5, true, null, '3']}}\n"
    )
    shown = show("--config", file, "--seed", "9")
    assert shown["model"] == ("demo", f"{file}, line 1")
    assert shown["max-model-len"] == ("64", f"{file}, line 2")
    assert shown["seed"] == ("9", "command line")
    assert shown["enforce-eager"] == ("true", f"{file}, line 4")
    assert shown["enable-prefix-caching"] == ("false", f"{file}, line 5")
    assert shown["gpu-memory-utilization"] == ("0.5", f"{file}, line 6")
    assert shown["stop"] == ("one, two", f"{file}, line 7")
    assert shown["max-num-seqs"] == ("None", "default")
    value = json.loads(shown["plugin-options"][0])
    assert value == {"fcfs": {"deep": [1, 2.5, True, None, "3"]}}
    assert shown["dtype"] == ("auto", "default")
    assert show()["model"] == ("(missing)", "default")


def test_config_show_prints_the_origin_of_options_on_request(
    write, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write("seed: 3\n")
    command = ["config", "show", "--command", "chat", "--config", file]
    assert main(command) == 0
    assert file not in capsys.readouterr().out
    assert main([*command, "--origin"]) == 0
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("seed")]
    assert row.split() == ["seed", "3", f"{file},", "line", "1"]


def test_a_command_uses_the_options_of_the_configuration_file(
    write, spell, capsys: pytest.CaptureFixture[str]
) -> None:
    words = spell("abcdef")
    pairs = dict(zip(words[::2], words[1::2], strict=True))
    lines = [f"{flag.removeprefix('--')}: {value}" for flag, value in pairs.items()]
    file = write("\n".join([*lines, "max-tokens: 3"]))
    assert main(["generate", "--config", file, " "]) == 0
    assert capsys.readouterr().out == "abc\n"
    assert main(["generate", "--config", file, "--max-tokens", "2", " "]) == 0
    assert capsys.readouterr().out == "ab\n"


@pytest.mark.costly
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("max-tokns: 3", "line 1: unknown option 'max-tokns'. Did you mean 'max-tokens'?"),
        ("config: other.yaml", "unknown option 'config'"),
        ("seed: 1\nseed: 2", "line 2: the option 'seed' is already on line 1"),
        ("max-tokens: 1\nmax_tokens: 2", "line 2: the option 'max_tokens' is already on line 1"),
        ("seed: eight", "line 1: seed is 'eight'; it must be an integer"),
        ("seed: '8'", "it must be an integer"),
        ("seed: 1.5", "it must be an integer"),
        ("seed: 1:30", "it must be an integer"),
        ("seed: true", "it must be an integer"),
        ("seed: [1]", "seed is a list; it must be an integer"),
        ("seed: {a: 1}", "seed is a mapping; it must be an integer"),
        ("temperature: warm", "it must be a number"),
        ("enforce-eager: 3", "it must be true or false"),
        ("dtype: [float32]", "dtype is a list; it must be a string"),
        ("hooks: {a: 1}", "it must be a list of strings"),
        ("hooks: [[a]]", "hooks is a nested value"),
        ("plugin-options: [1]", "it must be a mapping"),
        ("plugin-options: {a: 1, a: 2}", "each key must be a string that occurs once"),
        ("model: &a demo\ndtype: *a", "anchors and aliases are not allowed"),
        ("model: !!python/name:os.system", "tags are not allowed"),
        ("model: demo\n---\nmodel: demo", "more than one document"),
        ("- model", "one option per line"),
        ("model", "one option per line"),
        ("{[1]: 2}", "must be a plain string"),
        ("model: a: b", "is not valid YAML"),
        ("model: [", "is not valid YAML"),
        ("model: \x00", "is not valid YAML"),
        (b"model: \xff", "cannot be read: byte 7 is not UTF-8. Specify a text file."),
        ("plugin-options: " + "[" * (MAX_DEPTH + 1), "levels deep"),
        ("plugin-options: " + "[" * 30_000, "levels deep"),
        ("hooks: [" + "a," * 12_000 + "]", "more than 10000 values"),
        ("#" * (MAX_BYTES + 1), "more than 65536 bytes"),
    ],
)
def test_the_error_for_an_invalid_configuration_file_names_the_file(
    write, text, expected, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(text)
    assert main(["generate", "--config", file, "--model", "demo", "x"]) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert file in error
    assert len(error.splitlines()) <= 3


def test_a_configuration_file_with_nested_yaml_aliases_is_rejected(
    write, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ["a0: &a0 [x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    assert main(["generate", "--config", write("\n".join(lines)), "--model", "demo", "x"]) == 2
    assert "anchors and aliases are not allowed" in capsys.readouterr().err


def test_a_missing_configuration_file_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--config", "/no/such.yaml", "--model", "demo", "x"]) == 2
    assert (
        "--config /no/such.yaml cannot be read: No such file or directory."
        in capsys.readouterr().err
    )


def test_an_empty_configuration_file_changes_no_option(write, show) -> None:
    assert show("--config", write("# nothing\n")) == show()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--command", "genrate"], "Did you mean 'generate'"),
        (["--command", "generate", "--sede", "1"], "Did you mean --seed"),
        (["--command", "generate", "--model", "demo", "--seed", "x"], "Invalid value"),
    ],
)
def test_invalid_arguments_of_config_show_are_rejected(
    options: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "show", *options]) == 2
    assert expected in capsys.readouterr().err
