"""Paths that the file system rejects, for example because a name has more than 255 bytes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dovetail.cli.frame.output_directory import check_output, new_directory
from dovetail.errors import ConfigError, PluginNotFoundError
from dovetail.plugins.loading import Origin, load_file
from dovetail.plugins.plugin_details import find_source

LONG = Path("x" * 300)


def test_an_output_directory_in_a_directory_that_cannot_exist_is_rejected():
    with pytest.raises(ConfigError, match="is not a directory that can be written to"):
        check_output("--out", LONG / "model", 1)


def test_an_output_directory_with_a_name_that_is_too_long_is_rejected(tmp_path):
    check_output("--out", tmp_path / LONG, 1)
    with (
        pytest.raises(ConfigError, match="cannot be written: File name too long"),
        new_directory("--out", tmp_path / LONG),
    ):
        pass


def test_an_output_directory_in_a_directory_without_search_permission_is_rejected(
    tmp_path, monkeypatch
):
    def refuse(path, *args, **kwargs):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "stat", refuse)
    with pytest.raises(ConfigError, match="is not a directory that can be written to"):
        check_output("--out", tmp_path / "model", 1)


def test_an_output_directory_that_cannot_be_listed_is_not_overwritten(tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "listdir", refuse)
    with pytest.raises(ConfigError, match="cannot be written: Permission denied"):
        check_output("--out", tmp_path, 1, overwrite=True)


def test_a_plugin_file_with_a_name_that_is_too_long_does_not_exist(tmp_path):
    with pytest.raises(PluginNotFoundError, match="does not exist"):
        load_file(tmp_path / f"{LONG}.py", Origin(reference="long"))


def test_a_module_with_a_name_that_is_too_long_has_no_source():
    assert find_source(f"dovetail.{LONG}") is None
