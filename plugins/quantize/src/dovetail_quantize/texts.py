"""Calibration and evaluation texts as chunks of tokens."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from dovetail.errors import ConfigError
from dovetail_quantize.opened_model import CHUNK_TOKENS, OpenedModel

MAX_BYTES = 64 << 20
MIN_TOKENS = 256
_MAX_CHARACTERS = 16
"""Number of characters that are tokenized per requested token."""


def read_text(option: str, path: Path) -> str:
    """Return the text of a UTF-8 file. Raise ConfigError, naming the option, for other files."""
    try:
        size = path.stat().st_size if path.is_file() else -1
        content = path.read_bytes() if 0 <= size <= MAX_BYTES else b""
    except OSError as error:
        raise ConfigError(f"{option}={path}: {error.strerror}.") from None
    if size < 0:
        raise ConfigError(f"{option}={path} is not a file; specify a text file.")
    if size > MAX_BYTES:
        raise ConfigError(f"{option}={path} has {size} bytes; at most {MAX_BYTES} are read.")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{option}={path} is not UTF-8 text.") from None


def built_in_text() -> str:
    """Return the evaluation text of this package."""
    return files("dovetail_quantize").joinpath("evaluation_text.txt").read_text("utf-8")


def split_chunks(opened: OpenedModel, text: str, option: str, max_tokens: int) -> list[list[int]]:
    """Return chunks of up to 512 tokens. Raise ConfigError if the text is too short."""
    ids = opened.encode(text[: max_tokens * _MAX_CHARACTERS])[:max_tokens]
    length = min(CHUNK_TOKENS, opened.longest_chunk)
    fewest = min(MIN_TOKENS, length)
    if len(ids) < fewest:
        raise ConfigError(
            f"{option}: the text has {len(ids)} tokens; at least {fewest} are required."
        )
    chunks = [ids[start : start + length] for start in range(0, len(ids), length)]
    return [chunk for chunk in chunks if len(chunk) >= min(32, length)]
