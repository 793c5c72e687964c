"""The conformance kit: for every contract a suite that any implementation must pass, and a fake.

A suite is a function `check_<kind>(cls, …)` that raises AssertionError with the law that is broken;
what else it wants (a model directory, a device, a context) is in its signature. A fake is the
smallest right implementation, slow and strict, for tests of everything around it.

    from dovetail_devkit import load_suite
    from dovetail_devkit.contexts import make_worker_context

    def test_my_worker(tmp_path):
        context = make_worker_context(write_tiny_llama(tmp_path), MyPlatform())
        load_suite("worker")(MyWorker, context)

Importing this package imports nothing else; modules of torch kinds import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

__all__ = ["FAKES", "SUITES", "load_fake", "load_suite"]

SUITES: Mapping[str, str] = {
    "attention": "dovetail_devkit.suites.attention:check_backend",
    "executor": "dovetail_devkit.suites.executor:check_executor",
    "hooks": "dovetail_devkit.suites.hooks:check_hooks",
    "io_processor": "dovetail_devkit.suites.io_processor:check_io_processor",
    "kv_connector": "dovetail_devkit.suites.kv_connector:check_kv_connector",
    "linear_method": "dovetail_devkit.suites.linear_method:check_linear_method",
    "logits_processor": "dovetail_devkit.suites.logits_processor:check_logits_processor",
    "model": "dovetail_devkit.suites.model:check_model",
    "ops": "dovetail_devkit.suites.ops:check_ops",
    "platform": "dovetail_devkit.suites.platform:check_platform",
    "policy": "dovetail_devkit.suites.policy:check_policy",
    "scheduler": "dovetail_devkit.suites.scheduler:check_scheduler",
    "stat_logger": "dovetail_devkit.suites.stat_logger:check_stat_logger",
    "step_extension": "dovetail_devkit.suites.step_extension:check_step_extension",
    "tokenizer": "dovetail_devkit.suites.tokenizer:check_tokenizer",
    "weight_loader": "dovetail_devkit.suites.weight_loader:check_weight_loader",
    "worker": "dovetail_devkit.suites.worker:check_worker",
    "worker_extension": "dovetail_devkit.suites.worker_extension:check_worker_extension",
}
"""The suite of each kind of plugin, as "module:function"."""

FAKES: Mapping[str, str] = {
    "attention": "dovetail_devkit.fakes.attention:FakeAttentionBackend",
    "executor": "dovetail_devkit.fakes.executor:FakeExecutor",
    "hooks": "dovetail_devkit.fakes.hooks:FakeHooks",
    "io_processor": "dovetail_devkit.fakes.io_processor:FakeIOProcessor",
    "kv_connector": "dovetail_devkit.fakes.kv_connector:FakeKVConnector",
    "linear_method": "dovetail_devkit.fakes.linear_method:FakeLinearMethod",
    "logits_processor": "dovetail_devkit.fakes.logits_processor:FakeLogitsProcessor",
    "model": "dovetail_devkit.fakes.model:FakeModel",
    "ops": "dovetail_devkit.fakes.ops:FakeOps",
    "platform": "dovetail_devkit.fakes.platform:FakePlatform",
    "policy": "dovetail_devkit.fakes.policy:FakePolicy",
    "scheduler": "dovetail_devkit.fakes.scheduler:FakeScheduler",
    "stat_logger": "dovetail_devkit.fakes.stat_logger:FakeStatLogger",
    "step_extension": "dovetail_devkit.fakes.step_extension:FakeStepExtension",
    "tokenizer": "dovetail_devkit.fakes.tokenizer:ByteTokenizer",
    "weight_loader": "dovetail_devkit.fakes.weight_loader:FakeWeightLoader",
    "worker": "dovetail_devkit.fakes.worker:FakeWorker",
    "worker_extension": "dovetail_devkit.fakes.worker_extension:FakeWorkerExtension",
}
"""The fake of each kind of plugin, as "module:class"."""


def load_suite(kind: str) -> Callable[..., None]:
    """Return the suite of `kind`; raise KeyError for a kind that has none."""
    suite: Callable[..., None] = _load(SUITES[kind])
    return suite


def load_fake(kind: str) -> type[Any]:
    """Return the fake of `kind`; raise KeyError for a kind that has none."""
    fake: type[Any] = _load(FAKES[kind])
    return fake


def _load(target: str) -> Any:
    module, _, name = target.partition(":")
    return getattr(import_module(module), name)
