"""Tests a tokenizer in a bounded child before this process loads it.

A tokenizer.json can crash the library, which runs in this process, or make it take all memory.
The hash of a tested tokenizer is kept in this process. For large files, whose test takes long, it
is also kept in a private directory ($XDG_CACHE_HOME/dovetail/tokenizers).
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from dovetail.errors import ModelError
from dovetail.sandbox.child import (
    BoundedChild,
    ChildFailure,
    ChildLimits,
    ChildTask,
    HandlerError,
)
from dovetail.sandbox.frames import encode
from dovetail.tokenizers.core_building import as_json

REMEMBERED_BYTES = 1 << 20
"""Minimum size of files whose hash is stored. Testing smaller files takes less than 0.1 s."""
MAX_REMEMBERED = 256
PROBE_TIMEOUT_S = 5.0
"""Time limit for tokenizing about 30,000 characters. Published tokenizers need less than 0.1 s."""
_CHECKS = 2
"""Version of the checks in `tokenizer_child`. After a change every tokenizer is tested again."""
_TASK = ChildTask(
    handler="dovetail.tokenizers.tokenizer_child:check",
    packages=("tokenizers", "huggingface_hub"),
    ends_when_large=False,
)
_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH
_passed: set[str] = set()


def try_tokenizer(
    file: Path,
    content: bytes | Mapping[str, Any],
    added_tokens: Sequence[Mapping[str, Any]],
    special_texts: Sequence[str],
    limits: ChildLimits,
) -> None:
    """Raise ModelError, naming `file`, if the tokenizer does not work within `limits`.

    content: as for `core_building.load_core`. The other arguments are the same as for `build_core`.
    Raises StartError if the child cannot be started.
    """
    text = encode({"added_tokens": list(added_tokens), "special_texts": list(special_texts)})
    # The representation of an object is faster than JSON.
    identity = content if isinstance(content, bytes) else repr(content).encode()
    digest = _digest(identity, text, limits)
    if digest in _passed or (len(identity) >= REMEMBERED_BYTES and _is_remembered(digest)):
        return
    try:
        with closing(BoundedChild(_TASK, limits)) as child:
            child.call(text, content if isinstance(content, bytes) else as_json(content))
            child.call(encode(None), timeout_s=min(PROBE_TIMEOUT_S, limits.timeout_s))
    except HandlerError as error:
        raise ModelError(f"{file} cannot be used: {error}.") from None
    except ChildFailure as failure:
        raise ModelError(
            f"{file} cannot be used: {failure} (limits: tokenizer_timeout_s="
            f"{limits.timeout_s:g}, tokenizer_memory_mib={limits.memory_bytes >> 20})."
        ) from None
    _passed.add(digest)
    if len(identity) >= REMEMBERED_BYTES:
        _remember(digest)


def _digest(content: bytes, text: bytes, limits: ChildLimits) -> str:
    versions = f"{version('dovetail-core')} {_CHECKS} {version('tokenizers')} {limits}"
    digest = hashlib.blake2b(versions.encode(), digest_size=32)
    digest.update(len(text).to_bytes(8, "little") + text)
    digest.update(content)
    return digest.hexdigest()


def _folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return root / "dovetail" / "tokenizers"


def _is_private(folder: Path) -> bool:
    status = os.lstat(folder)
    own = status.st_uid == os.geteuid() and not status.st_mode & _OTHERS_MAY_WRITE
    return own and stat.S_ISDIR(status.st_mode)


def _is_remembered(digest: str) -> bool:
    with suppress(OSError, RuntimeError):  # RuntimeError: the user has no home directory
        folder = _folder()
        return _is_private(folder) and stat.S_ISREG(os.lstat(folder / digest).st_mode)
    return False


def _remember(digest: str) -> None:
    with suppress(OSError, RuntimeError):  # without the file, the next process tests it again
        folder = _folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_private(folder):
            return
        notes = sorted(folder.iterdir(), key=lambda note: os.lstat(note).st_mtime_ns)
        for note in notes[: max(0, len(notes) - MAX_REMEMBERED + 1)]:
            note.unlink(missing_ok=True)
        os.close(os.open(folder / digest, os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW, 0o600))
