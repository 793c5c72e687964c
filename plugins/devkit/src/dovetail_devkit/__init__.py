"""The conformance kit: for every contract a suite that any implementation must pass, and a fake.

A suite is a function `check_<kind>(cls, …)` that raises AssertionError with the law that is broken;
what else it wants (a model directory, a device, a context) is in its signature. A fake is the
smallest right implementation, slow and strict, for tests of everything around it.

    from dovetail_devkit import load_suite
    from dovetail_devkit.contexts import make_worker_context

    def test_my_worker(tmp_path):
        context = make_worker_context(write_tiny_llama(tmp_path), MyPlatform())
        load_suite("worker")(MyWorker, context)

Importing this package imports the table of kinds only; modules of torch kinds import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from dovetail.plugin_kinds import KINDS

__all__ = ["FAKES", "SUITES", "load_fake", "load_suite"]

SUITES: Mapping[str, str] = {kind.name: kind.suite_path for kind in KINDS.values() if kind.fake}
"""The suite of each kind of plugin, as "module:function"."""

FAKES: Mapping[str, str] = {kind.name: kind.fake_path for kind in KINDS.values() if kind.fake}
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
