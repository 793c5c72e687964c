"""API keys: read from options and a file, and compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping

from dovetail.cli.terminal import read_text_file
from dovetail.errors import ConfigError
from dovetail_server.settings import MIB, ServerSettings

MIN_KEY_CHARS = 4
MAX_KEY_CHARS = 512


class KeyRing:
    """A set of keys, of which only digests are kept."""

    def __init__(self, keys: Iterable[str] = (), *, option: str = "--api-key") -> None:
        """Raise ConfigError, naming the option, for a key that a client cannot send."""
        for key in keys:
            _check_key(key, option)
        self._digests = tuple(dict.fromkeys(_digest(key) for key in keys))

    def __bool__(self) -> bool:
        return bool(self._digests)

    def identify(self, headers: Mapping[str, str]) -> str:
        """Return the name of the key in the headers of a request, or "" for a wrong or missing key.

        Compares the key with every key of the ring, so that the time does not depend on the key.
        """
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            key = headers.get("x-api-key", "")
        request_digest = _digest(key.strip())
        key_name = ""
        for digest in self._digests:
            if hmac.compare_digest(digest, request_digest):
                key_name = f"key-{digest.hex()[:16]}"
        return key_name


def client_keys(settings: ServerSettings) -> KeyRing:
    """Return the keys of clients. Raise ConfigError for an unusable key or file."""
    file = settings.api_key_file
    keys = parse_keys(read_text_file("--api-key-file", file, max_bytes=MIB)) if file else []
    if file and not keys:
        raise ConfigError(f"--api-key-file {file} contains no key; write one key per line.")
    KeyRing(keys, option=f"--api-key-file {file}")
    return KeyRing([*settings.api_keys, *keys])


def admin_keys(settings: ServerSettings) -> KeyRing:
    """Return the keys of operators. Raise ConfigError for an unusable key."""
    return KeyRing(settings.admin_keys, option="--admin-key")


def parse_keys(text: str) -> list[str]:
    """Return the keys in the text of a file: one per line. Lines with "#" are comments."""
    lines = (line.strip() for line in text.splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _check_key(key: str, option: str) -> None:
    usable = key.isascii() and key.isprintable() and " " not in key
    if not usable or not MIN_KEY_CHARS <= len(key) <= MAX_KEY_CHARS:
        raise ConfigError(
            f"{option}: a key must have {MIN_KEY_CHARS} to {MAX_KEY_CHARS} printable ASCII "
            "characters without spaces."
        )
