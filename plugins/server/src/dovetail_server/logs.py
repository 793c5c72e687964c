"""The server's log: Dovetail's loggers write to stderr; the root logger is not changed."""

from __future__ import annotations

import json
import logging
import sys
import time

LOGGERS = ("dovetail", "dovetail_server", "uvicorn.error")
QUIET = {"uvicorn.error": logging.ERROR}
"""Loggers of libraries, and their lowest level."""


def configure_logs(level: str, form: str) -> None:
    """Let the loggers of Dovetail write to stderr. form: "text" or "json"."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JSONFormatter() if form == "json" else TextFormatter())
    for name in LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(max(QUIET.get(name, 0), getattr(logging, level.upper())))


class TextFormatter(logging.Formatter):
    """One line with time, level and message."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S")


class JSONFormatter(logging.Formatter):
    """One JSON object in a line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        made = time.gmtime(record.created)
        fields = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', made)}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)
