"""A draft contract of a proposer, which proposes draft tokens that the model then verifies.

There is no implementation yet, and the first one may still change the contract. A proposer runs in
the worker, is notified of new and ended requests, like the sampler, and proposes a few tokens per
request.
Dimensions: R requests, D drafted tokens of all requests, concatenated.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from dovetail.interfaces.worker import WorkerContext
from dovetail.plan import NewRequest
from dovetail.retired_names import reject_retired

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class ProposerContext:
    """Constructor arguments of a proposer. num_tokens: maximum drafts per request and step."""

    worker: WorkerContext
    num_tokens: int
    device: torch.device
    options: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposerInput:
    """The requests for which draft tokens are proposed, by batch slot (`row`).

    rows: no row occurs twice. hidden_RD: the model's last hidden state of each request if
    `Proposer.inputs` has "hidden_states", else None.
    """

    rows: Sequence[int]
    hidden_RD: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafts:
    """Drafted tokens.

    counts: number of drafts for each request, possibly 0. token_ids_D: int64, on the device.
    """

    counts: Sequence[int]
    token_ids_D: torch.Tensor


class Proposer(ABC):
    """Drafts tokens. Drafts change the speed, never the tokens of a request.

    inputs: additional inputs that it needs, such as "hidden_states".
    """

    CONTRACT: ClassVar[str] = "proposer"
    CONTRACT_VERSION: ClassVar[str] = "0.2"
    inputs: ClassVar[frozenset[str]] = frozenset()

    @abstractmethod
    def __init__(self, context: ProposerContext) -> None:
        """Store `context`. Do not load yet."""

    @abstractmethod
    def load(self) -> None:
        """Load the draft model. Raise ModelError if it is not compatible with the model."""

    @abstractmethod
    def join(self, request: NewRequest) -> None:
        """Assign its row to `request`. Drop the earlier state of the row."""

    @abstractmethod
    def leave(self, row: int) -> None:
        """Drop the state of `row`."""

    @abstractmethod
    def accept(self, rows: Sequence[int], counts: Sequence[int], token_ids: torch.Tensor) -> None:
        """Append the next counts[i] tokens of `token_ids`, verified or sampled, to rows[i]."""

    @abstractmethod
    def propose(self, ask: ProposerInput) -> Drafts:
        """Return drafts for the requests in `ask`."""


if not TYPE_CHECKING:  # a type checker reports an unknown name itself
    __getattr__ = reject_retired(__name__)
