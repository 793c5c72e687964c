"""Checks the types of plans and results, whose columns must be typed arrays.

A list instead of an array would cause an error only later, when it is sent to another process or
added to an array. Each check raises AssertionError with the class and the field.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from typing import Any

from dovetail.interfaces.scheduler import Depth, EngineCoreOutputs, Finished, SchedulerStats
from dovetail.plan import BlockColumns, EncoderRun, NewRequest, SchedulerOutput
from dovetail.request import FinishReason
from dovetail.result import LogprobColumns, ModelRunnerOutput

_COLUMNS: Mapping[type, Mapping[str, str]] = {
    SchedulerOutput: {
        "rows": "i",
        "starts": "i",
        "num_tokens": "i",
        "samples": "B",
        "leaves": "i",
        "num_drafts": "i",
    },
    BlockColumns: {"rows": "i", "counts": "i", "block_ids": "i"},
    NewRequest: {"token_ids": "i"},
    EngineCoreOutputs: {"num_new_tokens": "i", "token_ids": "i"},
    ModelRunnerOutput: {"num_sampled": "B", "token_ids": "i", "num_drafts": "B"},
    LogprobColumns: {"counts": "i", "token_ids": "i", "logprobs": "f", "ranks": "i"},
}
"""The type codes of the columns of each class."""

_PLAIN = {"int": int, "float": float, "str": str, "bool": bool}


def check_plan_types(plan: SchedulerOutput) -> None:
    """Check a plan against the types of `SchedulerOutput`."""
    _check(plan, SchedulerOutput)
    _check_items(plan, "joins", tuple, NewRequest)
    _check_items(plan, "blocks", tuple, BlockColumns)
    _check_items(plan, "encoder", tuple, EncoderRun)
    _check_items(plan, "encoder_frees", tuple, bytes)
    _check_type(plan, "kv_transfer", bytes)


def check_result_types(result: ModelRunnerOutput) -> None:
    """Check a step's result against the types of `ModelRunnerOutput`."""
    _check(result, ModelRunnerOutput)
    for name in ("logprobs", "prompt_logprobs"):
        _check_mapping(result, name, int, LogprobColumns)
    _check_type(result, "kv_transfer", bytes)


def check_outputs_types(outputs: EngineCoreOutputs) -> None:
    """Check a step's outputs against the types of `EngineCoreOutputs`."""
    _check(outputs, EngineCoreOutputs)
    _check_items(outputs, "request_ids", list, str)
    _check_items(outputs, "finished", tuple, Finished)
    for ending in outputs.finished:
        _check_type(ending, "reason", FinishReason)
    for name in ("logprobs", "prompt_logprobs"):
        _check_mapping(outputs, name, str, LogprobColumns)
    _check_mapping(outputs, "num_cached_tokens", str, int)
    if outputs.stats is not None:
        _check(outputs.stats, SchedulerStats)


def check_depth_types(depth: Depth) -> None:
    """Check that the counts have the types that `Depth` declares."""
    _check(depth, Depth)


def _check(created: Any, kind: type) -> None:
    """Check the type of an object, of its columns, and of its fields with numbers and strings."""
    if not isinstance(created, kind):
        raise AssertionError(f"a {_name(created)} was returned; expected a {kind.__name__}")
    for name, code in _COLUMNS.get(kind, {}).items():
        column = getattr(created, name)
        if not isinstance(column, array) or column.typecode != code:
            typecode = getattr(column, "typecode", None)
            shown = f"array({typecode!r})" if typecode else _name(column)
            raise _wrong(kind, name, shown, f"array({code!r})")
    for name, plain in _plain_fields(kind):
        if type(getattr(created, name)) is not plain:
            raise _wrong(kind, name, _name(getattr(created, name)), plain.__name__)


@cache
def _plain_fields(kind: type) -> tuple[tuple[str, type], ...]:
    return tuple((field.name, _PLAIN[field.type]) for field in fields(kind) if field.type in _PLAIN)


def _check_type(created: Any, name: str, kind: type) -> None:
    value = getattr(created, name)
    if not isinstance(value, kind):
        raise _wrong(type(created), name, _name(value), kind.__name__)


def _check_items(created: Any, name: str, container: type, kind: type) -> None:
    _check_type(created, name, container)
    for item in getattr(created, name):
        if not isinstance(item, kind):
            held = f"{container.__name__} with {_name(item)}"
            raise _wrong(type(created), name, held, kind.__name__)
        if kind in _COLUMNS or kind is Finished:
            _check(item, kind)


def _check_mapping(created: Any, name: str, key_kind: type, kind: type) -> None:
    _check_type(created, name, Mapping)
    for key, item in getattr(created, name).items():
        if not isinstance(key, key_kind) or not isinstance(item, kind):
            held = f"{_name(key)} to {_name(item)}"
            raise _wrong(type(created), name, held, f"{key_kind.__name__} to {kind.__name__}")
        if kind in _COLUMNS:
            _check(item, kind)


def _wrong(kind: type, name: str, description: str, due: str) -> AssertionError:
    return AssertionError(f"the type of {kind.__name__}.{name} is {description}; expected {due}")


def _name(value: object) -> str:
    return type(value).__name__
