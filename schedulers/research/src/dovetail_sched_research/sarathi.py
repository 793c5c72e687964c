"""Sarathi: prompts come in chunks beside the decodes, so that no decode ever waits.

Source: Agrawal et al., "Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve",
OSDI 2024, arXiv:2403.02310. Bounds the time between two tokens by the cost of a step of `chunk`
tokens, whatever arrives.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from itertools import chain
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, Field

from dovetail.interfaces import CONTINUE, Action, Grant, Policy, Run, SchedulerView


class SarathiOptions(BaseModel):
    """The options. chunk: tokens a step, decodes among them; the paper's τ."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    chunk: int = Field(default=512, ge=1)


class SarathiPolicy(Policy):
    """All decodes, then prompts under way, then new ones, up to `chunk` tokens a step."""

    options_model: ClassVar[type[BaseModel]] = SarathiOptions
    work_conserving = False

    def __init__(self, options: Mapping[str, object] | None = None) -> None:
        self._chunk = SarathiOptions.model_validate(options or {}).chunk

    def plan(self, view: SchedulerView) -> Generator[Action, Grant, None]:
        """Run every decode; give what is left of the chunk to prompts, one after the other."""
        left = self._chunk
        running = view.running
        prompts = [one for one in running if view.num_uncomputed_tokens(one) > 1]
        # One action for all where all decode; where not, it would run the prompts' rest, too.
        decodes = [Run(one) for one in running if one not in prompts] if prompts else [CONTINUE]
        for action in decodes:
            left -= (yield action).num_tokens
        for request in chain(prompts, view.waiting):
            if left <= 0:
                return
            grant = yield Run(request, left)
            if not grant and left == self._chunk:
                grant = yield Run(request)  # where prompts may not be cut, it comes whole and alone
            if not grant and request not in prompts:
                return  # nobody passes one that waits; one that runs may wait for a later one
            left -= grant.num_tokens
