"""The contract of a logits processor: it changes the scores of the next token, row by row.

It runs in the worker, once a step, after the grammar, the request's own masks and biases, and the
penalties; and before the best token is taken or the logits are divided by the temperature. It sees
rows and logits; never a plan, a block or a text.
Legend: S rows of the step, V vocabulary, R rows of this processor among them.
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
    """All that a logits processor is made from.

    vocab_size: width of the logits. max_num_seqs: rows are below it. device: of the logits.
    options: the user's, from `plugin_options`.
    """

    vocab_size: int
    max_num_seqs: int
    device: torch.device
    options: Mapping[str, object] = field(default_factory=dict)


class LogitsProcessor(ABC):
    """Changes the logits of the rows that asked for it.

    Contract. A row takes part from a `join` that returned True until its `leave` or its next
    `join`. The other methods are called only for steps in which a row takes part, and a step
    without such rows costs nothing. The logits of all other rows stay as they are, bit for bit.
    What is -inf stays -inf, and no row is left without a finite logit that had one: a wish that
    would do so is passed over. What a row gets depends on its own tokens and parameters, never on
    its batch mates. A request states its wishes in `SamplingParams.extra_args`. All calls come from
    one thread.
    example_args: `extra_args` of a request that takes part, for documentation and suites.
    """

    CONTRACT: ClassVar[str] = "logits_processor"
    CONTRACT_VERSION: ClassVar[str] = "0.1"
    example_args: ClassVar[Mapping[str, object]]

    @abstractmethod
    def __init__(self, context: LogitsProcessorContext) -> None:
        """Make it for one worker; no row takes part yet."""

    @classmethod  # noqa: B027  # a default that may stay
    def check_params(cls, params: SamplingParams) -> None:
        """Raise RequestError, naming the key of `extra_args`, for wishes that cannot be met.

        Called by the engine for each request before it is taken in, whatever front end it came
        through; `join` only ever sees what passed. The default takes everything.
        """

    @abstractmethod
    def join(self, request: NewRequest) -> bool:
        """Let `request` take its row, from scratch; return whether the row takes part.

        `request.token_ids` are all its tokens so far, those before a preemption included.
        """

    @abstractmethod
    def leave(self, row: int) -> None:
        """Forget `row`; nothing happens if it does not take part."""

    @abstractmethod
    def apply(self, logits_SV: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Return the changed logits: `logits_SV` itself, changed in place, or others like it.

        logits_SV: float32, on the context's device; row i belongs to rows[i]. rows: all rows of the
        step, each once; at least one takes part. May be called more than once before `accept`.
        """

    def accept(  # noqa: B027  # a default that may stay
        self, rows: Sequence[int], token_ids_R: torch.Tensor
    ) -> None:
        """Append to each of `rows` the token that was chosen for it. The default keeps nothing.

        rows: those of the step that take part. token_ids_R: int64, on the context's device, only
        to be read. Reading it on the host waits for the device.
        """
