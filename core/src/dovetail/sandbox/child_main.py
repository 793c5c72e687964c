"""The main function of a child with limits: sets the limits, then responds to requests in order.

Started by `dovetail.sandbox.child`. The responses are {"value": …} or {"error": [class name,
message, parameter]}; "last" is set in the last response of a child that exits because it has used
much memory.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

from dovetail.errors import DovetailError
from dovetail.processes.child_main import ChildContext
from dovetail.sandbox.frames import FrameError, encode, receive_frame, send_frame

MAX_REQUEST_BYTES = (1 << 32) - 1
_RETIRE_KIB = 96 << 10
"""A child exits after a request that raised its memory use by more than this."""
_NUM_FILES = 32

Handler = Callable[[Any, bytes], Any]


def serve(context: ChildContext) -> int:
    """Serve until the connection is closed.

    The settings are JSON: `descriptor`, `handler` ("module:function"), `memory_bytes`, `timeout_s`,
    `ends_when_large`.
    """
    settings = json.loads(context.settings)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    connection = socket.socket(fileno=settings["descriptor"])
    module, _, name = settings["handler"].partition(":")
    handler: Handler = getattr(importlib.import_module(module), name)
    if sys.platform == "linux":  # macOS cannot limit the address space
        _limit(resource.RLIMIT_AS, settings["memory_bytes"])
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_FSIZE, 0)
    _limit(resource.RLIMIT_NOFILE, _NUM_FILES)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 2)
    os.close(nothing)
    context.ready()
    return _serve(settings, connection, handler)


def _serve(settings: dict[str, Any], connection: socket.socket, handler: Handler) -> int:
    limit_kib = _peak_kib() + _RETIRE_KIB
    while True:
        try:
            request, blob = receive_frame(connection, max_bytes=MAX_REQUEST_BYTES)
        except (FrameError, OSError):
            return 0
        _limit_cpu(settings["timeout_s"])
        reply = _answer(handler, request, blob)
        reply["last"] = settings["ends_when_large"] and _peak_kib() > limit_kib
        send_frame(connection, encode(reply))
        if reply["last"]:
            return 0
        del request, blob, reply


def _answer(handler: Handler, request: Any, blob: bytes) -> dict[str, Any]:
    try:
        return {"value": handler(request, blob)}
    except DovetailError as error:
        parameter = getattr(error, "parameter", "")
        return {"error": [type(error).__name__, str(error), parameter]}
    except MemoryError:
        return {"error": ["MemoryError", "the child process needs too much memory", ""]}
    except BaseException as error:  # pyo3's PanicException is not an Exception
        return {"error": [type(error).__name__, " ".join(str(error).split())[:300], ""]}


def _limit(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    value = _at_most(hard, value)
    resource.setrlimit(kind, (value, value))


def _at_most(hard: int, value: int) -> int:
    return value if hard == resource.RLIM_INFINITY else min(value, hard)


def _limit_cpu(timeout_s: float) -> None:
    """Limit the CPU time of a request, in case the parent was killed and cannot kill the child."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    seconds = int(used.ru_utime + used.ru_stime + timeout_s) + 5
    resource.setrlimit(resource.RLIMIT_CPU, (_at_most(hard, seconds), hard))


def _peak_kib() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak >> 10 if sys.platform == "darwin" else peak
