"""Even and odd take turns: prompts of the other parity than the last admitted are served next."""

from collections.abc import Generator

from dovetail.interfaces import CONTINUE, Action, Grant, Policy, RequestView, Run, SchedulerView


class TurnsPolicy(Policy):
    """Admit in turn from those with an even and an odd number of prompt tokens."""

    static_rank = False

    def __init__(self) -> None:
        self._last = 0

    def rank(self, request: RequestView, view: SchedulerView) -> tuple[bool, int]:
        """Return (whether it has the parity that was served last, arrival order)."""
        return request.num_prompt_tokens % 2 == self._last, request.sequence

    def plan(self, view: SchedulerView) -> Generator[Action, Grant, None]:
        """Continue all running requests, then admit from the parity whose turn it is."""
        yield CONTINUE
        waiting = list(view.waiting)
        while waiting:
            request = min(waiting, key=lambda one: self.rank(one, view))
            if not (yield Run(request)):
                return
            waiting.remove(request)
            self._last = request.num_prompt_tokens % 2
