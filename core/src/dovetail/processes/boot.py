"""The settings of a child process: one record in unnamed shared memory.

The first line is JSON. The settings of the entry point follow, as bytes that only the entry point
reads. This module uses only the standard library, because some children have few packages on their
path.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, fields

from dovetail.errors import MessageError

_TYPES = {"str": str, "int": int, "list[str]": list, "list[int]": list}


@dataclass(frozen=True, kw_only=True)
class Boot:
    """The settings that every child needs.

    entry: "module:function", which is called with a `ChildContext` and returns the exit status.
    control: the descriptor of the child's end of the control socket. liveness: the descriptor of
    the memory for its heartbeats, or -1. folder: a directory to remove when the parent exits, or
    "". sys_path: the import path; empty for a child with its own path. descriptors: further
    descriptors passed to the child. logs: configuration of the child's logs (`log_output`); "" for
    none. settings: bytes for the entry point.
    """

    entry: str
    parent_pid: int
    control: int
    liveness: int
    folder: str
    sys_path: list[str]
    descriptors: list[int]
    logs: str
    settings: bytes

    def __post_init__(self) -> None:
        for field in fields(self)[:-1]:
            if type(value := getattr(self, field.name)) is not _TYPES[str(field.type)]:
                raise MessageError(
                    f"The boot record has an invalid value: {field.name}={value!r:.80}."
                )

    def encode(self) -> bytes:
        """Return the record as bytes."""
        head = {field.name: getattr(self, field.name) for field in fields(self)[:-1]}
        return json.dumps(head).encode() + b"\n" + self.settings


def read_boot(descriptor: int) -> Boot:
    """Read the record from the memory and close the memory. Raise MessageError if it is invalid."""
    with os.fdopen(descriptor, "rb") as file:
        head, _, settings = file.read().partition(b"\n")
    try:
        return Boot(settings=settings, **json.loads(head))
    except (ValueError, TypeError, RecursionError) as error:
        raise MessageError(f"The memory does not contain a boot record: {error}") from None
