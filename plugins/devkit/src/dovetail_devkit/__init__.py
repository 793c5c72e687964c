"""The conformance kit: a suite and a fake for each plugin kind.

A suite is a function `check_<kind>(cls, …)` that raises AssertionError with the violated rule.
Its signature lists additional arguments (a model directory, a device, a context). A fake is the
smallest correct implementation. It is slow, checks its callers, and is used in tests of other code.

    from dovetail_devkit import load_suite
    from dovetail_devkit.contexts import make_worker_context

    def test_my_worker(tmp_path):
        context = make_worker_context(write_tiny_llama(tmp_path), MyPlatform())
        load_suite("worker")(MyWorker, context)

Importing this package imports no suite and no fake. Modules of kinds that use torch import it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from dovetail.plugin_kinds import KINDS

__all__ = ["FAKES", "SUITES", "load_fake", "load_suite"]

SUITES: Mapping[str, str] = {kind.name: kind.suite_path for kind in KINDS.values()}
"""The suite of each kind of plugin, as "module:function"."""

FAKES: Mapping[str, str] = {kind.name: kind.fake_path for kind in KINDS.values()}
"""The fake of each kind of plugin, as "module:class"."""


def load_suite(kind: str) -> Callable[..., None]:
    """Return the suite of `kind`. Raise KeyError if the kind has none."""
    suite: Callable[..., None] = _load(SUITES[kind])
    return suite


def load_fake(kind: str) -> type[Any]:
    """Return the fake of `kind`. Raise KeyError if the kind has none."""
    fake: type[Any] = _load(FAKES[kind])
    return fake


def _load(target: str) -> Any:
    module, _, name = target.partition(":")
    return getattr(import_module(module), name)
