"""A child process with limits: one request at a time, killed when it takes too long.

For work on what comes from a stranger, such as a chat template or a tokenizer file. The child has
a limit on its memory, an empty environment, "/" as its directory, none of the parent's other
descriptors and only the packages that it needs on its path. It ends with the parent. A forked copy
of the parent drops its children without harming them.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dovetail.clock import Clock, MonotonicClock
from dovetail.errors import StartError
from dovetail.sandbox.frames import FrameError, receive_frame, send_frame

START_TIMEOUT_S = 60.0
_PROGRAM = (
    "import sys, json\n"
    "sys.path += json.loads(sys.argv[1])\n"
    "from dovetail.sandbox.child_main import main\n"
    "main(sys.argv[2])\n"
)
_ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "LC_ALL": "C.UTF-8"}
_INHERITED = ("LD_LIBRARY_PATH",)
"""Variables without which an interpreter may not start."""


@dataclass(frozen=True, kw_only=True)
class ChildLimits:
    """What a child may use. timeout_s: wall time of a request. memory_bytes: of address space."""

    timeout_s: float
    memory_bytes: int
    max_answer_bytes: int = 16 << 20


@dataclass(frozen=True, kw_only=True)
class ChildTask:
    """What a child runs.

    handler: "module:function". packages: top-level names that it imports. ends_when_large: whether
    it ends after a request that took much memory, for children that serve many requests.
    """

    handler: str
    packages: tuple[str, ...]
    ends_when_large: bool = True


class ChildFailure(Exception):  # noqa: N818  # a phrase that callers put in an error of theirs
    """The child gave no answer and is gone; the message is a phrase that says why."""


class HandlerError(Exception):
    """The handler raised. kind: the class's name. parameter: of a RequestError."""

    def __init__(self, kind: str, message: str, parameter: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.parameter = parameter


class BoundedChild:
    """One child process. Not thread-safe; `close` it."""

    def __init__(self, task: ChildTask, limits: ChildLimits, clock: Clock | None = None) -> None:
        """Start the process and wait until it is ready; raise StartError if it does not start."""
        self._limits = limits
        self._clock: Clock = clock or MonotonicClock()
        self.is_usable = True
        with tempfile.TemporaryFile() as errors:
            with _SPAWNING:
                self._process, self._connection = _spawn(task, limits, errors.fileno())
                _CHILDREN.add(self)
            try:
                self._receive(self._deadline(START_TIMEOUT_S))
            except BaseException as error:
                self.close()
                if not isinstance(error, ChildFailure):
                    raise
                errors.seek(0)
                said = errors.read()[-500:].decode("utf-8", "replace").strip()
                raise StartError(
                    f"A process with limits for {task.handler} could not start: {error}. {said}"
                ) from None

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    def is_alive(self) -> bool:
        """Return whether the process runs and can take a request."""
        return self.is_usable and self._process.poll() is None

    def call(self, text: bytes, blob: bytes = b"", *, timeout_s: float | None = None) -> Any:
        """Return the handler's value for a request; `text` is JSON, as `frames.encode` makes it.

        timeout_s: None for the limit of the child. Raises HandlerError for what the handler raised,
        ChildFailure if it took too long, used too much memory or crashed. After a ChildFailure or
        any other error the child is gone.
        """
        wait = self._deadline(self._limits.timeout_s if timeout_s is None else timeout_s)
        try:
            self._guard(lambda: send_frame(self._connection, text, blob, before_wait=wait))
            answer = self._receive(wait)
        except BaseException:
            self.close()
            raise
        if answer.get("last", False):
            self.close()
        if "error" in answer:
            raise HandlerError(*answer["error"])
        return answer["value"]

    def close(self) -> None:
        """Kill the process and wait for its end. May be called twice."""
        self.is_usable = False
        self._connection.close()
        if self._process.returncode is None:
            self._process.kill()
            self._process.wait()

    def forget(self) -> None:
        """Drop the child in a forked copy of the parent: it belongs to the parent alone."""
        self.is_usable = False
        self._connection.close()
        self._process.returncode = 0

    def _receive(self, wait: Callable[[], None]) -> dict[str, Any]:
        def receive() -> Any:
            limit = self._limits.max_answer_bytes
            return receive_frame(self._connection, max_bytes=limit, before_wait=wait)[0]

        answer = self._guard(receive)
        if not isinstance(answer, dict) or not ({"value", "error"} & answer.keys()):
            raise ChildFailure("its process sent what is no answer")
        return answer

    def _guard(self, action: Callable[[], Any]) -> Any:
        """Do something on the connection; raise ChildFailure, with the reason, if that fails."""
        try:
            return action()
        except TimeoutError:
            raise ChildFailure(f"it took longer than {self._allowed_s:g} s") from None
        except ValueError:
            raise ChildFailure("its process sent what is no answer") from None
        except (FrameError, OSError) as error:
            if "bytes" in str(error):
                raise ChildFailure(f"its process sent {error}") from None
            raise ChildFailure(self._how_it_ended()) from None

    def _how_it_ended(self) -> str:
        self._process.kill()
        status = self._process.wait()
        if status == -signal.SIGXCPU:
            return "it used too much CPU time"
        if status >= 0:
            return f"its process ended with status {status}, perhaps for want of memory"
        return f"its process ended by {signal.Signals(-status).name}, perhaps for want of memory"

    def _deadline(self, seconds: float) -> Callable[[], None]:
        """Return what gives the socket the time that is left, and raises TimeoutError at last."""
        self._allowed_s = seconds
        end_ns = self._clock.now_ns() + int(seconds * 1e9)

        def wait() -> None:
            left_ns = end_ns - self._clock.now_ns()
            if left_ns <= 0:
                raise TimeoutError
            self._connection.settimeout(left_ns / 1e9)

        return wait


_CHILDREN: weakref.WeakSet[BoundedChild] = weakref.WeakSet()
_SPAWNING = threading.RLock()
"""Held while a child is made: a fork in between would copy connections that nothing closes."""


def _forget_all() -> None:
    for child in list(_CHILDREN):
        child.forget()
    _SPAWNING.release()


os.register_at_fork(
    before=_SPAWNING.acquire, after_in_parent=_SPAWNING.release, after_in_child=_forget_all
)


def _spawn(
    task: ChildTask, limits: ChildLimits, errors: int
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    mine, theirs = socket.socketpair()
    arguments = {
        "descriptor": theirs.fileno(),
        "handler": task.handler,
        "ends_when_large": task.ends_when_large,
        "memory_bytes": limits.memory_bytes,
        "timeout_s": limits.timeout_s,
    }
    path = json.dumps(_folders_of(("dovetail", *task.packages)))
    command = [sys.executable, "-I", "-S", "-B", "-c", _PROGRAM, path, json.dumps(arguments)]
    inherited = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    try:
        process = subprocess.Popen(
            command,
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            cwd="/",
            env=_ENVIRONMENT | inherited,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        mine.close()
        raise StartError(
            f"A process with limits for {task.handler} could not start: {error}."
        ) from None
    finally:
        theirs.close()
    return process, mine


def _folders_of(packages: Sequence[str]) -> list[str]:
    """Return the folders that hold packages; the child has no other folders of modules."""
    specs = [find_spec(package) for package in packages]
    found = [Path(spec.origin).absolute() for spec in specs if spec is not None and spec.origin]
    folders = (path.parents[1] if path.stem == "__init__" else path.parent for path in found)
    return list(dict.fromkeys(map(str, folders)))
