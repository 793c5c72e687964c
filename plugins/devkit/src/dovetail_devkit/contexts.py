"""Configurations and contexts of workers and executors, for tests.

They are created as in an engine: options, then a configuration, then its resolution for a platform.
No plugin is loaded.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dovetail.config import EngineArgs, EngineConfig
from dovetail.config.resolve import resolve
from dovetail.interfaces.executor import ExecutorContext
from dovetail.interfaces.platform import Platform
from dovetail.interfaces.worker import WorkerBase, WorkerContext
from dovetail.model_files import read_json_object
from dovetail.plugins import PluginRegistry
from dovetail_devkit.fakes.platform import FakePlatform

SMALL_ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "max_model_len": 64,
    "block_size": 4,
    "use_tqdm_on_load": False,
    "num_threads": 1,
}
"""Engine options for the small engine that the suites use."""

_FAKE_MODELS = {
    "FakeModel": "dovetail_devkit.fakes.model:FakeModel",
    "PositionalModel": "dovetail_devkit.fakes.model:PositionalModel",
}


def write_fake_config(directory: Path, **fields: Any) -> Path:
    """Write a config.json that names `FakeModel`, and add `fields`. Return `directory`.

    The fake models are not installed as plugins: a worker that loads the model needs
    `hf_overrides=fake_model_overrides(directory)`, which `make_config` gives.
    """
    config = {
        "architectures": ["FakeModel"],
        "vocab_size": 97,
        "hidden_size": 16,
        "max_position_embeddings": 128,
    }
    (directory / "config.json").write_text(json.dumps(config | fields), encoding="utf-8")
    return directory


def fake_model_overrides(model_dir: Path) -> dict[str, Any]:
    """Return the `hf_overrides` for a config.json with a fake model, or {} for other models."""
    names = read_json_object(model_dir / "config.json").get("architectures") or [""]
    target = _FAKE_MODELS.get(names[0])
    return {"architectures": [target]} if target else {}


def make_config(model_dir: Path, platform: Platform | None = None, **options: Any) -> EngineConfig:
    """Return a small engine's configuration, resolved for `platform` (None: `FakePlatform`)."""
    overrides = fake_model_overrides(model_dir) | (options.pop("hf_overrides", None) or {})
    args = EngineArgs(model=model_dir, hf_overrides=overrides, **(SMALL_ENGINE | options))
    return resolve(args.create_engine_config(), platform or FakePlatform())


def make_worker_context(
    model_dir: Path, platform: Platform | None = None, **options: Any
) -> WorkerContext:
    """Return the context of a worker of a small engine."""
    platform = platform or FakePlatform()
    config = make_config(model_dir, platform, **options)
    return WorkerContext(config=config.worker_config(), platform=platform, plugins=PluginRegistry())


def make_executor_context(
    model_dir: Path,
    worker_cls: type[WorkerBase],
    platform: Platform | None = None,
    **options: Any,
) -> ExecutorContext:
    """Return the context of an executor of a small engine."""
    platform = platform or FakePlatform()
    return ExecutorContext(
        config=make_config(model_dir, platform, **options).executor_config(),
        platform=platform,
        plugins=PluginRegistry(),
        worker_cls=worker_cls,
    )
