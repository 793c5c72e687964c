"""Standard streams that are full, closed or cannot encode a character."""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dovetail.cli import main, plugins_list
from dovetail.cli.plugins_table import print_json, print_line
from dovetail.cli.sampling_options import with_settings
from dovetail.cli.terminal import prepare_streams
from dovetail.errors import RequestError
from dovetail.sampling_params import SamplingParams

COMMANDS = (["plugins", "list", "--json"], ["--version"], ["--help"])
NOT_UTF8 = "/models/caf\udce9"
"""The text of a path with the byte 0xe9."""


@pytest.mark.parametrize("arguments", COMMANDS)
def test_a_full_disk_of_the_output_is_a_short_error(arguments, monkeypatch, capsys) -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(arguments) == 2
        full.flush()  # Python does so at exit; the output was discarded
    error = capsys.readouterr().err
    assert error == "dovetail: The output cannot be written: No space left on device.\n"


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "a message", "a-file"), OSError(errno.ENOENT, "a message")]
)
def test_an_error_of_a_file_keeps_its_traceback(error, monkeypatch) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(plugins_list, "PluginRegistry", fail)
    with pytest.raises(OSError, match="a message"):
        main(["plugins", "list"])


@contextmanager
def closed(*names: str) -> Iterator[None]:
    """Close standard streams, as `>&-` in a shell does, in a `with` block."""
    streams = {name: getattr(sys, name) for name in names}
    for name in names:
        setattr(sys, name, None)
    try:
        yield
    finally:
        for name, stream in streams.items():
            if opened := getattr(sys, name):
                opened.close()
            setattr(sys, name, stream)


@pytest.mark.parametrize("arguments", COMMANDS)
def test_commands_run_with_closed_streams(arguments) -> None:
    with closed("stdin", "stdout", "stderr"):
        assert main(arguments) == 0


@pytest.mark.costly
def test_an_error_is_not_printed_on_standard_output_if_stderr_is_closed(capsys) -> None:
    with closed("stderr"):
        assert main(["nonsense"]) == 2
    assert capsys.readouterr().out == ""


@pytest.fixture
def written(tmp_path: Path, monkeypatch) -> Callable[[Callable[[], None]], str]:
    """A function that returns what another one prints on a strict ASCII stream."""

    def capture(show: Callable[[], None]) -> str:
        path = tmp_path / "output"
        with path.open("w", encoding="ascii", errors="strict") as stream:
            monkeypatch.setattr(sys, "stdout", stream)
            prepare_streams()
            show()
        return path.read_text("ascii")

    return capture


def test_characters_that_cannot_be_encoded_are_replaced(written) -> None:
    assert written(lambda: print_line(f"Wrote {NOT_UTF8} …")) == "Wrote /models/caf? ?\n"


def test_a_path_that_is_not_utf_8_is_complete_in_json(written) -> None:
    assert json.loads(written(lambda: print_json({"path": NOT_UTF8}))) == {"path": NOT_UTF8}


def test_a_deeply_nested_setting_is_rejected() -> None:
    with pytest.raises(RequestError, match="temperature"):
        with_settings(SamplingParams(), "temperature=" + "[" * 20_000)
