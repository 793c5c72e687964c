"""The contract of a step extension: a feature that reads or changes the steps of some requests.

Extensions run in the worker, in the order of `EngineArgs.step_extensions`, after the logits
processors. A request uses the extension if `join` returns True. Each hook is called with the rows
(batch slots) of those requests only, and a step without such requests calls no hook.
Dimensions: T tokens of these requests, D hidden size, R requests that sample, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from dovetail.plan import NewRequest
from dovetail.sampling_params import SamplingParams

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class StepExtensionContext:
    """Constructor arguments of a step extension.

    model: the loaded model. vocab_size: width of the logits. max_num_seqs: row indices are less
    than this number. max_model_len: maximum tokens of a request. device: device of all tensors.
    rank: index of this worker. world_size: number of workers. options: the user's options from
    `plugin_options`, validated.
    """

    model: Any
    vocab_size: int
    max_num_seqs: int
    max_model_len: int
    device: torch.device
    rank: int = 0
    world_size: int = 1
    options: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtensionBatch:
    """The requests of one step that use the extension, in plan order.

    Each column has one entry per request. rows: the batch slots of the requests, each once.
    starts, num_tokens: the step computes tokens [start, start + n) of the request.
    samples: whether the step samples the request's next token. first_tokens: index of the request's
    first token among the `total_num_tokens` tokens of the whole step.
    """

    rows: Sequence[int]
    starts: Sequence[int]
    num_tokens: Sequence[int]
    samples: Sequence[bool]
    first_tokens: Sequence[int]
    total_num_tokens: int


class StepExtension(ABC):
    """Reads or changes the steps of the requests that use it. Override only the hooks you need.

    Order in a step: `leave`, `join`, `before_forward`, the model,
    `hidden_states`, the LM head, `logits`, sampling, `after_sampling`. Hooks that are not
    overridden are not called.

    Rules.
    - A request uses the extension from a `join` that returned True until the `leave` or the next
    `join` of its row. After a preemption, `join` is called again with all tokens, possibly with
    another row.
    - The result for a request depends on its own tokens and parameters, never on other requests.
    - With several ranks every rank has an instance, and all must compute the same.
    - If a hook raises, it is called again for each request separately. Requests whose call raises
      again end with an error; the others continue. So a hook must change its state only after the
      last statement that may raise.
    - All calls come from one thread, in torch's inference mode, with tensors on the device.
      Reading a tensor on the host waits for the device.
    - Requests pass arguments in `SamplingParams.extra_args`.
    example_args: `extra_args` of a request that uses the extension, for documentation and suites.
    """

    CONTRACT: ClassVar[str] = "step_extension"
    CONTRACT_VERSION: ClassVar[str] = "0.1"
    example_args: ClassVar[Mapping[str, object]]

    @abstractmethod
    def __init__(self, context: StepExtensionContext) -> None:
        """Create the extension of one worker. No request uses it yet."""

    @classmethod  # noqa: B027  # optional to override
    def check_params(cls, params: SamplingParams) -> None:
        """Raise RequestError, naming the key of `extra_args`, if an argument is not valid.

        The engine calls it before it accepts a request. The default accepts everything.
        """

    @abstractmethod
    def join(self, row: int, request: NewRequest) -> bool:
        """Assign `row` to `request`. Return whether the request uses the extension.

        `request.token_ids` are all tokens of the request so far, including those before a
        preemption.
        """

    @abstractmethod
    def leave(self, row: int) -> None:
        """Drop the state of the request in `row`, if it uses the extension."""

    def before_forward(self, batch: ExtensionBatch) -> None:  # noqa: B027
        """Prepare the forward pass of this step."""

    def hidden_states(self, batch: ExtensionBatch, hidden_TD: torch.Tensor) -> torch.Tensor | None:
        """Return changed hidden states with the shape of `hidden_TD`, or None to change nothing.

        hidden_TD: a copy of the model's last hidden states for the tokens of the requests, in
            order. If hidden states are sharded over ranks, each rank gets its own shard.
        """
        return None

    def logits(self, rows: Sequence[int], logits_RV: torch.Tensor) -> torch.Tensor:
        """Return the logits to sample from, with the shape of `logits_RV`.

        logits_RV: a float32 copy after masks, penalties and logits processors; row i belongs to
            rows[i]. Do not change -inf, and keep at least one finite logit in each row.
        """
        return logits_RV

    def after_sampling(  # noqa: B027
        self, rows: Sequence[int], token_ids_R: torch.Tensor
    ) -> None:
        """Process the sampled tokens: token_ids_R[i], int64, is the new token of rows[i].

        At pipeline depth 2, the method also gets tokens that are sampled after the end of a
        request.
        """
