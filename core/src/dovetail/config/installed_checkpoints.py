"""Model directories of installed packages, by short name (`--model demo`).

A package declares one in the entry-point group `dovetail.checkpoint`: a name, and a function
without arguments that returns the directory. Names are read from metadata; only the package of the
requested one is imported. If an outside package has the same name, the first-party one is used.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from dovetail.errors import ModelError
from dovetail.plugins.loading import Origin, load_target
from dovetail.plugins.metadata.discovery import Candidate, discover

logger = logging.getLogger(__name__)

KIND = "checkpoint"


def installed_checkpoint_names() -> list[str]:
    """Return the short names of all installed checkpoints, sorted; import nothing."""
    return sorted({entry.name for entry in _entries()})


def find_installed_checkpoint(name: str, *, first_party_only: bool = False) -> Path | None:
    """Return the directory of the installed checkpoint `name`, or None if there is none.

    first_party_only: ignore outside packages. Raises ModelError if several packages have that name,
    or if the package cannot be imported or does not return a path.
    """
    named = [one for one in _entries() if one.name == name]
    entries = {
        f"{entry.target} ({entry.distribution} {entry.version})": entry
        for entry in named
        if entry.first_party or not first_party_only
    }
    kept = {whose: entry for whose, entry in entries.items() if entry.first_party}
    if kept and len(kept) < len(entries):
        others = ", ".join(sorted(entries.keys() - kept.keys()))
        logger.warning(
            "model=%r is the checkpoint of a first-party package; %s has the same name and is not "
            "used. To use it, give the path of its directory.",
            name,
            others,
        )
    entries = kept or entries
    if not entries:
        return None
    if len(entries) > 1:
        raise ModelError(
            f"model={name!r} is a checkpoint of several packages: {', '.join(sorted(entries))}.\n"
            "Uninstall all but one, or give the path of the directory."
        )
    ((whose, entry),) = entries.items()
    try:
        function: Any = load_target(entry.target, Origin(asked=name))
        return Path(os.fspath(function()))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a package's code may raise anything
        raise ModelError(
            f"model={name!r}: {whose} did not return a directory: {type(error).__name__}: {error}."
        ) from error


def _entries() -> list[Candidate]:
    """Return the declared checkpoints, without distributions that cannot be read."""
    return [
        Candidate(
            kind=KIND,
            name=name,
            target=target,
            distribution=one.distribution,
            version=one.version,
        )
        for one in discover().installations.values()
        for kind, name, target in one.entries
        if kind == KIND
    ]
