"""`dovetail complete` and `dovetail chat --url` with a real server."""

import io
import sys

import pytest

from dovetail.cli import main


@pytest.fixture
def url(server):
    return f"http://{server.host}:{server.port}"


def test_the_complete_command_prints_the_response_of_the_server(server, url, capsys):
    expected = server.complete(prompt="reverse: robot", max_tokens=6).json["choices"][0]["text"]
    options = ["--url", url, "--temperature", "0", "--max-tokens", "6"]
    assert main(["complete", "reverse: robot", *options]) == 0
    assert capsys.readouterr().out == f"{expected}\n"


def test_the_chat_command_prints_the_response_of_the_server(server, url, capsys, monkeypatch):
    expected = server.chat("reverse: robot", max_tokens=6).json["choices"][0]["message"]["content"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("reverse: robot\n"))
    assert main(["chat", "--url", url, "--temperature", "0", "--max-tokens", "6"]) == 0
    assert capsys.readouterr().out == f"{expected}\n"


def test_the_complete_command_reports_a_model_that_the_server_does_not_have(url, capsys):
    assert main(["complete", "x", "--url", url, "--model", "absent"]) == 2
    assert "absent" in capsys.readouterr().err
