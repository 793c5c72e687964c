"""Dovetail: LLM inference in which every part is a plugin.

Public names are imported when they are first used, so that importing this package is fast.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dovetail.config import EngineArgs
    from dovetail.engine.async_llm import AsyncLLM
    from dovetail.engine.llm_engine import LLMEngine
    from dovetail.entrypoints.llm import LLM
    from dovetail.inputs import TextPrompt, TokensPrompt
    from dovetail.outputs import (
        CompletionOutput,
        PoolingRequestOutput,
        RequestOutput,
        RequestOutputKind,
    )
    from dovetail.plan import StepBuilder
    from dovetail.pooling_params import PoolingParams
    from dovetail.rows import RowAllocator
    from dovetail.sampling_params import SamplingParams

__version__ = "0.1.0"

_HOMES = {
    "LLM": "dovetail.entrypoints.llm",
    "AsyncLLM": "dovetail.engine.async_llm",
    "CompletionOutput": "dovetail.outputs",
    "EngineArgs": "dovetail.config",
    "LLMEngine": "dovetail.engine.llm_engine",
    "PoolingParams": "dovetail.pooling_params",
    "PoolingRequestOutput": "dovetail.outputs",
    "RequestOutput": "dovetail.outputs",
    "RequestOutputKind": "dovetail.outputs",
    "RowAllocator": "dovetail.rows",
    "SamplingParams": "dovetail.sampling_params",
    "ReasoningParams": "dovetail.sampling_params",
    "StructuredOutputsParams": "dovetail.sampling_params",
    "StepBuilder": "dovetail.plan",
    "TextPrompt": "dovetail.inputs",
    "TokensPrompt": "dovetail.inputs",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "EngineArgs",
    "LLMEngine",
    "PoolingParams",
    "PoolingRequestOutput",
    "ReasoningParams",
    "RequestOutput",
    "RequestOutputKind",
    "RowAllocator",
    "SamplingParams",
    "StepBuilder",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, imported or not."""
    return sorted([*globals(), *_HOMES])
