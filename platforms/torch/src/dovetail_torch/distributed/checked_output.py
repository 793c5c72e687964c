"""The result of a step on several ranks: reading it raises an error if a rank has exited.

An aborted collective operation leaves undefined values on the device, and the step may never end.
"""

from __future__ import annotations

import time

from dovetail.interfaces.executor import Handle
from dovetail.result import ModelRunnerOutput
from dovetail_torch.distributed.rank_monitor import RankMonitor
from dovetail_torch.runner.step_outputs import Output

_NAP_S = 50e-6


def check_peers(output: Output, monitor: RankMonitor) -> Output:
    """Return `output`, or a checked handle to it. Raise PeerLostError if a rank has exited."""
    if isinstance(output, ModelRunnerOutput):
        monitor.check()
        return output
    return CheckedOutput(output, monitor)


class CheckedOutput:
    """A handle to a step's result. Implements `Handle[ModelRunnerOutput]`."""

    def __init__(self, output: Handle[ModelRunnerOutput], monitor: RankMonitor) -> None:
        self._output = output
        self._monitor = monitor

    def done(self) -> bool:
        """Return whether `result` would return without waiting."""
        return self._monitor.has_lost or self._output.done()

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        """Wait at most `timeout` seconds for the device, and return the result.

        Raises PeerLostError if a rank has exited, errors of the device, and TimeoutError.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self.done():
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"the device has not finished a step within {timeout} s.")
            time.sleep(_NAP_S)
        self._monitor.check()
        output = self._output.result(timeout)
        self._monitor.check()
        return output
