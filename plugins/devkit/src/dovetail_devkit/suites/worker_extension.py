"""The conformance suite of the worker extension contract, for any extension.

This module needs no device.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from dovetail.plugins.extension import extend_worker
from dovetail_devkit.contexts import make_worker_context, write_fake_config
from dovetail_devkit.executor.null_executor import NullWorker
from dovetail_devkit.expectation import checking, expect
from dovetail_devkit.fakes.worker import FakeWorker


@checking("worker_extension")
def check_worker_extension(extension_cls: type[Any]) -> None:
    """Add an extension to two workers. Raise AssertionError with the violated rule."""
    public = [name for name in dir(extension_cls) if not name.startswith("_") and name.islower()]
    operations = [name for name in public if callable(getattr(extension_cls, name))]
    expect(bool(operations), "the extension must have a public method")
    before = dict(vars(extension_cls))
    with TemporaryDirectory() as folder:
        context = make_worker_context(write_fake_config(Path(folder)))
        for worker_cls in (FakeWorker, NullWorker):
            own = dict(vars(worker_cls))
            worker = extend_worker(worker_cls, extension_cls)(context)
            expect(
                isinstance(worker, worker_cls),
                "the class of the extended worker must be a subclass of the worker's class",
            )
            lost = [name for name in operations if not callable(getattr(worker, name, None))]
            expect(not lost, f"the extended worker lacks the methods {lost} of the extension")
            expect(
                dict(vars(worker_cls)) == own,
                "adding the extension must not change the worker's class",
            )
            worker.shutdown()
    expect(
        dict(vars(extension_cls)) == before,
        "adding the extension must not change the extension's class",
    )
