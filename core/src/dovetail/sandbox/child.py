"""A child process with limits. It serves one request at a time and is killed after a timeout.

For untrusted data, such as a chat template or a tokenizer file. The child has a limit on its
memory, an empty environment, "/" as its directory, none of the parent's other descriptors, and only
the packages that it needs on its path. It exits with the parent. A forked copy of the parent does
not use or kill the child.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dovetail.clock import Clock, MonotonicClock
from dovetail.errors import DovetailError, StartError
from dovetail.processes.child_process import ChildProcess, Isolation, start_child
from dovetail.processes.ownership import finalize_in_owner, on_fork_in_child
from dovetail.sandbox.frames import FrameError, receive_frame, send_frame

START_TIMEOUT_S = 60.0
_ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",
    "RAYON_NUM_THREADS": "1",
    "LC_ALL": "C.UTF-8",
    "MALLOC_ARENA_MAX": "1",  # an arena for each thread would take too much address space
}
_INHERITED = ("LD_LIBRARY_PATH",)
"""Environment variables without which an interpreter may not start."""


@dataclass(frozen=True, kw_only=True)
class ChildLimits:
    """Limits of a child. timeout_s: wall time per request. memory_bytes: size of address space."""

    timeout_s: float
    memory_bytes: int
    max_response_bytes: int = 16 << 20


@dataclass(frozen=True, kw_only=True)
class ChildTask:
    """What a child executes.

    handler: "module:function". packages: names of the top-level packages that it imports.
    ends_when_large: whether the child exits after a request that needed much memory; for children
    that serve many requests.
    """

    handler: str
    packages: tuple[str, ...]
    ends_when_large: bool = True


class ChildFailure(Exception):  # noqa: N818  # a phrase for the errors of callers
    """The child has exited without a response. The message is a phrase with the reason."""


class HandlerError(Exception):
    """An exception that the handler raised in the child.

    kind: the name of its class. parameter: the parameter that it names, if it is a RequestError.
    """

    def __init__(self, kind: str, message: str, parameter: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.parameter = parameter


class BoundedChild:
    """One child process. Not thread-safe. The owner must call `close`."""

    def __init__(self, task: ChildTask, limits: ChildLimits, clock: Clock | None = None) -> None:
        """Start the process and wait until it is ready. Raise StartError if it does not start."""
        self._limits = limits
        self._clock: Clock = clock or MonotonicClock()
        self.is_usable = True
        self._connection, child_end = socket.socketpair()
        try:
            with child_end:
                self._child = _start(task, limits, child_end.fileno())
        except (OSError, DovetailError) as error:
            self._connection.close()
            raise StartError(
                f"The child process for {task.handler} could not start: {error}"
            ) from None
        self._end = finalize_in_owner(self, _end, self._child, self._connection)
        on_fork_in_child(self._disown)

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._child.pid

    def is_alive(self) -> bool:
        """Return whether the process runs and can take a request."""
        return self.is_usable and not self._child.has_ended()

    def call(self, text: bytes, blob: bytes = b"", *, timeout_s: float | None = None) -> Any:
        """Return the handler's value for a request. `text` is JSON, as `frames.encode` makes it.

        timeout_s: None for the limit of the child. Raises HandlerError if the handler raised, and
        ChildFailure if the child took too long, used too much memory or crashed. After any error
        except HandlerError the child is killed.
        """
        wait = self._deadline(self._limits.timeout_s if timeout_s is None else timeout_s)
        try:
            self._guard(lambda: send_frame(self._connection, text, blob, before_wait=wait))
            reply = self._receive(wait)
        except BaseException:
            self.close()
            raise
        if reply.get("last", False):
            self.close()
        if "error" in reply:
            raise HandlerError(*reply["error"])
        return reply["value"]

    def close(self) -> None:
        """Kill the process and wait for it to exit. May be called twice."""
        self.is_usable = False
        self._end()

    def _disown(self) -> None:
        """Close the connection in a forked copy of the parent, which does not own the child."""
        self.is_usable = False
        self._connection.close()

    def _receive(self, wait: Callable[[], None]) -> dict[str, Any]:
        def receive() -> Any:
            limit = self._limits.max_response_bytes
            return receive_frame(self._connection, max_bytes=limit, before_wait=wait)[0]

        reply = self._guard(receive)
        if not isinstance(reply, dict) or not ({"value", "error"} & reply.keys()):
            raise ChildFailure("the child process sent an invalid response")
        return reply

    def _guard(self, action: Callable[[], Any]) -> Any:
        """Call `action`, which sends or receives. Convert its errors to ChildFailure."""
        try:
            return action()
        except TimeoutError:
            raise ChildFailure(
                f"the child process took longer than {self._allowed_s:g} s"
            ) from None
        except ValueError:
            raise ChildFailure("the child process sent an invalid response") from None
        except (FrameError, OSError) as error:
            if "bytes" in str(error):
                raise ChildFailure(f"the child process sent a long response: {error}") from None
            raise ChildFailure(self._exit_reason()) from None

    def _exit_reason(self) -> str:
        self._child.kill()
        how = self._child.describe_end()
        if how == "by SIGXCPU":
            return "the child process used too much CPU time"
        return f"the child process ended {how}, perhaps because it needs more memory"

    def _deadline(self, seconds: float) -> Callable[[], None]:
        """Return a function that sets the socket's timeout to the time left until the deadline."""
        self._allowed_s = seconds
        end_ns = self._clock.now_ns() + int(seconds * 1e9)

        def wait() -> None:
            left_ns = end_ns - self._clock.now_ns()
            if left_ns <= 0:
                raise TimeoutError
            self._connection.settimeout(left_ns / 1e9)

        return wait


def _start(task: ChildTask, limits: ChildLimits, descriptor: int) -> ChildProcess:
    settings = {
        "descriptor": descriptor,
        "handler": task.handler,
        "ends_when_large": task.ends_when_large,
        "memory_bytes": limits.memory_bytes,
        "timeout_s": limits.timeout_s,
    }
    inherited = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    child = start_child(
        "dovetail.sandbox.child_main:serve",
        json.dumps(settings).encode(),
        name="it",
        descriptors=(descriptor,),
        isolation=Isolation(
            sys_path=_folders_of(("dovetail", *task.packages)),
            environment=_ENVIRONMENT | inherited,
        ),
    )
    try:
        child.wait_until_ready(START_TIMEOUT_S)
    except BaseException:
        child.close()
        raise
    return child


def _end(child: ChildProcess, connection: socket.socket) -> None:
    connection.close()
    child.close()


def _folders_of(packages: Sequence[str]) -> list[str]:
    """Return the directories of the packages. The child's import path has no other directories."""
    specs = [find_spec(package) for package in packages]
    paths = [Path(spec.origin).absolute() for spec in specs if spec is not None and spec.origin]
    folders = (path.parents[1] if path.stem == "__init__" else path.parent for path in paths)
    return list(dict.fromkeys(map(str, folders)))
