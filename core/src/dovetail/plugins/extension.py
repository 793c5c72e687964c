"""Combines a worker class and a worker extension into a new class.

Neither class is changed, so two engines of one process may extend the same worker differently. If
both define the same name, creating the class raises an error.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

from dovetail.errors import ContractError
from dovetail.interfaces.executor import ExecutorContext
from dovetail.interfaces.worker import Profiles, ProvidesModel, Sleeps, WorkerBase

_CONTRACTS: tuple[type, ...] = (WorkerBase, Sleeps, Profiles, ProvidesModel)
_NOT_ADDED = frozenset({"CONTRACT", "CONTRACT_VERSION", "__annotate_func__", "_abc_impl"})
"""Names that an extension may share with the worker, because they describe the class itself."""


def complete_worker_cls(context: ExecutorContext) -> type[Any]:
    """Return the worker class of an executor, with the requested extension.

    Raises PluginError if the extension cannot be loaded, and the errors of `extend_worker`.
    """
    reference = context.config.worker_extension_cls
    if reference is None:
        return context.worker_cls
    return extend_worker(context.worker_cls, context.plugins.load("worker_extension", reference))


def extend_worker(worker_cls: type[Any], extension: type[Any]) -> type[Any]:
    """Return a new class that inherits from the worker class and the extension.

    Raises ContractError, naming every conflict, if the extension defines a name of the worker class
    or of the worker's contract, including its optional parts. A constructor or another special
    method is also a conflict, because the worker's method would hide it.
    """
    problems = list(_problems(worker_cls, extension))
    if problems:
        raise ContractError(
            f"{_shown(extension)} cannot extend the worker {_shown(worker_cls)}:"
            + "".join(f"\n  - {problem}" for problem in problems)
            + "\nRename these members of the extension; the worker must not have members of the "
            "same names."
        )
    body = {"__module__": worker_cls.__module__, "__doc__": worker_cls.__doc__}
    name = f"{worker_cls.__name__}With{extension.__name__}"
    try:
        return types.new_class(name, (worker_cls, extension), {}, lambda names: names.update(body))
    except TypeError as error:
        raise ContractError(
            f"{_shown(extension)} cannot extend the worker {_shown(worker_cls)}: {error}. Write "
            "the extension as a plain class, without bases, slots or a metaclass."
        ) from error


def _problems(worker_cls: type[Any], extension: type[Any]) -> Iterator[str]:
    for name in sorted(_added_names(extension, worker_cls)):
        owner = next((cls for cls in (worker_cls, *_CONTRACTS) if hasattr(cls, name)), None)
        if _is_special(name):
            yield f"{name} is a special method, which the worker's method would hide"
        elif owner is not None:
            yield f"{name} is also a member of {_shown(owner)}"
    for name in sorted(getattr(extension, "__abstractmethods__", ())):
        yield f"{name} is abstract"


def _added_names(extension: type[Any], worker_cls: type[Any]) -> set[str]:
    """Return the names of the extension and its bases, except those that the worker inherits."""
    bases = [cls for cls in extension.__mro__ if cls not in worker_cls.__mro__]
    members = [item for cls in bases for item in vars(cls).items()]
    return {
        name
        for name, value in members
        if name not in _NOT_ADDED and (_is_method(value) or not _is_special(name))
    }


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _is_method(value: object) -> bool:
    return isinstance(value, (types.FunctionType, classmethod, staticmethod, property))


def _shown(cls: type[Any]) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"
