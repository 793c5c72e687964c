"""A batch: its status, and its format in OpenAI's API."""

from __future__ import annotations

import time
import uuid
from typing import Any

from msgspec import Struct

COMPLETION_WINDOW = "24h"


class LineCounts(Struct, kw_only=True):
    """Line counts. completed: lines with the status 200. failed: other lines with a record."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchFailure(Struct, kw_only=True):
    """The reason why a batch as a whole failed."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class Batch(Struct, kw_only=True):
    """A batch. Times are UNIX times in seconds.

    owner: name of the API key. output_id, error_id: the files that are being written. times: when
    it got each status, by status. output_lifetime_s: lifetime of its files; None for the default.
    """

    id: str
    owner: str
    endpoint: str
    input_file_id: str
    created_at: int
    expires_at: int
    model: str
    metadata: dict[str, str] | None = None
    output_lifetime_s: int | None = None
    status: str = "validating"
    counts: LineCounts
    times: dict[str, int]
    failures: list[BatchFailure]
    output_id: str = ""
    error_id: str = ""
    output_file_id: str | None = None
    error_file_id: str | None = None

    def set_status(self, status: str) -> None:
        """Change the status, and record the time."""
        self.status = status
        self.times[status] = int(time.time())

    def object(self) -> dict[str, Any]:
        """Return the batch in the format of OpenAI's API."""
        failures = [
            {"code": item.code, "message": item.message, "param": item.param, "line": item.line}
            for item in self.failures
        ]
        times = {f"{name}_at": self.times.get(name) for name in _TIMES}
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "model": self.model,
            "errors": {"object": "list", "data": failures} if failures else None,
            "input_file_id": self.input_file_id,
            "completion_window": COMPLETION_WINDOW,
            "status": self.status,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **times,
            "request_counts": {
                "total": self.counts.total,
                "completed": self.counts.completed,
                "failed": self.counts.failed,
            },
            "metadata": self.metadata,
        }


_TIMES = (
    "in_progress",
    "finalizing",
    "completed",
    "failed",
    "expired",
    "cancelling",
    "cancelled",
)


def new_batch(
    *, owner: str, endpoint: str, input_file_id: str, model: str, timeout_s: float
) -> Batch:
    """Return a batch that has not been started. timeout_s: time until it expires."""
    now_s = time.time()
    return Batch(
        id=f"batch_{uuid.uuid4().hex}",
        owner=owner,
        endpoint=endpoint,
        input_file_id=input_file_id,
        created_at=int(now_s),
        expires_at=int(now_s + timeout_s),
        model=model,
        counts=LineCounts(),
        times={},
        failures=[],
    )
