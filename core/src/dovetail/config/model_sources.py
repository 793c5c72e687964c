"""Models by name: `--model NAME` and `--model NAME:ARGUMENT` select a model source plugin.

`--model ORGANIZATION/NAME` selects the source `hub`, which gets the whole text as its argument.
Names are read from package metadata; only the package of the selected source is imported.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from dovetail.config.user_paths import user_path
from dovetail.errors import ModelError
from dovetail.interfaces.model_source import LocalModel, ModelSource, ModelSourceContext
from dovetail.plugins import PluginRegistry
from dovetail.plugins.construction import Options, call_plugin, make_instance

logger = logging.getLogger(__name__)
downloads = logging.getLogger("dovetail.downloads")
"""Receives the progress of downloads at level INFO; the command line shows it on stderr."""

KIND = "model_source"
CACHE_VARIABLE = "DOVETAIL_MODEL_CACHE"
"""Environment variable with the directory for downloaded models."""

HUB = "hub"
"""The source of models with names such as "Qwen/Qwen3-0.6B"."""

_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*(?:[:@].+)?", re.ASCII)
_REFERENCE = re.compile(r"(?P<name>\w[\w.-]*)(?::(?P<argument>.+))?", re.ASCII)


def model_cache_dir() -> Path:
    """Return the directory for downloaded models. It may not exist yet.

    Raises ConfigError if it depends on a home directory that is not known.
    """
    if stated := os.environ.get(CACHE_VARIABLE, ""):
        return user_path(CACHE_VARIABLE, stated).absolute()
    base = os.environ.get("XDG_CACHE_HOME", "")
    folder = Path(base) if os.path.isabs(base) else user_path(CACHE_VARIABLE, "~/.cache")
    return folder / "dovetail" / "models"


def is_hub_name(reference: str) -> bool:
    """Return whether `reference` is the name of a model on the hub, and not a local path.

    A name below an existing directory is a path: "models/absent" if there is a directory "models".
    """
    return _HUB_NAME.fullmatch(reference) is not None and not os.path.isdir(
        reference.partition("/")[0]
    )


def source_names(plugins: PluginRegistry) -> list[str]:
    """Return the names of all installed model sources, sorted. Import nothing."""
    return sorted(
        {candidate.name for candidate in plugins.candidates(KIND) if not plugins.denial(candidate)}
    )


def find_model(
    reference: str,
    plugins: PluginRegistry,
    *,
    revision: str | None = None,
    fetch: bool = True,
    report: Callable[[str], None] = downloads.info,
) -> Path | None:
    """Return the absolute path of the model, or None if `reference` does not name a source.

    reference: "NAME", "NAME:ARGUMENT" or "ORGANIZATION/NAME". revision: added to the argument as
    "@REVISION"; a source without revisions rejects it. fetch: download the model if it is missing;
    if False, return None for a missing model. report: a function that receives the progress of a
    download, line by line. Raises ModelError if the model cannot be found or downloaded,
    PluginError if the source cannot be loaded.
    """
    match = _REFERENCE.fullmatch(f"{HUB}:{reference}" if is_hub_name(reference) else reference)
    if match is None or match["name"] not in source_names(plugins):
        return None
    source = _make_source(plugins, match["name"], report)
    argument = match["argument"] or ""
    if revision is not None:
        argument = f"{argument}@{revision}"
    call = source.fetch if fetch else source.find
    path = call_plugin(f"model source {match['name']!r}", "model", lambda: call(argument))
    if path is None:
        return None
    if not isinstance(path, os.PathLike):
        raise ModelError(
            f"model={reference!r}: the model source {match['name']!r} returned "
            f"{type(path).__name__}, not a path. Report this to the author of the plugin."
        )
    return Path(path).absolute()


def local_models(plugins: PluginRegistry) -> Iterator[tuple[str, LocalModel]]:
    """Yield (source name, model) for every model that is on this machine.

    A source that cannot be loaded is skipped with a warning.
    """
    for name in source_names(plugins):
        try:
            models = list(_make_source(plugins, name, logger.info).local_models())
        except Exception as error:  # a plugin may raise anything; continue with the next
            logger.warning("The model source %r cannot list its models: %s", name, error)
            continue
        yield from ((name, model) for model in models)


def _make_source(plugins: PluginRegistry, name: str, report: Callable[[str], None]) -> ModelSource:
    def context(options: Options) -> ModelSourceContext:
        return ModelSourceContext(cache_dir=model_cache_dir(), report=report, options=options)

    source: ModelSource = make_instance(plugins, KIND, name, context)
    return source
