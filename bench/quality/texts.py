"""The evaluated texts: excerpts of files of installed packages, identified by hash.

Evaluation and calibration data come from different packages, and French is never used for
calibration. If the file of a text is missing or different, the text is reported and skipped.
"""

from __future__ import annotations

import gettext
import hashlib
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

NUM_CHARACTERS = 32_000
MAX_FILE_BYTES = 4 << 20


class TextError(Exception):
    """A text is missing on this machine or differs from the expected text."""


@dataclass(frozen=True, kw_only=True)
class Text:
    """One text. domain: its name in tables. sources: packages with their versions, for tables.

    read: returns the characters from which the excerpt is cut. start: the marker with which the
    excerpt begins.
    sha256: the hash of the excerpt in UTF-8. num_characters: the maximum length of the excerpt.
    """

    domain: str
    sources: str
    read: Callable[[], str]
    sha256: str
    start: str = ""
    num_characters: int = NUM_CHARACTERS

    def excerpt(self) -> str:
        """Return the excerpt. Raises TextError if the text is missing or has a different hash."""
        text = self.unchecked()
        digest = hashlib.sha256(text.encode()).hexdigest()
        if digest != self.sha256:
            raise TextError(
                f"{self.domain}: the text of {self.sources} has the SHA-256 {digest}, expected "
                f"{self.sha256}; install these versions"
            )
        return text

    def unchecked(self) -> str:
        """Return the excerpt of the installed version. Raises TextError if no file is installed."""
        text = self.read()
        begin = text.find(self.start)
        if begin < 0:
            raise TextError(f"{self.domain}: {self.sources} does not contain {self.start!r}")
        return text[begin : begin + self.num_characters]


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(MAX_FILE_BYTES)
    except OSError as error:
        raise TextError(str(error)) from None


def _package_files(package: str, *names: str) -> Callable[[], str]:
    """Read files of an installed Python package. Files are identified by path suffixes."""

    def read() -> str:
        try:
            files = importlib.metadata.files(package) or []
        except importlib.metadata.PackageNotFoundError:
            raise TextError(f"{package} is not installed") from None
        collected = []
        for name in names:
            paths = [Path(str(file.locate())) for file in files if str(file).endswith(name)]
            if not paths:
                raise TextError(f"{package} has no file {name}")
            collected.append(_read(paths[0]).decode("utf-8"))
        return "\n".join(collected)

    return read


def _readmes(*packages: str) -> Callable[[], str]:
    """Read the README texts of the installed Python packages."""

    def read() -> str:
        try:
            every = [importlib.metadata.metadata(package) for package in packages]
        except importlib.metadata.PackageNotFoundError as error:
            raise TextError(f"{error} is not installed") from None
        return "\n\n".join(str(item.get_payload()).strip() for item in every)

    return read


def _translations(path: str) -> Callable[[], str]:
    """Read the long messages of a compiled catalog of a Debian package, in their order."""

    def read() -> str:
        try:
            with Path(path).open("rb") as file:
                catalog = gettext.GNUTranslations(file)._catalog  # type: ignore[attr-defined]
        except OSError as error:
            raise TextError(str(error)) from None
        texts = [text for key, text in sorted(catalog.items(), key=str) if key and len(text) > 100]
        return "\n".join(texts)

    return read


def _common_licenses(*names: str) -> Callable[[], str]:
    folder = Path("/usr/share/common-licenses")
    return lambda: "\n".join(_read(folder / name).decode("utf-8") for name in names)


EVALUATION = (
    Text(
        domain="licenses",
        sources="numpy 2.4.6 (GPL text)",
        read=_package_files("numpy", "licenses/LICENSE.txt"),
        start="GNU GENERAL PUBLIC LICENSE",
        sha256="e3fc01a29ec393947daa0912a732341ff0295c4805ededaa43069191878c8ac2",
    ),
    Text(
        domain="READMEs",
        sources="rich 15.0.0, tokenizers 0.23.3, cyclopts 5.4.0",
        read=_readmes("rich", "tokenizers", "cyclopts"),
        sha256="99f2eefd6d7e324e8b77d8f200fb0bf3773f8abf010c378784528cc9cfa71141",
    ),
    Text(
        domain="source code",
        sources="pydantic 2.14.3 (fields.py)",
        read=_package_files("pydantic", "pydantic/fields.py"),
        sha256="bc5dd0a304c0ade942193993f109c06370be7e7cc73e6f98a256d2d5c124305d",
    ),
    Text(
        domain="French",
        sources="Debian coreutils 9.1-1 (fr)",
        read=_translations("/usr/share/locale/fr/LC_MESSAGES/coreutils.mo"),
        sha256="9a1596484f004e793ee1a433b50d0a266f9fc732b678e3d143f80b9da3b97386",
    ),
)

CALIBRATION = (
    Text(
        domain="licenses",
        sources="Debian base-files (MPL-2.0, Apache-2.0)",
        read=_common_licenses("MPL-2.0", "Apache-2.0"),
        sha256="0f222bc079ca72a62929ad950e85ec8bcb2272c60b87aa4e4499b46c45a01609",
    ),
    Text(
        domain="READMEs",
        sources="transformers 5.23.0, hypothesis 6.170.15",
        read=_readmes("transformers", "hypothesis"),
        sha256="6e6c113c26a2eebc362e3feb0cae09232aaf0b169c74c39e90f03c7578be53dd",
    ),
    Text(
        domain="source code",
        sources="jinja2 3.1.6 (environment.py)",
        read=_package_files("jinja2", "jinja2/environment.py"),
        sha256="bea280ef11636a7a0bb20554360fb2de34b987976efa3e421a83c784d82d971b",
    ),
)

FIDELITY = (
    Text(
        domain="licenses",
        sources="Debian base-files (GPL-3, LGPL-2.1, GFDL-1.3)",
        read=_common_licenses("GPL-3", "LGPL-2.1", "GFDL-1.3"),
        num_characters=96_000,
        sha256="f718ffed4d9ec409ac14dc764cf44827b7c53d6ff9eb736c5884ac8f1fc00d79",
    ),
    Text(
        domain="source code",
        sources="pydantic 2.14.3 (main.py, types.py)",
        read=_package_files("pydantic", "pydantic/main.py", "pydantic/types.py"),
        num_characters=96_000,
        sha256="5386f7244e269066c109fc3e7adb5f619ffdae4162da248b593f645e89def5cc",
    ),
)
"""Longer texts for `fidelity`, which compares two engines with the same file."""
