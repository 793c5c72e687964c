"""Fault points: named locations in the code where a test can inject a fault.

A call `fault("ring.send")` only reads a global unless faults are armed. Arm them with `arm`, or
with the `DOVETAIL_FAULTS` environment variable before the process starts; child processes inherit
it. The value is a list, separated by `;`, of

    point:action[=value][@n]       act when the point is reached for the n-th time (default 1), once
    *:record=FILE                  append the name of each point to a file when it is first reached

The actions are raise (an InjectedError), kill (SIGKILL), stop (SIGSTOP), exit (with a status, by
default 3) and delay (in seconds). `POINTS` lists all points. This module does not depend on the
modules that contain the points.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from dovetail.errors import ConfigError, nearest

VARIABLE = "DOVETAIL_FAULTS"
"""Environment variable with faults for tests, separated by ";"; never set it in production."""
_EXIT_STATUS = 3

POINTS: Mapping[str, str] = {
    "start.plugins": "the plugin registry is created and the plugin options are checked",
    "start.platform": "the platform is selected",
    "start.configuration": "options with the value auto are resolved",
    "start.select_plugins": "scheduler, executor, worker and request checks are selected",
    "start.executor": "the executor is created",
    "start.init_device": "the in-process worker initializes its device",
    "start.load_model": "the in-process worker loads the model",
    "start.model_facts": "the engine reads the model's properties from the worker",
    "start.size_cache": "the size of the KV cache is computed",
    "start.warm_up": "the KV cache is allocated and the worker is warmed up",
    "start.scheduler": "the scheduler is created",
    "start.core": "the engine core is created",
    "uniproc.execute_model": "the in-process worker executes the model",
    "uniproc.sample_tokens": "the in-process worker samples tokens",
    "uniproc.call": "a method of the in-process worker is called",
    "uniproc.shutdown": "the in-process worker is shut down",
    "core.add_request": "the engine core adds a request",
    "core.abort_requests": "the engine core aborts requests",
    "core.schedule": "the scheduler plans a step",
    "core.launch": "a plan is passed to the executor",
    "core.result": "the result of a plan is read",
    "core.update": "the results of a step are processed",
    "core.shutdown": "the engine core is shut down",
    "client.boot": "the front end writes the boot record of the engine process",
    "client.spawn": "the front end starts the engine process",
    "client.connect": "the front end opens a socket",
    "client.send": "the front end sends a message",
    "client.receive": "the front end reads a message",
    "client.stop": "the front end stops the engine",
    "engine.boot": "the engine process reads its boot record",
    "engine.bind": "the engine process opens its sockets",
    "engine.ready": "the engine process reports that it is ready",
    "engine.receive": "the engine process reads a message",
    "engine.answer": "the engine process replies to a call",
    "engine.step": "the engine process runs a step",
    "engine.send": "the engine process sends a message",
    "engine.beat": "the engine process sends a heartbeat",
    "engine.stop": "the engine process shuts down",
    "multiproc.spawn": "the executor starts a worker process",
    "multiproc.wait": "the executor waits until its workers are ready",
    "multiproc.receive": "the executor reads a report of a worker process",
    "multiproc.order": "the executor writes a command for the workers",
    "multiproc.shutdown": "the executor is shut down",
    "worker.boot": "a worker process reads its boot record",
    "worker.make": "the worker process creates its worker",
    "worker.init_device": "the worker process initializes its device",
    "worker.load_model": "the worker process loads the model",
    "worker.ready": "the worker process reports that it is ready",
    "worker.before_execute": "the worker process executes the model",
    "worker.before_sample": "the worker process samples tokens",
    "worker.result": "the worker process writes a result",
    "worker.call": "the worker process runs an operation of the executor",
    "ring.make": "a ring is created",
    "ring.send": "a frame is written to a ring",
    "ring.receive": "a frame is read from a ring",
}
"""Maps each fault point to the operation that follows it."""


class InjectedError(RuntimeError):
    """The error that the fault action "raise" raises. No code expects this error."""


@dataclass(frozen=True, kw_only=True)
class FaultSpec:
    """A requested fault.

    point: "*" for all points. value: "" for none. hit: number of the visit at which it acts, from
    1.
    """

    point: str
    action: str
    value: str
    hit: int


class _Switchboard:
    """Holds the requested faults and counts how often each point was reached."""

    def __init__(self, specs: tuple[FaultSpec, ...]) -> None:
        self._specs = specs
        self._hits: dict[str, int] = {}
        self._lock = threading.Lock()

    def reach(self, point: str) -> None:
        """Count a visit of a point and run the faults that are due."""
        if point not in POINTS:
            raise ConfigError(f"{point!r} is not a fault point.{nearest(point, POINTS)}")
        with self._lock:
            hit = self._hits[point] = self._hits.get(point, 0) + 1
        for spec in self._specs:
            if spec.hit == hit and spec.point in (point, "*"):
                _do(spec, point)


_switchboard: _Switchboard | None = None


def fault(point: str) -> None:
    """Mark a location where a fault can be injected. point: one of `POINTS`."""
    if _switchboard is not None:
        _switchboard.reach(point)


@contextmanager
def arm(specs: str) -> Iterator[None]:
    """Arm faults in this process within the block. Raise ConfigError for invalid specs.

    Child processes read the environment variable instead. Not thread-safe.
    """
    global _switchboard
    before, _switchboard = _switchboard, _Switchboard(read_fault_specs(specs))
    try:
        yield
    finally:
        _switchboard = before


def read_fault_specs(text: str) -> tuple[FaultSpec, ...]:
    """Parse fault specs. Raise ConfigError if a spec is invalid."""
    return tuple(_read_spec(part.strip()) for part in text.split(";") if part.strip())


def _read_spec(text: str) -> FaultSpec:
    point, _, rest = text.partition(":")
    rest, _, hit = rest.partition("@")
    action, _, value = rest.partition("=")
    if point not in POINTS and point != "*":
        raise ConfigError(
            f"fault {text!r}: {point!r} is not a fault point.{nearest(point, POINTS)}"
        )
    if action not in _ACTIONS:
        raise ConfigError(
            f"fault {text!r}: unknown action. The actions are {', '.join(sorted(_ACTIONS))}."
        )
    try:
        number = int(hit or 1)
        if action in ("delay", "exit"):
            float(value or _EXIT_STATUS)
    except ValueError:
        raise ConfigError(
            f"fault {text!r}: the values after '=' and '@' must be numbers."
        ) from None
    return FaultSpec(point=point, action=action, value=value, hit=number)


def _do(spec: FaultSpec, point: str) -> None:
    _ACTIONS[spec.action](point, spec.value)


def _raise(point: str, value: str) -> None:
    raise InjectedError(f"injected at {point}")


def _kill(point: str, value: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop(point: str, value: str) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _exit(point: str, value: str) -> None:
    os._exit(int(value or _EXIT_STATUS))


def _delay(point: str, value: str) -> None:
    threading.Event().wait(float(value or 1))


def _record(point: str, value: str) -> None:
    with open(value, "a", encoding="utf-8") as file:
        file.write(f"{point}\n")


_ACTIONS = {
    "raise": _raise,
    "kill": _kill,
    "stop": _stop,
    "exit": _exit,
    "delay": _delay,
    "record": _record,
}

if _specs := os.environ.get(VARIABLE):
    _switchboard = _Switchboard(read_fault_specs(_specs))
