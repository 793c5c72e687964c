"""Finds the commands that installed packages add to the command line, without importing them.

An entry point of the group `dovetail.command` names a function. Its name is the words of the
command, joined by dots. The manifest has the line for `--help`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from importlib.metadata import Distribution

from dovetail.errors import PluginError
from dovetail.plugins.metadata.discovery import Candidate, discover
from dovetail.plugins.metadata.manifest import read_tables

KIND = "command"
"""The kind under which lists and manifests contain commands. This kind has no contract."""

DEVKIT = "dovetail-devkit"
DEVKIT_COMMANDS = ("plugins doctor", "plugins new")
"""The commands of the distribution `DEVKIT`. No other distribution may define these commands."""

_NAME = re.compile(r"[a-z][a-z0-9-]*(\.[a-z][a-z0-9-]*)*")


@dataclass(frozen=True, kw_only=True)
class Command:
    """An installed command. plugin: the command's entry point. help: the help line."""

    plugin: Candidate
    help: str

    @property
    def words(self) -> str:
        """The words that the user types for the command."""
        return self.plugin.name.replace(".", " ")


@dataclass(frozen=True, kw_only=True)
class Commands:
    """The usable commands of all distributions, and the rejected ones with the reason, by name."""

    usable: tuple[Command, ...]
    set_aside: tuple[tuple[Command, str], ...]


def find_commands(
    built_in: Collection[str], installed: Iterable[Distribution] | None = None
) -> Commands:
    """Return the commands of `installed`, or of every distribution on `sys.path`.

    built_in: the core's commands, which other commands cannot replace or hide.
    """
    commands = sorted(_declared(installed), key=lambda item: (item.words, item.plugin.distribution))
    own_words = [
        item.words for item in commands if item.plugin.first_party and not _rejection(item)
    ]
    own_words += DEVKIT_COMMANDS
    set_aside = [(item, reason) for item in commands if (reason := _rejection(item, own_words))]
    sound = [item for item in commands if not _rejection(item, own_words)]
    counts, usable = Counter(item.words for item in sound), []
    for item in sound:
        reason = _conflict(item.words, built_in) or _conflict(item.words, counts)
        if item.words in built_in:
            reason = "a command of Dovetail has the same words and takes precedence"
        elif counts[item.words] > 1:
            same = (other.plugin.distribution for other in sound if other.words == item.words)
            owners = ", ".join(dict.fromkeys(same))
            reason = f"several distributions have this command: {owners}; uninstall all but one"
        if reason:
            set_aside.append((item, reason))
        else:
            usable.append(item)
    return Commands(usable=tuple(usable), set_aside=tuple(set_aside))


def require_devkit(typed: str, installed: Collection[str]) -> None:
    """Raise PluginError if `typed` starts with a devkit command that is not installed."""
    for words in DEVKIT_COMMANDS:
        if typed.startswith(f"{words} ") and words not in installed:
            raise PluginError(
                f"`dovetail {words}` is part of {DEVKIT}, which is not installed. "
                f"Run: pip install {DEVKIT}"
            )


def _declared(installed: Iterable[Distribution] | None) -> Iterable[Command]:
    for installation in discover(installed).installations.values():
        names = {name for kind, name in installation.declared if kind == KIND}
        if not names:
            continue
        tables = read_tables(installation, KIND)
        for name, target in ((n, t) for kind, n, t in installation.entries if kind == KIND):
            plugin = Candidate(
                kind=KIND,
                name=name,
                target=target,
                distribution=installation.distribution,
                version=installation.version,
            )
            line = tables.get(name, {}).get("help")
            text = line if isinstance(line, str) else f"A command of {plugin.distribution}."
            yield Command(plugin=plugin, help=text)


def _rejection(command: Command, own_words: Collection[str] = ()) -> str:
    """Return why a command is rejected, or "" if it is not.

    own_words: the words of first-party commands, which take precedence.
    """
    if not command.plugin.first_party:
        if command.words in own_words:
            return "a first-party command has the same words and takes precedence"
        if reason := _conflict(command.words, own_words):
            return reason
    name, target = command.plugin.name, command.plugin.target
    if not _NAME.fullmatch(name):
        return f"{name!r} is not a valid command name: use lower-case words joined by dots"
    return "" if ":" in target else f"{target!r} does not name a function: write 'module:function'"


def _conflict(words: str, others: Iterable[str]) -> str:
    """Return why `words` conflicts with one of `others`, or "" for no conflict."""
    for other in others:
        if f"{other} ".startswith(f"{words} ") != f"{words} ".startswith(f"{other} "):
            return (
                f"{words!r} conflicts with {other!r}, because one command is a prefix of the other"
            )
    return ""
