"""Checks grammars in GBNF or EBNF, and writes strings in this syntax.

The library's syntax has more than GBNF: functions such as `Token(1)`, properties of rules, strings
that must follow a rule. Such grammars are rejected, because they restrict more than the text of the
output. All functions raise ValueError with a message about the grammar.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

MAX_DEPTH = 32
MAX_RULES = 500
MAX_COUNTS = 4000
"""Maximum sum of the numbers in repetitions; "*", "+" and "?" count as 2."""

_FUNCTIONS = frozenset(
    {"TagDispatch", "Token", "ExcludeToken", "TokenTagDispatch", "Regex", "Substring"}
)
_TOKEN = re.compile(
    r"""(?P<blank>[ \t\r\n]+|\#[^\r\n]*)
    |(?P<text>"(?:\\.|[^"\\\r\n])*")
    |(?P<set>\[(?:\\.|[^\]\\\r\n])+\])
    |(?P<define>::=)
    |(?P<name>[A-Za-z_][A-Za-z0-9_.-]*)
    |(?P<count>\{[0-9]{1,8}(?:,[0-9]{0,8})?\})
    |(?P<sign>[()|*+?])""",
    re.VERBOSE,
)


def check_grammar(text: str) -> str:
    """Return the grammar, if the library reads it as GBNF."""
    if "::=" not in text:
        raise ValueError(
            "the grammar has no rule with '::='; this plugin needs GBNF, and does not support the "
            "syntax of Lark"
        )
    depth = rules = counts = 0
    before = ("", "")
    for kind, match in _tokens(text):
        if kind == "define":
            rules += 1
            if before[0] != "name" or rules > MAX_RULES:
                raise ValueError(f"'::=' must follow a name, at most {MAX_RULES} times")
        if match == "(" and before[1] in _FUNCTIONS:
            raise ValueError(f"the function {before[1]} is not supported")
        if kind == "count":
            counts += max(map(int, re.findall("[0-9]+", match)))
        counts += 2 * (match in ("*", "+", "?"))
        if counts > MAX_COUNTS:
            raise ValueError(f"the sum of the repetitions is above {MAX_COUNTS}")
        depth += {"(": 1, ")": -1}.get(match, 0)
        if not 0 <= depth <= MAX_DEPTH:
            raise ValueError(f"groups must be closed, and nested at most {MAX_DEPTH} deep")
        before = kind, match
    return text


def quote(text: str) -> str:
    """Return a string literal in the library's syntax."""
    if "\0" in text:
        raise ValueError("a string must not contain the character U+0000")
    return '"' + "".join(map(_quoted, text)) + '"'


def _quoted(char: str) -> str:
    if char.isascii() and char.isprintable() and char not in '"\\':
        return char
    return f"\\U{ord(char):08X}"


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise ValueError(
                f"the grammar is not GBNF at character {position}: "
                f"{text[position : position + 20]!r}"
            )
        position = match.end()
        if match.lastgroup != "blank":
            yield str(match.lastgroup), match.group()
