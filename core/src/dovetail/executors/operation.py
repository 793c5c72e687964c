"""Finds the operation that a name selects in `collective_rpc`.

A name is a method of the worker, or "pkg.mod:function": a function that the module `pkg.mod`
defines and whose first argument is the worker. No other name is accepted, so a name from another
process cannot select a class, a builtin or an attribute.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from dovetail.errors import (
    ContractError,
    DovetailError,
    RequestError,
    UserError,
    describe_failure,
)
from dovetail.interfaces.executor import Executor, Handle
from dovetail.value_checks import shorten

_ENGINES_OWN = frozenset(
    {
        "init_device",
        "load_model",
        "determine_available_memory",
        "initialize_cache",
        "compile_or_warm_up_model",
        "execute_model",
        "sample_tokens",
        "sleep",
        "wake_up",
        "shutdown",
    }
)


def check_callable_from_outside(name: str) -> None:
    """Raise RequestError for an operation that only the engine may call, or that does not exist."""
    module, _, last = name.rpartition(":")
    if last.startswith("_") or not last.isidentifier() or (not module and last in _ENGINES_OWN):
        raise RequestError(
            f"operation {shorten(name)} cannot be called: it is internal to the engine."
        )


def call_from_outside(
    executor: Executor,
    operation: str | Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> list[Any]:
    """Call a method of every worker for a user. Return the results in the order of the ranks.

    Raises UserError if the method cannot be called, DovetailError if the call fails.
    """
    if isinstance(operation, str):
        check_callable_from_outside(operation)
    elif not callable(operation):
        raise UserError(
            f"operation={shorten(operation)} must be the name of a worker's method, or a "
            "callable whose first argument is the worker."
        )
    try:
        results: list[Any] = executor.collective_rpc(operation, args=args, kwargs=kwargs)
    except DovetailError:
        raise
    except Exception as error:  # of a worker in this process
        raise DovetailError(f"A worker failed: {describe_failure(error)}") from error
    return results


def find_operation(worker: object, operation: str | Callable[..., Any]) -> Callable[..., Any]:
    """Return `operation` bound to `worker`. Raise ContractError if it does not exist."""
    if not isinstance(operation, str):
        return partial(operation, worker)
    if ":" in operation:
        return partial(_function(operation), worker)
    method: Callable[..., Any] | None = getattr(worker, operation, None)
    if not callable(method):
        raise ContractError(f"{type(worker).__name__} has no operation {operation!r}.")
    return method


def check_rank(rank: int | None, world_size: int) -> None:
    """Raise ContractError unless `rank` is None or less than `world_size`."""
    if rank is not None and not 0 <= rank < world_size:
        raise ContractError(
            f"unique_reply_rank={rank} does not exist; the ranks are 0 to {world_size - 1}."
        )


class SoleReply:
    """The handle of `collective_rpc` for a single worker. rank: None to return a list."""

    __slots__ = ("_answer", "_rank")

    def __init__(self, handle: Handle[Any], rank: int | None) -> None:
        self._answer = handle
        self._rank = rank

    def done(self) -> bool:
        """Return whether the worker has responded."""
        return self._answer.done()

    def result(self, timeout: float | None = None) -> Any:
        """Return the response, in a list unless a rank was given."""
        result = self._answer.result(timeout)
        return [result] if self._rank is None else result


def _function(operation: str) -> Callable[..., Any]:
    module_name, _, name = operation.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), name, None)
    except (ImportError, ValueError) as error:
        raise ContractError(
            f"the operation {operation!r} is in a module that cannot be imported: {error}."
        ) from error
    if not inspect.isfunction(function) or function.__module__ != module_name:
        raise ContractError(
            f"the operation {operation!r} is not a function that {module_name} defines."
        )
    return function
