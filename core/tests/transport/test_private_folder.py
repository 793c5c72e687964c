"""Directories for sockets are private to their owner and have a short path."""

import os
import socket
import tempfile

import pytest

from dovetail.errors import ConfigError
from dovetail.transport.private_folder import MAX_NAME_BYTES, make_private_folder


@pytest.fixture
def set_parent(tmp_path, monkeypatch):
    """Return a function that sets the directory for private directories."""
    return lambda folder: monkeypatch.setattr(tempfile, "tempdir", str(folder))


def test_a_private_directory_is_new_and_accessible_to_its_owner_only(set_parent):
    with tempfile.TemporaryDirectory(
        dir="/tmp"
    ) as base:  # pytest's temporary path may be too long for a socket
        set_parent(base)
        folders = [make_private_folder() for _ in range(3)]
        assert len(set(folders)) == 3
        assert all(folder.stat().st_mode & 0o777 == 0o700 for folder in folders)


def test_the_error_for_a_missing_or_too_deep_directory_names_it(tmp_path, set_parent):
    set_parent(tmp_path / "none")
    with pytest.raises(ConfigError, match=r"TMPDIR to an existing"):
        make_private_folder()
    deep = tmp_path / ("d" * 90)
    deep.mkdir()
    set_parent(deep)
    with pytest.raises(ConfigError, match=r"TMPDIR=.*too long"):
        make_private_folder()
    assert not list(deep.iterdir())


def test_socket_paths_in_every_accepted_directory_are_short_enough_to_bind(set_parent):
    with tempfile.TemporaryDirectory(dir="/tmp") as base:
        for length in range(1, 99):
            set_parent(f"{base}/{'d' * length}")
            os.mkdir(tempfile.gettempdir())
            try:
                folder = make_private_folder()
            except ConfigError:
                break
            with socket.socket(socket.AF_UNIX) as bound:
                bound.bind(str(folder / ("s" * MAX_NAME_BYTES)))
    assert 50 < length < 98
