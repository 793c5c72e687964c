"""A policy that alternates between prompts of even and of odd length."""

from collections.abc import Generator

from dovetail.interfaces import CONTINUE, Action, Grant, Policy, RequestView, Run, SchedulerView


class TurnsPolicy(Policy):
    """Alternates between prompts with an even and with an odd number of tokens."""

    static_rank = False

    def __init__(self) -> None:
        self._last = 0

    def rank(self, request: RequestView, view: SchedulerView) -> tuple[bool, int]:
        """Return (whether the prompt has the same parity as the last admitted prompt, arrival
        order)."""
        return request.num_prompt_tokens % 2 == self._last, request.sequence

    def plan(self, view: SchedulerView) -> Generator[Action, Grant, None]:
        """Continue all running requests, then admit requests of the other parity first."""
        yield CONTINUE
        waiting = list(view.waiting)
        while waiting:
            request = min(waiting, key=lambda item: self.rank(item, view))
            if not (yield Run(request)):
                return
            waiting.remove(request)
            self._last = request.num_prompt_tokens % 2
