"""Model directories that installed packages bring along, by short name (`--model demo`).

A package declares one in the entry-point group `dovetail.checkpoint`: a name, and a function
without arguments that returns the directory. Names are read from metadata; only the package of the
one that was asked for is imported. A first-party package keeps its name beside an outside one.
Does not know what a model directory must hold.
"""

from __future__ import annotations

import logging
import os
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from dovetail.errors import ModelError
from dovetail.plugins.first_party import is_first_party

logger = logging.getLogger(__name__)

GROUP = "dovetail.checkpoint"


def installed_checkpoint_names() -> list[str]:
    """Return the short names of all installed checkpoints, sorted; import nothing."""
    return sorted({entry.name for entry in entry_points(group=GROUP)})


def find_installed_checkpoint(name: str, *, first_party_only: bool = False) -> Path | None:
    """Return the directory of the installed checkpoint `name`, or None if there is none.

    first_party_only: outside packages count as not installed, and are not imported.
    Raises ModelError if several packages bring that name, or if its package cannot be imported or
    does not give a path.
    """
    entries = {
        f"{entry.value} ({_owner(entry)})": entry
        for entry in entry_points(group=GROUP, name=name)
        if not first_party_only or _is_first_party(entry)
    }
    kept = {whose: entry for whose, entry in entries.items() if _is_first_party(entry)}
    if kept and len(kept) < len(entries):
        others = ", ".join(sorted(entries.keys() - kept.keys()))
        logger.warning(
            "model=%r is the checkpoint of a first-party package; %s has the same name and is not "
            "used. Give the path of its directory to choose it.",
            name,
            others,
        )
    entries = kept or entries
    if not entries:
        return None
    if len(entries) > 1:
        raise ModelError(
            f"model={name!r} is brought by several packages: {', '.join(sorted(entries))}.\n"
            "Uninstall all but one, or give the path of the directory."
        )
    ((whose, entry),) = entries.items()
    try:
        return Path(os.fspath(entry.load()()))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # another's code: whatever it raises is told as its fault
        raise ModelError(
            f"model={name!r}: {whose} did not give its directory: {type(error).__name__}: {error}."
        ) from error


def _is_first_party(entry: EntryPoint) -> bool:
    return entry.dist is not None and is_first_party(entry.dist.name, entry.value)


def _owner(entry: EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else "unknown"
