"""Reads the files of a model directory, which are not trusted.

Every file must be a regular file (symbolic links are followed, because hub caches use them) within
a size limit. JSON must be UTF-8 without duplicate keys, NaN, lone surrogates, huge integers or deep
nesting. Violations raise ModelError with the file and the limit. Opening never blocks: a FIFO,
socket, device or directory is rejected. Standard library only.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

from dovetail.errors import ModelError

MIB = 1 << 20
MAX_BYTES = {
    "config.json": 16 * MIB,
    "generation_config.json": MIB,
    "special_tokens_map.json": 16 * MIB,
    "tokenizer_config.json": 64 * MIB,
    "tokenizer.json": 256 * MIB,
    "model.safetensors.index.json": 128 * MIB,
}
"""Size limit by file name, several times the largest size in published models."""
MAX_OTHER_BYTES = 16 * MIB
MAX_TEMPLATE_BYTES = MIB
MAX_JSON_DEPTH = 64
MAX_INTEGER_DIGITS = 100

_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)', re.DOTALL)
"""Matches a JSON string in linear time, even if the file ends within the string."""
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a directory",
}


def file_exists(path: Path) -> bool:
    """Return whether `path` exists, including a dangling link. Never raise."""
    return os.path.lexists(path)


@contextmanager
def open_model_file(path: Path) -> Iterator[int]:
    """Open a regular file for reading and yield its descriptor.

    Raises ModelError for a file that is absent, unreadable or not a regular file.
    """
    # The type is checked before opening, because opening a device can have side effects, and again
    # afterwards, because the file may have been replaced.
    try:
        status = os.stat(path)
    except (OSError, ValueError) as error:
        _reject_unreadable(path, error)
    _check_regular(path, status)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as error:
        _reject_unreadable(path, error)
    try:
        _check_regular(path, os.fstat(descriptor))
        yield descriptor
    finally:
        os.close(descriptor)


def read_model_file(path: Path, *, max_bytes: int | None = None) -> bytes:
    """Return the content of a regular file.

    max_bytes: None for the limit of that file name. Raises ModelError if the file cannot be read,
    is too large, or changes while it is read.
    """
    limit = MAX_BYTES.get(path.name, MAX_OTHER_BYTES) if max_bytes is None else max_bytes
    with open_model_file(path) as descriptor:
        before = os.fstat(descriptor)
        if before.st_size > limit:
            raise ModelError(
                f"{path} has {before.st_size} bytes; the limit for this file is {limit}."
            )
        try:
            content = _read(descriptor, before.st_size + 1)
        except OSError as error:
            _reject_unreadable(path, error)
        after = os.fstat(descriptor)
    same_time = before.st_mtime_ns == after.st_mtime_ns
    if len(content) != before.st_size or after.st_size != before.st_size or not same_time:
        raise ModelError(
            f"{path} changed while it was read ({before.st_size} bytes expected, "
            f"{len(content)} read).\nRetry when no other program is writing to it."
        )
    return content


def read_model_text(path: Path, *, max_bytes: int | None = None) -> str:
    """Return the text of a UTF-8 file, without a byte order mark.

    Raises ModelError if the file is not UTF-8, and the errors of `read_model_file`.
    """
    content = read_model_file(path, max_bytes=max_bytes)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ModelError(f"{path} is not valid UTF-8: {error}.\nFetch it again.") from None


def read_json_object(path: Path, *, max_bytes: int | None = None) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises ModelError if the file does not contain a JSON object, and the errors of
    `read_model_file`.
    """
    value = parse_json(path, read_model_file(path, max_bytes=max_bytes))
    if not isinstance(value, dict):
        raise ModelError(f"{path} must contain a JSON object, got {type(value).__name__}.")
    return value


def parse_json(path: Path, content: bytes) -> Any:
    """Return the JSON value in `content`. Raise ModelError, naming `path`, if it is not valid."""
    check_json_depth(path, content)
    try:
        value = json.loads(
            content.decode("utf-8-sig"),
            parse_int=_parse_int,
            parse_constant=_parse_constant,
            object_pairs_hook=_unique_keys,
        )
    except (ValueError, RecursionError) as error:
        raise ModelError(
            f"{path} is not valid JSON: {str(error).splitlines()[0]}.\nFetch it again."
        ) from None
    if _SURROGATE.search(content):
        _check_unicode(path, value)
    return value


def check_json_depth(path: Path, content: bytes) -> None:
    """Raise ModelError if brackets outside of strings nest deeper than `MAX_JSON_DEPTH`."""
    if content.count(b"[") + content.count(b"{") <= MAX_JSON_DEPTH:
        return
    depth = 0
    for bracket in _STRING.sub(b"", content).translate(None, _NOT_BRACKETS):
        depth += 1 if bracket in b"[{" else -1
        if depth > MAX_JSON_DEPTH:
            raise ModelError(
                f"{path} is not valid JSON: it is nested more than {MAX_JSON_DEPTH} levels deep.\n"
                "Fetch it again."
            )


def list_model_files(folder: Path, ending: str, *, at_most: int) -> list[Path]:
    """Return the files of `folder` whose names end with `ending`, sorted.

    The list is empty if the directory does not exist. Raises ModelError if it has more than
    `at_most` such files or cannot be read.
    """
    try:
        with os.scandir(folder) as entries:
            named = (entry.name for entry in entries if entry.name.endswith(ending))
            names = sorted(islice(named, at_most + 1))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        _reject_unreadable(folder, error)
    if len(names) > at_most:
        raise ModelError(f"{folder} has more than {at_most} files with the ending {ending}.")
    return [folder / name for name in names]


def _read(descriptor: int, num_bytes: int) -> bytes:
    pieces: list[bytes] = []
    while num_bytes > 0 and (piece := os.read(descriptor, min(num_bytes, 16 * MIB))):
        pieces.append(piece)
        num_bytes -= len(piece)
    return b"".join(pieces)


def _check_regular(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "a special file")
        raise ModelError(f"{path} is {kind}; it must be a regular file.")


def _reject_unreadable(path: Path, error: OSError | ValueError) -> NoReturn:
    if isinstance(error, FileNotFoundError):
        dangling = os.path.islink(path)
        why = "it is a link to a file that does not exist" if dangling else "it does not exist"
    else:
        why = getattr(error, "strerror", None) or str(error)
    raise ModelError(f"{path} cannot be read: {why}.") from None


def _parse_int(text: str) -> int:
    if len(text) > MAX_INTEGER_DIGITS:
        raise ValueError(
            f"an integer has {len(text)} digits; at most {MAX_INTEGER_DIGITS} are allowed"
        )
    return int(text)


def _parse_constant(text: str) -> float:
    if text == "NaN":
        raise ValueError("NaN is not a JSON value")
    return float(text)  # Configs of Mamba 2 have {"time_step_limit": [0, Infinity]}


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        duplicates = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {duplicates[:80]!r} occurs twice in one object")
    return mapping


def _check_unicode(path: Path, value: Any) -> None:
    try:
        for text in _strings(value):
            text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ModelError(
            f"{path} is not valid JSON: a string has a lone surrogate ({error}).\nFetch it again."
        ) from None


def _strings(value: Any) -> Iterator[str]:
    """Yield every key and string of a JSON value."""
    waiting: list[Any] = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, dict):
            waiting.extend(item)
            waiting.extend(item.values())
        elif isinstance(item, Iterable):
            waiting.extend(item)
