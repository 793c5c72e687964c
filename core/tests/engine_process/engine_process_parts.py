"""Test plugins that a child process can import.

The model's config.json controls the worker. step_s: duration of each step in seconds. fails_at:
number of the step that raises an error. dies_of: the process is killed if a prompt begins with
this token. start: "hangs", "exits" or "raises", the fault at startup.
"""

import os
import subprocess
import sys
import time
from dataclasses import replace

from dovetail.engine.process import outgoing
from dovetail.errors import CapacityError
from dovetail.interfaces import KVOutcome
from dovetail.scheduling import Scheduler
from dovetail.transport import messages
from dovetail_devkit.fakes.worker import FakeWorker
from dovetail_devkit.scheduler.gate import FakeGate


class ControlledWorker(FakeWorker):
    """A worker that reads its step time and its faults from the model's config.json."""

    def load_model(self):
        super().load_model()
        self.worker_config = self._config.model.hf_config
        start = self.worker_config.get("start")
        if start == "hangs":
            time.sleep(600)
        if start == "exits":
            os._exit(3)
        if start == "raises":
            raise CapacityError("the weights need 7 GB; there are 3")
        if "has_child" in self.worker_config:
            self.child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])

    def execute_model(self, plan):
        time.sleep(self.worker_config.get("step_s", 0))
        if plan.step_id == self.worker_config.get("fails_at"):
            raise RuntimeError("the chip melted")
        if self.worker_config.get("dies_of") in [join.token_ids[0] for join in plan.joins]:
            raise RuntimeError("the chip melted")
        super().execute_model(plan)

    def child_pid(self):
        return self.child.pid

    def echo(self, *args, **kwargs):
        return [list(args), kwargs]

    def raise_value_error(self):
        raise ValueError("not today")

    def odd(self):
        return self


class SmallMessageWorker(ControlledWorker):
    """A worker that limits messages of the engine process to 6 KiB."""

    def load_model(self):
        super().load_model()
        messages.MAX_MESSAGE_BYTES = 6144


class SmallBufferWorker(ControlledWorker):
    """A worker that limits the engine's buffer for a slow front end to 16 KiB."""

    def load_model(self):
        super().load_model()
        outgoing.MAX_KEPT_BYTES = 16384


class SleepModeWorker(ControlledWorker):
    """A worker that provides "sleep" and records its calls."""

    provides = ControlledWorker.provides | {"sleep"}
    sleep_calls = ()

    def sleep(self, level):
        self.sleep_calls = (*self.sleep_calls, f"sleep {level}")

    def wake_up(self, tags=()):
        self.sleep_calls = (*self.sleep_calls, f"wake up {','.join(tags)}")

    def calls_so_far(self):
        return list(self.sleep_calls)


class FailsFirstWakeUp(SleepModeWorker):
    """A worker whose first attempt to wake up fails."""

    def wake_up(self, tags=()):
        super().wake_up(tags)
        if len(self.sleep_calls) == 2:
            raise CapacityError("3 GiB are missing.")


class UnappliedProcessorsWorker(ControlledWorker):
    """A worker that declares support for logits processors but does not apply them."""

    provides = ControlledWorker.provides | {"logits_processors"}


class NeverOpens(Scheduler):
    """A scheduler with an admission gate that never opens for ids that begin with "held"."""

    def __init__(self, context):
        gate = FakeGate(lambda request: request.request_id.startswith("held"))
        super().__init__(replace(context, gates=(gate,)))


class NeverLoads(Scheduler):
    """A scheduler with a KV connector that claims every block and never finishes a load."""

    def __init__(self, context):
        super().__init__(replace(context, kv_connector=EndlessSide()))


class EndlessSide:
    """The scheduler side of a connector with loads that never finish."""

    def __init__(self):
        self.keys = set()

    def has(self, keys):
        return [key in self.keys for key in keys]

    def load(self, transfer):
        return True

    def store(self, transfer):
        self.keys.update(transfer.keys)
        return False

    def take_instructions(self):
        return b""

    def update(self, response):
        return KVOutcome()

    def shutdown(self):
        pass
