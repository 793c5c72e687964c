"""The version of the installed package."""

from __future__ import annotations


def version_text() -> str:
    """Return the line of `dovetail --version`."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"dovetail {version('dovetail-core')}"
    except PackageNotFoundError:
        return "dovetail (not installed; it runs from its source directory)"
