"""Contract versions such as "0.1" and ranges of versions such as ">=0.1,<1".

A version is MAJOR.MINOR; MAJOR alone means MAJOR.0.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

Version = tuple[int, int]
"""A version: (major, minor)."""

_OPERATORS: Mapping[str, Callable[[Version, Version], bool]] = MappingProxyType(
    {
        ">=": operator.ge,
        "<=": operator.le,
        "==": operator.eq,
        "!=": operator.ne,
        ">": operator.gt,
        "<": operator.lt,
    }
)
_CLAUSE = re.compile(r"(>=|<=|==|!=|>|<)\s*(\d+)(?:\.(\d+))?")


@dataclass(frozen=True, kw_only=True)
class ApiRange:
    """A range of contract versions. clauses: pairs of an operator and a version."""

    text: str
    clauses: tuple[tuple[str, Version], ...]

    def allows(self, version: Version) -> bool:
        """Return whether `version` meets every clause."""
        return all(_OPERATORS[sign](version, bound) for sign, bound in self.clauses)


def parse_version(text: object) -> Version | None:
    """Parse a version: "1.2" gives (1, 2), an invalid version gives None."""
    match = re.fullmatch(r"(\d+)\.(\d+)", text) if isinstance(text, str) else None
    return (int(match[1]), int(match[2])) if match else None


def parse_range(text: object) -> ApiRange:
    """Parse a range. Raise ValueError with an example of a valid one."""
    parts = [part.strip() for part in text.split(",")] if isinstance(text, str) else []
    matches = [_CLAUSE.fullmatch(part) for part in parts]
    if not isinstance(text, str) or not all(matches):
        raise ValueError(f"{text!r} is not a range of versions; write a range such as '>=0.1,<1'")
    clauses = tuple((m[1], (int(m[2]), int(m[3] or 0))) for m in matches if m)
    return ApiRange(text=text, clauses=clauses)
