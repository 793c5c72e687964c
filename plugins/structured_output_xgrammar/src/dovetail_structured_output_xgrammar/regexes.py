"""Translates regular expressions to the part of their syntax that xgrammar matches exactly.

The library ignores anchors inside an expression, and inside JSON strings some expressions match
quotes that end the text. The translation therefore contains only groups, alternatives, repetitions
and explicit sets of characters. A class of letters, digits or spaces gets the smallest
set that JavaScript, Python and Rust agree on, so a translated expression never matches more.
All functions raise ValueError with a message about the expression.
"""

from __future__ import annotations

from typing import NamedTuple

MAX_GROUP_DEPTH = 32
MAX_REPETITIONS = 2000
MAX_REPEATED = 20_000
"""Maximum number of characters in an expression whose repetitions are written out."""

Ranges = tuple[tuple[int, int], ...]

EVERY: Ranges = ((0, 0xD7FF), (0xE000, 0x10FFFF))
JSON_SPECIAL: Ranges = ((0, 0x1F), (0x22, 0x22), (0x5C, 0x5C))
"""Characters that a JSON text must escape."""
_DIGITS: Ranges = ((0x30, 0x39),)
_WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_SPACE: Ranges = ((0x09, 0x0D), (0x20, 0x20))
_NOT_ASCII: Ranges = ((0x80, 0x10FFFF),)
_MORE_SPACE: Ranges = (
    *((0x1C, 0x1F), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A)),
    *((0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)),
)
_LINE_ENDS: Ranges = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))
_CLASSES: dict[str, tuple[Ranges, Ranges]] = {
    "d": (_DIGITS, (*_DIGITS, *_NOT_ASCII)),
    "w": (_WORD, (*_WORD, *_NOT_ASCII)),
    "s": (_SPACE, (*_SPACE, *_MORE_SPACE)),
}
"""For the letter of each class: the characters that are certainly in it, and those that may be."""
_ESCAPES = {"n": 0x0A, "r": 0x0D, "t": 0x09, "f": 0x0C, "v": 0x0B}
_CARET = 0x5E


class Pattern(NamedTuple):
    """An expression in the library's syntax.

    size: number of characters if all repetitions are written out. nullable: whether the expression
    matches the empty text.
    """

    text: str
    size: int
    nullable: bool

    def written(self) -> str:
        """Return the expression in the form that a JSON schema or a structural tag contains.

        The prefix avoids a bug of XGrammar, whose automata for expressions are wrong: "(ab*)?"
        matches "b", and some character sets match invalid UTF-8. `é{0}` matches only the empty
        text, but its non-ASCII character makes XGrammar convert the expression to grammar rules
        instead.
        """
        return f"^é{{0}}{self.text}$"


def translate(text: str, excluded: Ranges = (), *, search: bool = False) -> Pattern:
    """Return the expression for the library, which matches whole strings.

    excluded: characters that it must not match. search: whether `text` may match a substring.
    """
    parser = _Parser(text, excluded, search)
    expression = parser.alternatives(0)
    if parser.place < len(text):
        raise ValueError("the regular expression has an unmatched ')'")
    return expression


def without(ranges: Ranges, removed: Ranges) -> Ranges:
    """Return sorted ranges of the characters in `ranges` that are not in `removed`."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(high, merged[-1][1])
        else:
            merged.append((low, high))
    for first, last in removed:
        cut = [((low, min(high, first - 1)), (max(low, last + 1), high)) for low, high in merged]
        merged = [part for parts in cut for part in dict.fromkeys(parts) if part[0] <= part[1]]
    return tuple(merged)


def write_set(ranges: Ranges) -> str:
    """Return a set of characters in the library's syntax."""
    if ranges == ((_CARET, _CARET),):
        return "\\^"
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1] and chr(ranges[0][0]).isascii():
        character = chr(ranges[0][0])
        return character if character.isalnum() else f"\\u{ord(character):04X}"
    parts = [_write_range(low, high) for low, high in without(ranges, ((_CARET, _CARET),))]
    caret = any(low <= _CARET <= high for low, high in ranges)
    return f"[{''.join(parts)}{'^' if caret else ''}]"  # a caret at the start would negate the set


def _write_range(low: int, high: int) -> str:
    return _escape(low) if low == high else f"{_escape(low)}-{_escape(high)}"


def _escape(code: int) -> str:
    return f"\\u{code:04X}" if code <= 0xFFFF else f"\\u{{{code:X}}}"


class _Parser:
    def __init__(self, text: str, excluded: Ranges, search: bool) -> None:
        self._text = text
        self._excluded = excluded
        self._rest = f"{write_set(without(EVERY, excluded))}*" if search else ""
        self._num_repetitions = 0
        self.place = 0

    def alternatives(self, depth: int) -> Pattern:
        """Read alternatives up to a ")" or the end."""
        if depth > MAX_GROUP_DEPTH:
            raise ValueError(
                f"the regular expression has groups nested more than {MAX_GROUP_DEPTH} deep"
            )
        sequences = [self._sequence(depth)]
        while self._take("|"):
            sequences.append(self._sequence(depth))
        if len(sequences) == 1:
            return sequences[0]
        texts = [item.text for item in sequences if item.text]
        if not texts:
            return Pattern("", 0, True)
        optional = "?" if len(texts) < len(sequences) else ""
        size, nullable = (
            sum(item.size for item in sequences),
            any(item.nullable for item in sequences),
        )
        return Pattern(f"({'|'.join(texts)}){optional}", size, nullable)

    def _sequence(self, depth: int) -> Pattern:
        parts: list[Pattern] = []
        before = after = self._rest if depth == 0 else ""
        if depth == 0 and self._take("^"):
            before = ""
        while self.place < len(self._text) and self._peek() not in ("|", ")"):
            if depth == 0 and self._peek() == "$" and self._peek(1) in ("", "|"):
                self._take("$")
                after = ""
                break
            parts.append(self._repetition(self._atom(depth)))
        if before and not parts:
            after = ""
        text = before + "".join(part.text for part in parts) + after
        size = sum(part.size for part in parts) + bool(before) + bool(after)
        return Pattern(text, size, all(part.nullable for part in parts))

    def _atom(self, depth: int) -> Pattern:
        char = self._peek()
        if char == "(":
            return self._group(depth)
        if char == "[":
            return self._one_of(self._character_class())
        if char == "\\":
            return self._one_of(self._escaped())
        if char in "^$":
            raise self._error(f"{char!r} is supported only at the start or end of the expression")
        if char in "*+?{":
            raise self._error(f"nothing to repeat before {char!r}")
        self.place += 1
        if char == ".":
            return self._one_of(without(EVERY, _LINE_ENDS))
        return self._one_of(((ord(char), ord(char)),))

    def _group(self, depth: int) -> Pattern:
        start, self.place = self.place, self.place + 1
        if self._take("?") and not self._take(":"):
            named = self._take("P<") or (self._peek(1) not in ("=", "!") and self._take("<"))
            end = self._text.find(">", self.place)
            if not named or not self._text[self.place : max(end, 0)].isidentifier():
                raise self._error(f"the group {self._text[start : start + 4]!r} is not supported")
            self.place = end + 1
        inner = self.alternatives(depth + 1)
        if not self._take(")"):
            raise self._error("the group is not closed")
        return inner._replace(text=f"({inner.text})") if inner.text else inner

    def _repetition(self, atom: Pattern) -> Pattern:
        counts = self._counts()
        if counts is None:
            return atom
        self._num_repetitions += 1
        if self._num_repetitions > MAX_REPETITIONS:
            raise self._error(f"there are more than {MAX_REPETITIONS} repetitions")
        minimum, maximum = counts
        if atom.text and (maximum is None or maximum > 1) and atom.nullable:
            if maximum is not None:
                raise self._error(
                    "a bounded repetition ({m,n}) of an expression that can match the empty string "
                    "is not supported"
                )
            minimum = 0
        self._take("?")  # a lazy repetition matches the same strings
        if self._peek() in ("*", "+", "?", "{"):
            raise self._error(f"multiple repeat at {self._peek()!r}")
        times = max(minimum, 1 if maximum is None else maximum)
        if times > 1 and atom.size * times > MAX_REPEATED:
            raise self._error(f"the repetitions expand to more than {MAX_REPEATED} characters")
        if not atom.text or maximum == 0:
            return Pattern("", 0, True)
        short = {(0, None): "*", (1, None): "+", (0, 1): "?", (1, 1): ""}
        written = (
            f"{{{minimum}}}"
            if minimum == maximum
            else f"{{{minimum},{'' if maximum is None else maximum}}}"
        )
        text = atom.text + short.get((minimum, maximum), written)
        return Pattern(text, atom.size * times, minimum == 0 or atom.nullable)

    def _counts(self) -> tuple[int, int | None] | None:
        """Read a repetition. Return its minimum and maximum counts, or None if there is none."""
        for symbol, counts in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._take(symbol):
                return counts
        if not self._take("{"):
            return None
        end = self._text.find("}", self.place)
        minimum, comma, maximum = self._text[self.place : max(end, self.place)].partition(",")
        numbers = [minimum, maximum] if maximum else [minimum]
        if not all(number.isascii() and number.isdigit() and len(number) < 9 for number in numbers):
            raise self._error("the repetition is not {n}, {n,} or {n,m}")
        self.place = end + 1
        first = int(minimum)
        last = (int(maximum) if maximum else None) if comma else first
        if last is not None and last < first:
            raise self._error("the repetition has a minimum above its maximum")
        return first, last

    def _character_class(self) -> Ranges:
        self.place += 1
        negated = self._take("^")
        ranges: list[tuple[int, int]] = []
        if self._peek() == "]":
            raise self._error("']' at the start of a class must be written '\\]'")
        while not self._take("]"):
            if self.place >= len(self._text):
                raise self._error("the character class is not closed")
            if self._peek() == "[" or self._peek() + self._peek(1) in ("&&", "--", "~~"):
                raise self._error("nested classes and operations on classes are not supported")
            low = self._class_item(negated)
            if len(low) == 1 and low[0][0] == low[0][1] and self._is_range():
                self.place += 1
                high = self._class_item(negated)
                if len(high) != 1 or high[0][0] != high[0][1] or high[0][0] < low[0][0]:
                    raise self._error("the range in the character class is not valid")
                low = ((low[0][0], high[0][0]),)
            ranges += low
        return without(EVERY, tuple(ranges)) if negated else without(tuple(ranges), ())

    def _is_range(self) -> bool:
        return self._peek() == "-" and self._peek(1) not in ("]", "")

    def _class_item(self, negated: bool) -> Ranges:
        if self._peek() == "\\":
            return self._escaped(possibly=negated)
        self.place += 1
        code = ord(self._text[self.place - 1])
        return ((code, code),)

    def _escaped(self, possibly: bool = False) -> Ranges:
        """Read an escape.

        possibly: whether to include characters on which regex engines disagree.
        """
        letter = self._peek(1)
        self.place += 2
        if letter.lower() in _CLASSES:
            surely, maybe = _CLASSES[letter.lower()]
            if letter.islower():
                return maybe if possibly else surely
            return without(EVERY, surely if possibly else maybe)
        if letter in _ESCAPES:
            return ((_ESCAPES[letter], _ESCAPES[letter]),)
        if letter in ("x", "u"):
            code = self._hexadecimal(letter)
            return ((code, code),)
        if not letter or letter.isalnum() or not letter.isascii():
            raise self._error(f"the escape '\\{letter}' is not supported")
        return ((ord(letter), ord(letter)),)

    def _hexadecimal(self, letter: str) -> int:
        if self._take("{"):
            end = self._text.find("}", self.place)
            digits = self._text[self.place : max(end, self.place)]
            self.place = end + 1
        else:
            count = 2 if letter == "x" else 4
            digits = self._text[self.place : self.place + count].ljust(count)
            self.place += count
        try:
            code = int(digits, 16) if len(digits) <= 6 and digits.isalnum() else -1
        except ValueError:
            code = -1
        if not any(low <= code <= high for low, high in EVERY):
            raise self._error(f"the escape '\\{letter}' does not name a character")
        return code

    def _one_of(self, ranges: Ranges) -> Pattern:
        allowed = without(ranges, (*self._excluded, (0xD800, 0xDFFF)))
        if not allowed:
            raise self._error("a part of the expression matches no character that is allowed here")
        return Pattern(write_set(allowed), 1, False)

    def _peek(self, offset: int = 0) -> str:
        return self._text[self.place + offset : self.place + offset + 1]

    def _take(self, token: str) -> bool:
        is_next = self._text.startswith(token, self.place)
        self.place += len(token) if is_next else 0
        return is_next

    def _error(self, what: str) -> ValueError:
        return ValueError(f"the regular expression is not supported at {self.place}: {what}")
