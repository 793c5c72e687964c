"""Fixtures: engine configurations with plugins that a child process can import, and clients."""

import importlib
import json
import sys
import tempfile
from pathlib import Path

import pytest

from dovetail.config import EngineArgs
from dovetail.engine.process.factory import make_client
from dovetail.scheduling import Scheduler
from dovetail_devkit.fakes.platform import FakePlatform

HERE = Path(__file__).parent


@pytest.fixture
def parts(monkeypatch):
    """Return the module `engine_process_parts`, which child processes can import too."""
    yield from imported("engine_process_parts", monkeypatch)


@pytest.fixture
def traffic(monkeypatch):
    """Return the module `engine_traffic`, which creates requests and collects their results."""
    yield from imported("engine_traffic", monkeypatch)


def imported(name, monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))
    yield importlib.import_module(name)
    sys.modules.pop(name, None)


@pytest.fixture
def engine_config(tmp_path, parts):
    """Make a configuration: `engine_config(step_s=0.1, async_scheduling=True)`."""

    def make(*, async_scheduling=False, options=None, **worker_config):
        config = {
            "architectures": ["ControlledWorker"],
            "vocab_size": 97,
            "max_position_embeddings": 512,
        }
        (tmp_path / "config.json").write_text(json.dumps(config | worker_config))
        kwargs = {
            "worker_cls": parts.ControlledWorker,
            "scheduler_cls": Scheduler,
            "max_num_seqs": 8,
        }
        args = EngineArgs(
            model=tmp_path,
            platform=FakePlatform,
            skip_tokenizer_init=True,
            async_scheduling=async_scheduling,
            **(kwargs | (options or {})),
        )
        return args.create_engine_config()

    return make


@pytest.fixture
def client_of(engine_config, traffic, monkeypatch, tmp_path_factory):
    """Start a client: `client_of("sync", step_s=0.1)`. Fail if a process or file is left."""
    # Sockets need a short path.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("t")))
    before, created = traffic.open_resources(), []

    def make(kind, **worker_config):
        created.append(make_client(engine_config(**worker_config), kind))
        return created[-1]

    yield make
    for client in created:
        client.shutdown()
        client.shutdown()
    assert traffic.open_resources() == before
