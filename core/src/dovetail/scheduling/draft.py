"""A step in the making: what has been granted so far, and the one way to take a grant back.

Nothing of a request changes while a step is drafted but its blocks; requests advance when the
draft is emitted. So evicting a request that was already granted is one deletion.
"""

from __future__ import annotations

from array import array

from dovetail.plan import NewRequest, SchedulerOutput, StepBuilder
from dovetail.request import Request


class StepDraft:
    """Grants of one step, in plan order.

    granted, counts: the requests that run, and how many tokens of each.
    tokens_left: of the step's budget.
    """

    def __init__(self, max_num_batched_tokens: int) -> None:
        self.tokens_left = max_num_batched_tokens
        self.granted: list[Request] = []
        self.counts: list[int] = []
        self._joined: list[Request] = []
        self._grown: list[tuple[Request, list[int]]] = []

    def grant(self, request: Request, num_tokens: int) -> None:
        """Let `request` run `num_tokens` tokens in this step."""
        self.granted.append(request)
        self.counts.append(num_tokens)
        self.tokens_left -= num_tokens

    def join(self, request: Request) -> None:
        """Note that `request` takes its row, and its blocks, with this step."""
        self._joined.append(request)

    def grow(self, request: Request, blocks: list[int]) -> None:
        """Note that a running request got `blocks`."""
        self._grown.append((request, blocks))

    def revoke(self, request: Request) -> bool:
        """Take back whatever the step has given to `request`; return whether it joined in it."""
        if request in self.granted:
            position = self.granted.index(request)
            self.granted.pop(position)
            self.tokens_left += self.counts.pop(position)
        joined = request in self._joined
        if joined:
            self._joined.remove(request)
        self._grown = [entry for entry in self._grown if entry[0] is not request]
        return joined

    def emit(self, builder: StepBuilder) -> SchedulerOutput:
        """Build the plan and advance the granted requests to what it will have computed."""
        for request in self._joined:
            builder.join(NewRequest.of(request))
            for group, blocks in enumerate(request.blocks):
                builder.grow(request.row, blocks, group=group)
        for request, blocks in self._grown:
            builder.grow(request.row, blocks)
        starts = array("i")
        samples = array("B")
        for request, count in zip(self.granted, self.counts, strict=True):
            start = request.num_computed_tokens
            end = start + count
            starts.append(start)
            request.num_computed_tokens = end
            known = request.num_tokens_with_pending
            if end == known:
                request.num_tokens_with_pending = known + 1
                samples.append(1)
            else:
                samples.append(0)
        builder.run_many([r.row for r in self.granted], starts, self.counts, samples)
        return builder.build()
