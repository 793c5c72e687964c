"""The contract of a step extension: a feature that takes part in the steps of some requests.

Extensions run in the worker, in the order of `EngineArgs.step_extensions`, after the logits
processors. A request takes part where `join` returns True; each hook is then called with the rows
of those requests only, and a step without such rows calls nothing.
Legend: T tokens of the extension's rows, D hidden size, R rows that sample, V vocabulary.
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
    """All that a step extension is made from.

    model: the loaded model. vocab_size: width of the logits. max_num_seqs: rows are below it.
    max_model_len: tokens of a row. device: of all tensors. rank, world_size: of the worker.
    options: the user's, from `plugin_options`.
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
    """The extension's rows in one step, in plan order; all columns have one entry a row.

    rows: each once. starts, num_tokens: the step computes tokens [start, start + n) of the row.
    samples: whether the step samples the row's next token. first_tokens: where the row's tokens
    begin among the `total_num_tokens` tokens of the whole step.
    """

    rows: Sequence[int]
    starts: Sequence[int]
    num_tokens: Sequence[int]
    samples: Sequence[bool]
    first_tokens: Sequence[int]
    total_num_tokens: int


class StepExtension(ABC):
    """Takes part in the steps of the requests that ask for it. Override the hooks you need.

    Order in a step: leaves, joins, `before_forward`, the model, `hidden_states`, the model's head,
    `logits`, the choice of tokens, `after_sampling`. Hooks that are not overridden are not called.

    Rules.
    - A row takes part from a `join` that returned True until its `leave` or its next `join`. After
      a preemption the request joins again, on any row, with all its tokens.
    - What a row gets depends on its own tokens and parameters, never on the other rows.
    - With several ranks every rank makes the extension and must compute the same.
    - A hook that raises is called again for each of its rows alone. The requests whose own call
      raises end with an error; all others continue. So a hook changes what it keeps only after the
      last line that may raise.
    - All calls come from one thread, in torch's inference mode, with tensors on the device.
      Reading a tensor on the host waits for the device.
    A request asks through `SamplingParams.extra_args`.
    example_args: `extra_args` of a request that takes part, for documentation and suites.
    """

    CONTRACT: ClassVar[str] = "step_extension"
    CONTRACT_VERSION: ClassVar[str] = "0.1"
    example_args: ClassVar[Mapping[str, object]]

    @abstractmethod
    def __init__(self, context: StepExtensionContext) -> None:
        """Make it for one worker; no row takes part yet."""

    @classmethod  # noqa: B027  # a default that may stay
    def check_params(cls, params: SamplingParams) -> None:
        """Raise RequestError, naming the key of `extra_args`, for arguments that are not valid.

        The engine calls this for each request before it accepts it. The default accepts all.
        """

    @abstractmethod
    def join(self, row: int, request: NewRequest) -> bool:
        """Let `request` take `row`; return whether it takes part.

        `request.token_ids` are all its tokens so far, those before a preemption included.
        """

    @abstractmethod
    def leave(self, row: int) -> None:
        """Forget `row`; do nothing if it does not take part."""

    def before_forward(self, batch: ExtensionBatch) -> None:  # noqa: B027
        """Prepare what the model's forward pass of this step needs."""

    def hidden_states(self, batch: ExtensionBatch, hidden_TD: torch.Tensor) -> torch.Tensor | None:
        """Return the hidden states to continue with, like `hidden_TD`; None to leave them.

        hidden_TD: the model's last hidden states of the rows' tokens, row after row; a copy.
        A model whose hidden states are divided among ranks hands out its own part.
        """
        return None

    def logits(self, rows: Sequence[int], logits_RV: torch.Tensor) -> torch.Tensor:
        """Return the logits to choose from, like `logits_RV`.

        logits_RV: float32, after masks, penalties and logits processors; a copy, row i of rows[i].
        Leave -inf as it is, and each row at least one finite logit.
        """
        return logits_RV

    def after_sampling(  # noqa: B027
        self, rows: Sequence[int], token_ids_R: torch.Tensor
    ) -> None:
        """Take note of the tokens that were chosen: rows[i] got token_ids_R[i], int64.

        Results at depth 2: a token counts even if the request ends with it or before it.
        """
