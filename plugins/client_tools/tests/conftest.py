"""Runs commands in this process, and fake servers in threads."""

import importlib.util
import sys
from pathlib import Path

import pytest

from dovetail.cli.app import main


def _load(name):
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def null():
    """Return the module with the fake server and the bytes of its responses."""
    return _load("null_server")


@pytest.fixture
def steps(null):
    """Return the route /steps of a server without an engine."""
    return _load("steps_server").StepsServer(null)


@pytest.fixture
def run(capsys):
    """Run a command. Return its exit code, output and messages."""

    def call(*words):
        code = main([str(word) for word in words])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call
