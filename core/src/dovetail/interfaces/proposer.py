"""A sketch of the contract of a proposer: it drafts tokens that the model then verifies.

Version 0.x without an implementation: whoever writes the first one may still change it. The idea:
it lives in the worker, is notified of rows as the sampler does, and gives a few tokens a row.
Legend: R rows, D drafted tokens of all rows one after the other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from dovetail.interfaces.worker import WorkerContext
from dovetail.plan import NewRequest
from dovetail.retired_names import refuse_retired

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class ProposerContext:
    """All that a proposer is made from. num_tokens: most that it may draft a row and step."""

    worker: WorkerContext
    num_tokens: int
    device: torch.device
    options: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposerInput:
    """The rows to draft for.

    rows: each once. hidden_RD: the model's last hidden state of each, where the proposer wants it
    ("hidden_states" in `inputs`), else None.
    """

    rows: Sequence[int]
    hidden_RD: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafts:
    """counts: drafted tokens of each asked row, 0 allowed. token_ids_D: int64, on the device."""

    counts: Sequence[int]
    token_ids_D: torch.Tensor


class Proposer(ABC):
    """Drafts tokens. What it drafts changes speed only, never which tokens come out.

    inputs: what it wants beside rows, such as "hidden_states".
    """

    CONTRACT: ClassVar[str] = "proposer"
    CONTRACT_VERSION: ClassVar[str] = "0.2"
    inputs: ClassVar[frozenset[str]] = frozenset()

    @abstractmethod
    def __init__(self, context: ProposerContext) -> None:
        """Keep `context`; load nothing yet."""

    @abstractmethod
    def load(self) -> None:
        """Load what it drafts with; raise ModelError if it does not suit the model."""

    @abstractmethod
    def join(self, request: NewRequest) -> None:
        """Let `request` take its row, from scratch."""

    @abstractmethod
    def leave(self, row: int) -> None:
        """Forget `row`."""

    @abstractmethod
    def accept(self, rows: Sequence[int], counts: Sequence[int], token_ids: torch.Tensor) -> None:
        """Append to rows[i] its counts[i] tokens of `token_ids`: what was verified and sampled."""

    @abstractmethod
    def propose(self, ask: ProposerInput) -> Drafts:
        """Return drafts for the rows asked for."""


if not TYPE_CHECKING:  # a type checker reports an unknown name itself
    __getattr__ = refuse_retired(__name__)
