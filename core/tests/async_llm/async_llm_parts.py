"""Test plugins that a child process can import.

The model's config.json controls the worker. Its keys are step_s, the duration of each step in
seconds, and fails_at, the number of the step that raises an error.
"""

import time
from dataclasses import replace
from typing import ClassVar

from dovetail.errors import RequestError
from dovetail.interfaces import Hooks, Policy, StatLogger
from dovetail.scheduling import Scheduler
from dovetail_devkit.fakes.worker import FakeWorker


class ControlledStepWorker(FakeWorker):
    """A worker that reads its step time and its fault from the model's config.json."""

    def execute_model(self, plan):
        worker_config = self._config.model.hf_config
        time.sleep(worker_config.get("step_s", 0))
        if plan.step_id == worker_config.get("fails_at"):
            raise RuntimeError("the chip melted")
        super().execute_model(plan)

    def echo(self, *args, **kwargs):
        return [list(args), kwargs]

    def doze(self, seconds):
        time.sleep(seconds)

    def get_model_info(self):
        tasks = tuple(self._config.model.hf_config.get("tasks", ["generate"]))
        return replace(super().get_model_info(), supported_tasks=tasks)


class RejectingScheduler(Scheduler):
    """A scheduler that rejects requests with `max_tokens=13`."""

    def add_request(self, request):
        if request.max_tokens == 13:
            raise RequestError("not thirteen", parameter="max_tokens")
        super().add_request(request)


class ByPriority(Policy):
    """A policy that serves requests with a lower priority number first."""

    def rank(self, request, view):
        return request.priority


class Counting(StatLogger):
    """A stat logger that counts tokens in the front end."""

    num_tokens = 0

    def __init__(self, context):
        pass

    def record(self, step):
        Counting.num_tokens += step.num_new_tokens

    def close(self):
        pass


class RecordingHooks(Hooks):
    """Hooks that record failed requests and the shutdown of the engine."""

    recorded: ClassVar[list] = []

    def __init__(self, context):
        pass

    def on_request_error(self, request_id):
        RecordingHooks.recorded.append(request_id)

    def on_engine_stop(self):
        RecordingHooks.recorded.append("stop")


class FailingStatLogger(Counting):
    """A stat logger with a constructor that raises."""

    def __init__(self, context):
        raise OSError("no such luck")
