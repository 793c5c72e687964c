"""Workers that a child process can import, and functions that tests call in them."""

import os
import signal
import subprocess
import sys
import time
from array import array

from dovetail.errors import CapacityError, PeerLostError
from dovetail.transport.ndarray import NDArray
from dovetail_devkit.executor.workers import CallOrderWorker


class FaultyWorker(CallOrderWorker):
    """A worker with a fault at startup or in step 1. Its options `start` and `step` select it.

    Both options list one fault per rank: "hangs", "is slow", "exits", "exits late", "raises",
    "rejects", "loses a peer", or "" for no fault.
    """

    def load_model(self):
        super().load_model()
        self._go_wrong("start")

    def execute_model(self, plan):
        if plan.step_id == 1:
            self._go_wrong("step")
        super().execute_model(plan)

    def _go_wrong(self, when):
        ways = self._context.options.get(when, ())
        how = ways[self._context.rank] if ways else ""
        if how == "hangs":
            time.sleep(600)
        if how == "is slow":
            time.sleep(0.4)
        if how == "exits":
            os._exit(3)
        if how == "exits late":
            time.sleep(0.3)
            os._exit(3)
        if how == "loses a peer":
            raise PeerLostError("the others cannot be reached")
        if how == "raises":
            raise RuntimeError("the chip melted")
        if how == "rejects":
            raise CapacityError("7 GB are needed; there are 3")

    def pid(self):
        return os.getpid()

    def has_child(self):
        self.child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        return self.child.pid

    def options(self):
        return dict(self._context.options)

    def echo(self, *args, **kwargs):
        return [list(args), kwargs]

    def turned(self, matrix):
        return NDArray(matrix.dtype, matrix.shape[::-1], matrix.data[::-1])

    def ramp(self, length):
        return {"ramp": array("f", range(length))}

    def odd(self):
        return self

    def raise_value_error(self):
        raise ValueError("not today")

    def burn(self, seconds):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            sum(range(1000))

    def stop_itself(self):
        os.kill(os.getpid(), signal.SIGSTOP)


class Extra:
    """A worker extension that adds the operation `twice`."""

    def twice(self):
        return 2 * self._context.rank


def both(worker, more):
    return worker.pid() + more


class NotAFunction:
    pass
