"""Where this process and its children write their logs. The root logger is never changed.

Libraries do not configure logs; a program such as `dovetail serve` does. Child processes get the
same configuration with their boot record. This module imports only the standard library, because
some children have few packages on their path.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from datetime import UTC, datetime

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")

CORE_LOGGER = "dovetail"


class LogOutput:
    """The configuration of this process's logs.

    for_children: the configuration as text, for child processes; "" if logs are not configured.
    """

    for_children = ""


def configure_logs(level: str, form: str, *, more: Sequence[str] = ()) -> None:
    """Write the logs of Dovetail and the warnings of other loggers to stderr.

    level: one of `LEVELS`. form: one of `FORMATS`. more: further loggers with this level.
    """
    formatter = JSONFormatter() if form == "json" else TextFormatter()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    for name in (CORE_LOGGER, *more):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(level.upper())
    # Python's handler for warnings of loggers without a handler, such as those of plugins.
    others = logging.StreamHandler(sys.stderr)
    others.setLevel(logging.WARNING)
    others.setFormatter(formatter)
    logging.lastResort = others
    LogOutput.for_children = f"{level} {form}"


def configure_logs_of_child(spec: str) -> None:
    """Configure the logs of a child process. spec: `LogOutput.for_children` of its parent."""
    level, _, form = spec.partition(" ")
    if level in LEVELS and form in FORMATS:
        configure_logs(level, form)


class TextFormatter(logging.Formatter):
    """Formats a log record as one line with time, level and message."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S")


class JSONFormatter(logging.Formatter):
    """Formats a log record as one line with a JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        created = datetime.fromtimestamp(record.created, UTC)
        fields = {
            "time": created.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)
