"""The parent's side of the line protocol: child processes that serve requests with a deadline.

The module does not depend on the kinds of requests. If a child fails, exits or is late, the caller
gets a `ChildError` with the child's last output, reports it and continues.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

BENCH = Path(__file__).resolve().parents[1]
GRACE_S = 5.0
"""Time in seconds in which a child must exit after its stdin is closed."""


class ChildError(Exception):
    """A child process responded with an error, exited, or did not respond in time."""


class Child:
    """One process that serves the protocol, in a separate process group."""

    def __init__(self, python: str, module: str, env: Mapping[str, str] | None = None) -> None:
        """Start `python -m module` in the benchmarks' directory.

        env: variables added to the environment.
        """
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the child
        self._unread = b""
        self._is_late = False
        self._process = subprocess.Popen(
            [python, "-m", module],
            cwd=BENCH,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", **(env or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """Return the id of the process at the top of the child's tree."""
        return self._process.pid

    def ask(self, operation: str, deadline_s: float, **arguments: Any) -> dict[str, Any]:
        """Return the response to one request.

        Raises ChildError if the child fails or does not respond in time. The child cannot be used
        after a missed deadline or an exit; close it.
        """
        assert self._process.stdin is not None
        request = json.dumps({"op": operation, **arguments}) + "\n"
        try:
            self._process.stdin.write(request.encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            raise ChildError(
                f"the process exited before {operation!r}: {self._last_output()}"
            ) from None
        response: dict[str, Any] = json.loads(self._read_line(operation, deadline_s))
        if "error" in response:
            raise ChildError(f"{operation!r}: {response['error']}")
        return response

    def close(self) -> None:
        """Terminate the process and its descendants. Return when they have exited."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0 if self._is_late else GRACE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._log.close()

    def _read_line(self, operation: str, deadline_s: float) -> bytes:
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        end = time.monotonic() + deadline_s
        while b"\n" not in self._unread:
            ready, _, _ = select.select([pipe], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                self._is_late = True
                raise ChildError(f"no response to {operation!r} within {deadline_s:.0f} s")
            piece = os.read(pipe, 1 << 16)
            if not piece:
                raise ChildError(f"the process exited during {operation!r}: {self._last_output()}")
            self._unread += piece
        line, self._unread = self._unread.split(b"\n", 1)
        return line

    def _last_output(self, maximum: int = 400) -> str:
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - maximum))
        return " ".join(self._log.read().decode(errors="replace").split())


def first_line_of(python: str, arguments: Sequence[str], deadline_s: float = 30.0) -> str:
    """Return the first output line of `python arguments…`, or "" if it fails or is late."""
    try:
        run = subprocess.run(
            [python, *arguments], capture_output=True, text=True, timeout=deadline_s, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return run.stdout.partition("\n")[0]
