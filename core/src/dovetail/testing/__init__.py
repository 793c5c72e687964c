"""The conformance kit: for every contract a suite that any implementation must pass, and a fake.

A suite is a function `check_<kind>(cls, …)` that raises AssertionError with the law that is broken;
what else it wants (a model directory, a device, a context) is in its signature. A fake is the
smallest right implementation, slow and strict, for tests of everything around it.

    from dovetail.testing import load_suite
    from dovetail.testing.contexts import make_worker_context

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
    "attention": "dovetail.testing.attention:check_backend",
    "executor": "dovetail.testing.executor:check_executor",
    "hooks": "dovetail.testing.hooks:check_hooks",
    "io_processor": "dovetail.testing.io_processor:check_io_processor",
    "kv_connector": "dovetail.testing.kv_connector:check_kv_connector",
    "linear_method": "dovetail.testing.linear_method:check_linear_method",
    "logits_processor": "dovetail.testing.logits_processor:check_logits_processor",
    "model": "dovetail.testing.model:check_model",
    "ops": "dovetail.testing.ops:check_ops",
    "platform": "dovetail.testing.platform:check_platform",
    "policy": "dovetail.testing.policy:check_policy",
    "scheduler": "dovetail.testing.scheduler:check_scheduler",
    "stat_logger": "dovetail.testing.stat_logger:check_stat_logger",
    "tokenizer": "dovetail.testing.tokenizer:check_tokenizer",
    "weight_loader": "dovetail.testing.weight_loader:check_weight_loader",
    "worker": "dovetail.testing.worker:check_worker",
    "worker_extension": "dovetail.testing.worker_extension:check_worker_extension",
}
"""The suite of each kind of plugin, as "module:function"."""

FAKES: Mapping[str, str] = {
    "attention": "dovetail.testing.fake_attention:FakeAttentionBackend",
    "executor": "dovetail.testing.fake_executor:FakeExecutor",
    "hooks": "dovetail.testing.fake_hooks:FakeHooks",
    "io_processor": "dovetail.testing.fake_io_processor:FakeIOProcessor",
    "kv_connector": "dovetail.testing.fake_kv_connector:FakeKVConnector",
    "linear_method": "dovetail.testing.fake_linear_method:FakeLinearMethod",
    "logits_processor": "dovetail.testing.fake_logits_processor:FakeLogitsProcessor",
    "model": "dovetail.testing.fake_model:FakeModel",
    "ops": "dovetail.testing.fake_ops:FakeOps",
    "platform": "dovetail.testing.fake_platform:FakePlatform",
    "policy": "dovetail.testing.fake_policy:FakePolicy",
    "scheduler": "dovetail.testing.fake_scheduler:FakeScheduler",
    "stat_logger": "dovetail.testing.fake_stat_logger:FakeStatLogger",
    "tokenizer": "dovetail.testing.fake_tokenizer:ByteTokenizer",
    "weight_loader": "dovetail.testing.fake_weight_loader:FakeWeightLoader",
    "worker": "dovetail.testing.fake_worker:FakeWorker",
    "worker_extension": "dovetail.testing.fake_worker_extension:FakeWorkerExtension",
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
