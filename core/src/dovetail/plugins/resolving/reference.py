"""References: the forms in which a user can name a plugin.

    fcfs                    an installed plugin's name
    fcfs@dovetail-sched     the same, from the given distribution
    package.module:Class    a class; a nested class is `Outer.Inner`
    package.module.Class    the same, with a dot
    ./file.py:Class         a class in a file that the user trusts

This module only parses; the registry checks whether the plugin exists.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dovetail.errors import PluginError
from dovetail.plugins.working_directory import check_working_directory
from dovetail.value_checks import shorten

FORMS = "a name, name@distribution, or a class as package.module:Class"
"""The forms of references that need no further permission, for messages."""


MAX_LENGTH = 4096
"""Maximum characters of a reference: the maximum length of a path."""


@dataclass(frozen=True, kw_only=True)
class NamedReference:
    """The name of an installed plugin. distribution: empty for any."""

    name: str
    distribution: str = ""


@dataclass(frozen=True, kw_only=True)
class QualifiedReference:
    """A class by its module and its path in it ("Class", "Outer.Inner").

    dotted: written with dots only. The last dot is then assumed to end the module; loading corrects
    the assumption.
    """

    module: str
    attribute: str
    dotted: bool = False

    @property
    def target(self) -> str:
        """The class as "module:Class"."""
        return f"{self.module}:{self.attribute}"


@dataclass(frozen=True, kw_only=True)
class FileReference:
    """A class in a Python file, given by its absolute path."""

    path: Path
    attribute: str

    @property
    def target(self) -> str:
        """The class as "/absolute/file.py:Class"."""
        return f"{self.path}:{self.attribute}"


Reference = NamedReference | QualifiedReference | FileReference


def parse_reference(text: str) -> Reference:
    """Parse a reference. Raise PluginError if it has none of the supported forms.

    Raises ConfigError for a relative path if the working directory does not exist.
    """
    text = text.strip()
    if len(text) > MAX_LENGTH:
        raise PluginError(
            f"{shorten(text)} does not name a plugin: it has {len(text)} characters, and at most "
            f"{MAX_LENGTH} are read. Write {FORMS}."
        )
    before, colon, attribute = text.rpartition(":")
    is_path = before.endswith(".py") or before.startswith(("./", "../", "/", "~"))
    if colon and is_path and _is_dotted_name(attribute):
        return FileReference(path=_absolute(before), attribute=attribute)
    if colon and _is_dotted_name(before) and _is_dotted_name(attribute):
        return QualifiedReference(module=before, attribute=attribute)
    if text.endswith(".py"):
        raise PluginError(f"{text!r} names a file, but no class in it. Write {text}:ClassName.")
    name, at, distribution = text.partition("@")
    if colon or not name or (at and not distribution):
        raise PluginError(f"{text!r} does not name a plugin. Write {FORMS}.")
    if not at and "." in name and _is_dotted_name(name):
        module, _, last = name.rpartition(".")
        return QualifiedReference(module=module, attribute=last, dotted=True)
    return NamedReference(name=name, distribution=distribution)


def reference_text(reference: str | type) -> str:
    """Return a reference as text. A class becomes "module:Class"."""
    if isinstance(reference, type):
        return f"{reference.__module__}:{reference.__qualname__}"
    return reference


def _absolute(text: str) -> Path:
    try:
        path = Path(text).expanduser()
    except RuntimeError as error:
        raise PluginError(f"{text!r} names a file, but its path is not valid: {error}") from None
    if not path.is_absolute():
        check_working_directory()
    return path.absolute()


def _is_dotted_name(text: str) -> bool:
    return all(part.isidentifier() for part in text.split("."))
