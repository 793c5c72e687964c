"""The contract of a logits processor: it changes the logits of each request's next token.

It runs in the worker, once per step, after the grammar, the request's masks and biases, and the
penalties, and before greedy sampling or the temperature. A row is the batch slot of a request. The
processor gets rows and logits, but no plans, blocks or text.
Dimensions: S requests of the step, V vocabulary, R requests of the step that use the processor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from dovetail.plan import NewRequest
from dovetail.sampling_params import SamplingParams

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class LogitsProcessorContext:
    """Constructor arguments of a logits processor.

    vocab_size: width of the logits. max_num_seqs: row indices are less than this number. device:
    device of the logits.
    options: the user's options from `plugin_options`.
    """

    vocab_size: int
    max_num_seqs: int
    device: torch.device
    options: Mapping[str, object] = field(default_factory=dict)


class LogitsProcessor(ABC):
    """Changes the logits of the requests that use it.

    Requests pass arguments in `SamplingParams.extra_args`. All calls come from one thread.

    Contract: A request uses the processor if `join` returned True for it, until `leave` or the next
    `join` of its row. The other methods are called only for steps in which a request uses the
    processor. The logits of all other requests stay bitwise equal. A logit of -inf stays -inf, and
    a request with a finite logit keeps at least one: a change that would remove the last one is not
    applied. The result for a request depends on its own tokens and parameters, never on other
    requests.
    example_args: `extra_args` of a request that uses the processor, for documentation and test
    suites.
    """

    CONTRACT: ClassVar[str] = "logits_processor"
    CONTRACT_VERSION: ClassVar[str] = "0.1"
    example_args: ClassVar[Mapping[str, object]]

    @abstractmethod
    def __init__(self, context: LogitsProcessorContext) -> None:
        """Create the processor of one worker. No request uses it yet."""

    @classmethod  # noqa: B027  # optional to override
    def check_params(cls, params: SamplingParams) -> None:
        """Raise RequestError, naming the key of `extra_args`, if an argument is not valid.

        The engine calls it before it accepts a request, so `join` only gets valid arguments. The
        default accepts everything.
        """

    @abstractmethod
    def join(self, request: NewRequest) -> bool:
        """Reset the request's row. Return whether the request uses the processor.

        `request.token_ids` are all tokens of the request so far, including those before a
        preemption.
        """

    @abstractmethod
    def leave(self, row: int) -> None:
        """Drop the state of the request in `row`, if it uses the processor."""

    @abstractmethod
    def apply(self, logits_SV: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Return the changed logits: `logits_SV`, changed in place, or a new tensor of its shape.

        logits_SV: float32, on the context's device; row i belongs to rows[i]. rows: the rows of all
        requests of the step, each once; at least one uses the processor. May be called more than
        once before `accept`.
        """

    def accept(  # noqa: B027  # optional to override
        self, rows: Sequence[int], token_ids_R: torch.Tensor
    ) -> None:
        """Append a sampled token to each request in `rows`. The default does nothing.

        rows: the rows of the requests that use the processor. token_ids_R: int64, on the context's
        device, read only. Reading it on the host waits for the device.
        """
