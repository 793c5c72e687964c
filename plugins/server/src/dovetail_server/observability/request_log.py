"""One line in the log for each request (`--log-requests`), without prompts and outputs."""

from __future__ import annotations

import logging

from dovetail_server.observers import RequestRecord

logger = logging.getLogger("dovetail_server.requests")


class RequestLog:
    """Observes requests."""

    def request_started(self, request_id: str, route: str) -> None:
        """Do nothing, because a request is logged once, at its end."""

    def request_ended(self, record: RequestRecord) -> None:
        """Log a request with its duration and token counts."""
        logger.info(
            "%s %s: %s, %d prompt tokens, %d new tokens, %.3f s%s",
            record.request_id,
            record.route,
            f"error {record.code}" if record.code else record.status,
            sum(len(output.prompt_token_ids) for output in record.outputs),
            record.num_completion_tokens,
            (record.end_ns - record.arrival_ns) / 1e9,
            ", streamed" if record.streamed else "",
        )

    def request_rejected(self, route: str, status: int, code: str) -> None:
        """Log a request that was rejected."""
        logger.info("rejected with %d %s: %.80s", status, code, route)
