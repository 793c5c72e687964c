"""Fault points: named places in the code where a test can make something go wrong.

A call `fault("ring.write")` does nothing, at the price of one look at a global, unless faults were
asked for, by `arm` or, before the process starts, by the environment variable `DOVETAIL_FAULTS`;
processes that are started inherit it. The wish is a list, separated by `;`, of

    point:action[=value][@n]       at the n-th time that the point is reached (1), and then no more
    *:record=FILE                  write the name of every point that is reached to a file, once

with the actions raise (an InjectedError), kill (SIGKILL), stop (SIGSTOP), exit (with a status, 3 if
none is given) and delay (seconds). `POINTS` lists every point there is. Does not depend on the
places that they stand in.
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
_EXIT_STATUS = 3

POINTS: Mapping[str, str] = {
    "start.plugins": "the registry is made and the picks are checked",
    "start.platform": "the platform is chosen",
    "start.configuration": "what was left open is resolved",
    "start.parts": "scheduler, executor, worker and checks are chosen",
    "start.executor": "the executor is made",
    "start.init_device": "the worker of this process takes its device",
    "start.load_model": "it loads its model",
    "start.model_facts": "the worker is asked for its model",
    "start.size_cache": "the KV cache is sized",
    "start.warm_up": "the cache's memory is taken, and the worker warmed up",
    "start.scheduler": "the scheduler is made",
    "start.core": "the engine core is put together",
    "uniproc.execute_model": "the worker of this process runs the model",
    "uniproc.sample_tokens": "it samples",
    "uniproc.call": "an operation is called on it",
    "uniproc.shutdown": "it is shut down",
    "core.add_request": "the core takes a request in",
    "core.abort_requests": "the core ends requests",
    "core.schedule": "a step is planned",
    "core.launch": "a plan is handed to the executor",
    "core.result": "the result of a plan is taken",
    "core.update": "a step is settled",
    "core.shutdown": "the core is shut down",
    "client.boot": "the front end writes what the engine's process is to know",
    "client.spawn": "the front end starts the engine's process",
    "client.connect": "the front end opens a socket",
    "client.send": "the front end sends a message",
    "client.receive": "the front end reads a message",
    "client.stop": "the front end tells the engine to end",
    "engine.boot": "the engine's process reads what it is to know",
    "engine.bind": "it opens its sockets",
    "engine.ready": "it says that it is ready",
    "engine.receive": "it reads a message",
    "engine.answer": "it answers a call",
    "engine.step": "it runs a step",
    "engine.send": "it sends a message",
    "engine.beat": "it sends a heartbeat",
    "engine.stop": "it ends",
    "multiproc.spawn": "the executor starts a worker's process",
    "multiproc.wait": "the executor waits until its workers serve",
    "multiproc.receive": "the executor reads what a worker's process reports",
    "multiproc.order": "the executor writes an order",
    "multiproc.shutdown": "the executor is shut down",
    "worker.boot": "a worker's process reads what it is to know",
    "worker.make": "it makes its worker",
    "worker.init_device": "it takes its device",
    "worker.load_model": "it loads its model",
    "worker.ready": "it reports that it is ready",
    "worker.before_execute": "it runs the model",
    "worker.before_sample": "it samples",
    "worker.result": "it writes a result",
    "worker.call": "it is called for an operation",
    "ring.make": "a ring is made",
    "ring.send": "a frame is written into a ring",
    "ring.receive": "a frame is read from a ring",
}
"""Every point, and what is about to happen there."""


class InjectedError(RuntimeError):
    """What the action "raise" raises: an error that nobody expects."""


@dataclass(frozen=True, kw_only=True)
class FaultSpec:
    """A fault that is requested. point: "*" for all. value: "" for none. hit: which, from 1."""

    point: str
    action: str
    value: str
    hit: int


class _Switchboard:
    """The faults that are requested, and how often each point was reached."""

    def __init__(self, specs: tuple[FaultSpec, ...]) -> None:
        self._specs = specs
        self._hits: dict[str, int] = {}
        self._lock = threading.Lock()

    def reach(self, point: str) -> None:
        """Count a point, and do what is due there."""
        if point not in POINTS:
            raise ConfigError(f"{point!r} is not a fault point.{nearest(point, POINTS)}")
        with self._lock:
            hit = self._hits[point] = self._hits.get(point, 0) + 1
        for spec in self._specs:
            if spec.hit == hit and spec.point in (point, "*"):
                _do(spec, point)


_switchboard: _Switchboard | None = None


def fault(point: str) -> None:
    """Mark a place where something may be made to go wrong. point: one of `POINTS`."""
    if _switchboard is not None:
        _switchboard.reach(point)


@contextmanager
def arm(specs: str) -> Iterator[None]:
    """Ask for faults in this process, in the block; raise ConfigError for wishes that are none.

    Processes that are started are told by the environment variable instead. Not for threads that
    arm at the same time.
    """
    global _switchboard
    before, _switchboard = _switchboard, _Switchboard(read_fault_specs(specs))
    try:
        yield
    finally:
        _switchboard = before


def read_fault_specs(text: str) -> tuple[FaultSpec, ...]:
    """Return the faults that a text asks for; raise ConfigError that says what is wrong with it."""
    return tuple(_read_spec(part.strip()) for part in text.split(";") if part.strip())


def _read_spec(text: str) -> FaultSpec:
    point, _, rest = text.partition(":")
    rest, _, hit = rest.partition("@")
    action, _, value = rest.partition("=")
    if point not in POINTS and point != "*":
        raise ConfigError(
            f"the fault {text!r}: there is no point {point!r}.{nearest(point, POINTS)}"
        )
    if action not in _ACTIONS:
        raise ConfigError(f"the fault {text!r}: the action can be {', '.join(sorted(_ACTIONS))}.")
    try:
        number = int(hit or 1)
        if action in ("delay", "exit"):
            float(value or _EXIT_STATUS)
    except ValueError:
        raise ConfigError(
            f"the fault {text!r}: what stands behind '=' and '@' must be a number."
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

if _asked := os.environ.get(VARIABLE):
    _switchboard = _Switchboard(read_fault_specs(_asked))
