"""The outputs of a request, with the names and meanings of vLLM.

The receiver owns these objects. The outputs of one request share the list of prompt tokens. For
speed in streaming they are not frozen and accept positional fields: creating a frozen object takes
three times as long, keyword arguments twice as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from dovetail.logprobs import Logprob, LogprobSequence, TokenLogprobs
from dovetail.result import PooledTensor

__all__ = [
    "ChatMessage",
    "CompletionOutput",
    "Logprob",
    "LogprobSequence",
    "PoolingOutput",
    "PoolingRequestOutput",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "TokenLogprobs",
    "ToolCall",
]


class RequestOutputKind(Enum):
    """The content of each RequestOutput of a request.

    CUMULATIVE: everything so far. DELTA: only new content. FINAL_ONLY: everything, at the end.
    """

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call of a function by the model. arguments: the text, which should be a JSON object."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """A model's message, split into its parts.

    content: None if the message has only calls or reasoning. reasoning: None without reasoning.
    """

    content: str | None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the message for the next request of the conversation, in OpenAI's form."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": tool_call.id,
                    "type": "function",
                    "function": {"name": tool_call.name, "arguments": tool_call.arguments},
                }
                for tool_call in self.tool_calls
            ]
        return message


@dataclass(slots=True)
class CompletionOutput:
    """One completion of a prompt.

    index: index of the completion among the `n` completions of the request.
    text: without the stop string or stop token, unless `include_stop_str_in_output`.
    token_ids: including the stop token. cumulative_logprob: sum over all tokens so far.
    logprobs: one entry per token, a `LogprobSequence`. Both are None unless log-probabilities were
        requested.
    finish_reason: "stop", "length", "abort" or "error"; None while it is running.
    stop_reason: the stop string or the id of the stop token that ended it; None for EOS.
    message: the message in the text, with `LLM.chat`; None otherwise.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: Sequence[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    message: ChatMessage | None = None

    def finished(self) -> bool:
        """Return whether the completion has ended."""
        return self.finish_reason is not None


@dataclass(slots=True)
class PoolingOutput:
    """The pooled result of a prompt.

    data: the features of the prompt, or one list of features for each token with the task
    "token_embed". `embedding`, `probs` and `score` are the same data under the name of its task.
    """

    data: Any

    @classmethod
    def of(cls, pooled: PooledTensor) -> PoolingOutput:
        """Return the result with lists of float."""
        values = pooled.values
        if len(pooled.shape) == 1:
            return cls(values.tolist())
        num_rows, size = pooled.shape
        # Row by row, so that other threads can run in between.
        return cls([values[row * size : (row + 1) * size].tolist() for row in range(num_rows)])

    @property
    def embedding(self) -> list[float]:
        """The embedding (task "embed")."""
        return list(self.data)

    @property
    def probs(self) -> list[float]:
        """The probability of each class (task "classify")."""
        return list(self.data)

    @property
    def score(self) -> float:
        """The only value of the result (task "score")."""
        (value,) = self.data
        return float(value)


@dataclass(slots=True)
class PoolingRequestOutput:
    """The output of a pooling request.

    outputs: the result, or None with the cause in `error` and a `finish_reason` other than "stop".
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: PoolingOutput | None
    metrics: RequestMetrics
    num_cached_tokens: int = 0
    error: str | None = None
    finish_reason: str | None = None
    finished: bool = True

    @classmethod
    def of(cls, output: RequestOutput) -> PoolingRequestOutput:
        """Return the pooled part of a finished request's output."""
        pooled = None if output.pooled is None else PoolingOutput.of(output.pooled)
        error = output.error
        if pooled is None and error is None:
            error = "The request was aborted."
        return cls(
            output.request_id,
            output.prompt,
            output.prompt_token_ids,
            pooled,
            output.metrics,
            output.num_cached_tokens,
            error,
            output.outputs[0].finish_reason if output.outputs else None,
        )


@dataclass(slots=True)
class RequestMetrics:
    """Times of a request, in nanoseconds of the engine's clock.

    first_token_ns, finished_ns: None before the event. admitted_ns: when the engine first ran the
        request; None before its first token.
    """

    arrival_ns: int
    first_token_ns: int | None = None
    finished_ns: int | None = None
    admitted_ns: int | None = None


@dataclass(slots=True)
class RequestOutput:
    """The output of one request.

    prompt: the text, or None if token ids were given.
    outputs: completions in the order of their index; with DELTA only those with new content.
    prompt_logprobs: one entry per prompt token, None for the first one; with DELTA only in the
        first RequestOutput.
    num_cached_tokens: prompt tokens found in the prefix cache.
    error: the error message if a completion finished with "error". pooled: the result of a pooling
        request, which has no new tokens.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    prompt_logprobs: Sequence[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    pooled: PooledTensor | None = None
