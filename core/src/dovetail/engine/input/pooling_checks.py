"""Checks of pooling requests against the tasks and sizes of the model.

The front end runs them to report errors early, and the engine runs them again.
"""

from __future__ import annotations

from dataclasses import replace

from dovetail.errors import RequestError
from dovetail.interfaces.worker import ModelInfo
from dovetail.pooling_params import EMBEDDING_TASKS, POOLING_TASKS, TOKEN_EMBED, PoolingParams
from dovetail.request import EngineCoreRequest

GENERATE = "generate"
MAX_POOLED_BYTES = 32 << 20
"""Maximum size of one pooled result; a message between processes can hold twice as much."""
_VALUE_BYTES = 4


def pooling_tasks(info: ModelInfo) -> tuple[str, ...]:
    """Return the pooling tasks of the model, in the model's order."""
    return tuple(task for task in info.supported_tasks if task in POOLING_TASKS)


def resolve_pooling(params: PoolingParams | None, info: ModelInfo) -> PoolingParams:
    """Return checked parameters with a task. Raise RequestError for an unsupported task."""
    if params is None:
        params = PoolingParams()
    if type(params) is not PoolingParams:
        raise RequestError(
            f"pooling_params must be PoolingParams, not {type(params).__name__}.",
            parameter="pooling_params",
        )
    tasks = pooling_tasks(info)
    if params.task is None and tasks:
        params = replace(params, task=tasks[0])
    if params.task not in tasks:
        requested = "pooling" if params.task is None else f"the task {params.task!r}"
        raise RequestError(
            f"The model does not support {requested}; it supports: "
            f"{', '.join(info.supported_tasks)}.",
            parameter="task",
        )
    return params


def check_pooling(request: EngineCoreRequest, info: ModelInfo) -> None:
    """Raise RequestError unless the model supports the request."""
    params, num_tokens = request.pooling_params, len(request.prompt_token_ids)
    if params is None:
        if GENERATE not in info.supported_tasks:
            raise RequestError(
                "The model does not support text generation; it supports: "
                f"{', '.join(info.supported_tasks)}. Use the method or route of one of these tasks."
            )
        return
    resolved = resolve_pooling(params, info)
    resolved.validate()
    if resolved.second_text_start >= num_tokens > 0:
        raise RequestError(
            f"second_text_start={resolved.second_text_start} must be less than the number of "
            f"prompt tokens ({num_tokens}).",
            parameter="second_text_start",
        )
    if resolved.task in EMBEDDING_TASKS:
        _check_size(resolved, info, num_tokens)


def _check_size(params: PoolingParams, info: ModelInfo, num_tokens: int) -> None:
    size, dimensions = info.embedding_size, params.dimensions
    if dimensions is not None:
        allowed = info.embedding_dimensions
        if dimensions > size or (allowed and dimensions not in (*allowed, size)):
            choice = f"one of {', '.join(map(str, allowed))}" if allowed else f"at most {size}"
            raise RequestError(
                f"dimensions={dimensions} is not supported: the model has embeddings of {size} "
                f"features; use {choice}.",
                parameter="dimensions",
            )
    num_bytes = num_tokens * (dimensions or size) * _VALUE_BYTES
    if params.task == TOKEN_EMBED and num_bytes > MAX_POOLED_BYTES:
        raise RequestError(
            f"the embeddings of {num_tokens} tokens need {num_bytes >> 20} MiB, but a result has "
            f"at most {MAX_POOLED_BYTES >> 20} MiB. Shorten the prompt, or lower dimensions.",
            parameter="prompt",
        )
