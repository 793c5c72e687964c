"""A Griffe extension: the fields that a docstring describes become a list.

Docstrings of this project describe fields and parameters in lines such as "rank: number of the
worker in the engine". The line after such a description continues it or starts the next one.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

_FIELD = re.compile(r"^([a-z_]\w*(?:, [a-z_]\w*)*): (?=\S)")
_SENTENCE = re.compile(r"(Raise|Return|Yield)s? ")


def with_lists(text: str) -> str:
    """Return the docstring with a Markdown list item for each described field."""
    lines: list[str] = []
    in_field = False
    for line in text.splitlines():
        match = _FIELD.match(line)
        if match:
            names = ", ".join(f"`{name}`" for name in match[1].split(", "))
            lines += [""] if lines and lines[-1] and not in_field else []
            lines.append(f"- {names}: {line[match.end() :]}")
        elif in_field and _SENTENCE.match(line):
            lines += ["", line]
        else:
            lines.append(f"  {line.strip()}" if in_field and line else line)
        in_field = bool(match) or (in_field and lines[-1].startswith("  "))
    return "\n".join(lines)


class DocstringFields(Extension):
    """Rewrites each docstring when Griffe has read the object."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        """Rewrite the docstring of an object."""
        if obj.docstring is not None:
            obj.docstring.value = with_lists(obj.docstring.value)
