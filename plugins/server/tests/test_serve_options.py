"""The options of `dovetail serve`: help pages, configuration files, and wrong values."""

import re

import pytest

from dovetail.cli import main
from dovetail.errors import ConfigError
from dovetail_server.listening import listen, tls_context
from dovetail_server.serve_command import HELP, MAIN
from dovetail_server.settings import ServerSettings


@pytest.fixture
def read_help(capsys, monkeypatch):
    """A function that returns the flags in a help page."""
    monkeypatch.setenv("COLUMNS", "200")  # long flags are not divided

    def read(flag):
        assert main(["serve", flag]) == 0
        return set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out))

    return read


def test_help_shows_at_most_forty_options(read_help):
    shown = read_help("--help")
    assert {"--help-all", "--config", "--model", "--port"} <= shown
    assert len(shown - {"--help-all"}) <= 40
    assert len(read_help("--help-all")) > len(shown) + 40
    assert set(MAIN) <= set(HELP)


@pytest.mark.costly
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--model", "demo", "--prot", "1"], "--port"),
        (["--model", "./absent"], "does not exist"),
        (["--model", "demo", "--port", "70000"], "--port 70000 must be"),
        (["--model", "demo", "--host", "a..b"], "--host 'a..b' cannot be used: it is not a valid"),
    ],
)
def test_errors_for_invalid_options_have_at_most_three_lines(arguments, expected, capsys):
    assert main(["serve", *arguments]) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert len(error.splitlines()) <= 3


@pytest.mark.costly
def test_a_configuration_file_sets_options_of_the_server(serving, tmp_path):
    file = tmp_path / "serve.yaml"
    file.write_text("model: demo\nmax-model-len: 128\nserved-model-name: from-the-file\n")
    with serving("--config", str(file), "--max-model-len", "64") as running:
        (model,) = running.wait_until_ready().get("/v1/models").json["data"]
    assert (model["id"], model["max_model_len"]) == ("from-the-file", 64)


@pytest.mark.parametrize("host", ["a..b", "x" * 64, "a\0b", "a\udcff", "nosuch.invalid"])
def test_a_host_that_cannot_be_used_is_rejected(host):
    with pytest.raises(ConfigError, match=r"--host '.*' cannot be used: \w+"):
        listen(host, 0)


def test_a_certificate_path_with_a_null_character_is_rejected():
    with pytest.raises(ConfigError, match=r"--ssl-certfile .* cannot be read: embedded null"):
        tls_context(ServerSettings(ssl_certfile="a\0b"))
