"""Sarathi: prompts are split into chunks that run together with all decodes.

Source: Agrawal et al., "Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve",
OSDI 2024, arXiv:2403.02310. The time between two tokens is at most the duration of a step of
`chunk` tokens, independent of arrivals.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from itertools import chain
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, Field

from dovetail.interfaces import CONTINUE, Action, Grant, Policy, Run, SchedulerView


class SarathiOptions(BaseModel):
    """The options. chunk: tokens per step, including decodes. Τ in the paper."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    chunk: int = Field(default=512, ge=1)


class SarathiPolicy(Policy):
    """Runs all decodes, then started prefills, then new ones, up to `chunk` tokens per step."""

    options_model: ClassVar[type[BaseModel]] = SarathiOptions
    work_conserving = False

    def __init__(self, options: Mapping[str, object] | None = None) -> None:
        self._chunk = SarathiOptions.model_validate(options or {}).chunk

    def plan(self, view: SchedulerView) -> Generator[Action, Grant, None]:
        """Run every decode, then fill the rest of the chunk with prefills, one by one."""
        left = self._chunk
        running = view.running
        prompts = [item for item in running if view.num_uncomputed_tokens(item) > 1]
        # CONTINUE would also run the rest of started prefills, so it is used for decodes only.
        decodes = [Run(item) for item in running if item not in prompts] if prompts else [CONTINUE]
        for action in decodes:
            left -= (yield action).num_tokens
        for request in chain(prompts, view.waiting):
            if left <= 0:
                return
            grant = yield Run(request, left)
            if not grant and left == self._chunk:
                grant = yield Run(request)  # without chunked prefill, the whole prompt runs alone
            if not grant and request not in prompts:
                return  # keeps the order of arrival among the waiting requests
            left -= grant.num_tokens
