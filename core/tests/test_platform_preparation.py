"""A platform loads what the worker needs while the engine loads the tokenizer."""

import json
import logging
import subprocess
import sys
import threading
from typing import ClassVar

import pytest

from dovetail.config import EngineArgs
from dovetail.engine.front_end import FrontEndParts
from dovetail.engine.plugin_choices import make_registry
from dovetail.plugins.selection import choosing, prepare_platform
from dovetail_devkit.fakes.platform import FakePlatform
from dovetail_devkit.fakes.tokenizer import ByteTokenizer

UNUSED = ("torch", "numpy", "transformers", "zmq", "http.client", "jinja2", "huggingface_hub")
"""Modules that `dovetail chat` imports neither before nor with the engine."""


class PreparedPlatform(FakePlatform):
    events: ClassVar[list[str]] = []

    def prepare(self, config):
        self.events.append(f"prepare {config.model.model_dir.name}")


class LateTokenizer(ByteTokenizer):
    @classmethod
    def from_directory(cls, path):
        PreparedPlatform.events.append("tokenizer")
        return cls()


class BrokenPlatform(FakePlatform):
    def prepare(self, config):
        raise ZeroDivisionError("by zero")


class HangingPlatform(FakePlatform):
    released = threading.Event()

    def prepare(self, config):
        self.released.wait()


@pytest.fixture
def config(tmp_path):
    def make(platform):
        sizes = {"architectures": ["None"], "vocab_size": 259, "max_position_embeddings": 64}
        (tmp_path / "config.json").write_text(json.dumps(sizes))
        PreparedPlatform.events.clear()
        args = EngineArgs(model=tmp_path, platform=platform, tokenizer_mode=LateTokenizer)
        return args.create_engine_config()

    return make


def test_the_platform_prepares_before_the_tokenizer_is_loaded_and_only_once(config, tmp_path):
    requested = config(PreparedPlatform)
    parts = FrontEndParts.of(requested, starts_engine=True)
    assert PreparedPlatform.events == [f"prepare {tmp_path.name}", "tokenizer"]
    assert prepare_platform(parts.plugins, requested) is parts.plugins.platform
    assert len(PreparedPlatform.events) == 2


def test_a_front_end_of_an_engine_in_another_process_prepares_nothing(config):
    FrontEndParts.of(config(PreparedPlatform))
    assert PreparedPlatform.events == ["tokenizer"]


def test_an_engine_starts_if_the_preparation_fails(config, caplog):
    requested = config(BrokenPlatform)
    with caplog.at_level(logging.WARNING):
        platform = prepare_platform(make_registry(requested), requested)
    assert isinstance(platform, BrokenPlatform)
    (record,) = caplog.records
    assert "preparation" in record.getMessage() and "by zero" in record.getMessage()


def test_an_engine_starts_if_the_preparation_hangs(config, caplog, monkeypatch):
    monkeypatch.setattr(choosing, "PREPARATION_TIMEOUT_S", 0.05)
    requested = config(HangingPlatform)
    try:
        with caplog.at_level(logging.WARNING):
            platform = prepare_platform(make_registry(requested), requested)
    finally:
        HangingPlatform.released.set()
    assert isinstance(platform, HangingPlatform)
    (record,) = caplog.records
    name = platform.info.name
    assert f"preparation of the platform {name!r} did not finish within 0.05 s" in (
        record.getMessage()
    )


def test_the_modules_of_a_conversation_in_this_process_do_not_import_unused_modules():
    program = (
        "import sys, dovetail.cli.app, dovetail.cli.chat, dovetail.engine.llm_engine\n"
        f"print(*[name for name in {UNUSED!r} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []


def test_garbage_is_not_collected_while_the_engine_is_imported():
    program = """
import gc, sys
import dovetail.plugins.loading
from dovetail import LLM
from dovetail.errors import DovetailError

phases = []
gc.callbacks.append(lambda phase, info: phases.append(phase))
try:
    LLM("absent", seed="invalid")
except DovetailError:
    pass
print(phases.count("start"), "dovetail.engine.llm_engine" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    num_collections, is_imported = done.stdout.split()
    # Without the pause there are 92.
    assert is_imported == "True" and int(num_collections) < 20
