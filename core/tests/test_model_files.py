"""Reading a file of a model directory never hangs. An invalid file raises a typed error."""

import json
import os
import socket
from pathlib import Path

import pytest

from dovetail import model_files
from dovetail.config import EngineArgs
from dovetail.errors import ModelError
from dovetail.model_files import open_model_file, parse_json, read_json_object, read_model_file
from dovetail.tokenizers.huggingface import TokenizerFacts
from dovetail_devkit.contexts import write_fake_config

OBJECT = b'{"a": 1}'


def make_fifo(path):
    os.mkfifo(path)


def make_socket(path):
    with socket.socket(socket.AF_UNIX) as listener:
        here = os.getcwd()
        os.chdir(path.parent)  # a socket path has at most 108 bytes
        try:
            listener.bind(path.name)
        finally:
            os.chdir(here)


def link_to(target):
    return lambda path: path.symlink_to(target)


NOT_FILES = {
    "FIFO": make_fifo,
    "socket": make_socket,
    "directory": Path.mkdir,
    "device": link_to("/dev/zero"),
    "link to a file that does not exist": link_to("nowhere"),
}


def rejection(function, *args, **options):
    with pytest.raises(ModelError) as caught:
        function(*args, **options)
    return str(caught.value)


@pytest.mark.parametrize("kind", NOT_FILES)
@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "generation_config.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "chat_template.jinja",
    ],
)
def test_the_error_for_a_path_that_is_not_a_regular_file_names_the_path(tmp_path, name, kind):
    write_fake_config(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    NOT_FILES[kind](tmp_path / name)
    read = TokenizerFacts.read if "token" in name or "template" in name else None
    message = rejection(read or (lambda path: EngineArgs(path).create_engine_config()), tmp_path)
    assert message.count(str(tmp_path / name)) == 1 and kind in message


def test_a_loop_of_symbolic_links_is_rejected(tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    assert "symbolic links" in rejection(read_model_file, tmp_path / "a")


def test_symbolic_links_to_regular_files_are_followed(tmp_path):
    """Caches of model hubs are directories of links to blobs."""
    (tmp_path / "blob").write_bytes(OBJECT)
    (tmp_path / "config.json").symlink_to("blob")
    assert read_json_object(tmp_path / "config.json") == {"a": 1}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_an_unreadable_file_is_rejected(tmp_path):
    (tmp_path / "config.json").touch(mode=0)
    assert "Permission denied" in rejection(read_json_object, tmp_path / "config.json")


def test_a_system_file_without_a_size_is_rejected():
    assert "changed" in rejection(read_model_file, Path("/proc/self/environ"))


def test_the_error_for_a_file_above_the_size_limit_states_the_limit(tmp_path):
    path = tmp_path / "generation_config.json"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    message = rejection(read_json_object, path)
    assert str(1 << 40) in message and str(model_files.MAX_BYTES[path.name]) in message


@pytest.mark.parametrize("change", [b"", b'{"a": 12}'])
def test_a_file_that_changes_while_it_is_read_is_rejected(tmp_path, monkeypatch, change):
    path, read = tmp_path / "config.json", os.read
    path.write_bytes(OBJECT)

    def read_later(*args):
        path.write_bytes(change)
        return read(*args)

    monkeypatch.setattr(os, "read", read_later)
    assert "changed while it was read" in rejection(read_json_object, path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"[" * 100_000, "levels deep"),
        (b'{"a":' * 100_000, "levels deep"),
        (b'{"a": [1, ' * 40 + b'"' + b'\\"' * 50_000, "levels deep"),
        (b'"' + b'\\"' * 50_000 + b"[" * 500, "Unterminated"),
        (b'{"a": %s}' % (b"9" * 101), "101 digits"),
        (b'{"a": %s}' % (b"9" * 100_000), "digits"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": 1, "b": 2, "a": 3}', "'a' occurs twice"),
        (b'{"a": "\\ud800"}', "lone surrogate"),
        (b'{"\\udfff": 1}', "lone surrogate"),
        (b'{"a": "\xff"}', "utf-8"),
        (b"\xff\xfe{\x00}\x00", "utf-8"),
        (b"", "Expecting value"),
        (b"{}{}", "Extra data"),
        (b"3", "JSON object"),
    ],
)
@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_the_error_for_bad_json_names_the_file_and_the_reason(tmp_path, name, content, reason):
    write_fake_config(tmp_path)
    (tmp_path / name).write_bytes(content)
    if name == "config.json":
        message = rejection(EngineArgs(tmp_path).create_engine_config)
    else:
        message = rejection(TokenizerFacts.read, tmp_path)
    assert str(tmp_path / name) in message and reason in message
    assert len(message) < 500


def test_unusual_but_valid_json_is_accepted(tmp_path):
    deep = b"[" * 63 + b"]" * 63
    text = (
        b'\xef\xbb\xbf{"[[[": "\\"]]]\\\\", "b": %s, "c": Infinity, "d": "\\ud83d\\ude00"}' % deep
    )
    value = parse_json(tmp_path, text)
    assert value["[[["] == '"]]]\\' and value["c"] > 0 and value["d"] == "\U0001f600"
    brackets = json.dumps({"a": "[" * 1000, "b": [{} for _ in range(1000)]}).encode()
    assert len(parse_json(tmp_path, brackets)["b"]) == 1000


def test_the_file_descriptor_is_always_closed(tmp_path):
    (tmp_path / "config.json").write_bytes(OBJECT)
    with pytest.raises(KeyError), open_model_file(tmp_path / "config.json") as descriptor:
        raise KeyError
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    before = set(os.listdir("/proc/self/fd"))
    for _ in range(3):
        rejection(read_model_file, Path("/dev/zero"))
        os.mkfifo(tmp_path / "fifo")
        rejection(read_model_file, tmp_path / "fifo")
        (tmp_path / "fifo").unlink()
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_model_with_too_many_chat_templates_is_rejected(tmp_path):
    folder = tmp_path / "additional_chat_templates"
    folder.mkdir()
    for number in range(65):
        (folder / f"{number}.jinja").touch()
    assert "more than 64" in rejection(TokenizerFacts.read, tmp_path)
