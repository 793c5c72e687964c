"""`dovetail models`: list, verify and remove the models on this machine, or list architectures."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from dovetail.cli.plugins_table import print_json, print_line, print_table
from dovetail.config.model_sources import local_models, model_cache_dir
from dovetail.errors import ModelError, UserError, nearest
from dovetail.plugins import PluginRegistry
from dovetail.value_checks import shorten
from dovetail_model_sources import hub_cache
from dovetail_model_sources.architectures import print_architectures
from dovetail_model_sources.sources import SmolLM2Source
from dovetail_model_sources.store import Entry, Store, find_changes, find_wrong_sizes

_VERIFY_HELP = "Compare the files of downloaded models with their recorded checksums."
_JSON_HELP = "Print JSON instead of a table."
_REMOVE_HELP = "Delete a downloaded model; NAME is its name in the list."
_ARCHITECTURES_HELP = (
    "List the model architectures that the installed plugins support, instead of models."
)
_MAX_FILES = 1000
_NO_CHECKSUM = "no checksum"


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model on this machine.

    checked: the result of `--verify`; without this option "", or the files with a wrong size.
    """

    name: str
    num_bytes: int
    format: str
    license: str
    path: Path
    checked: str = ""


def models(
    *,
    verify: Annotated[bool, Parameter(negative="", help=_VERIFY_HELP)] = False,
    json: Annotated[bool, Parameter(negative="", help=_JSON_HELP)] = False,
    remove: Annotated[str, Parameter(help=_REMOVE_HELP)] = "",
    architectures: Annotated[bool, Parameter(negative="", help=_ARCHITECTURES_HELP)] = False,
) -> int:
    """List the models on this machine. The exit code is 1 if one is damaged."""
    if architectures:
        if verify or remove:
            raise UserError("--architectures cannot be combined with --verify or --remove.")
        print_architectures(as_json=json)
        return 0
    store = Store(model_cache_dir())
    downloaded = {entry.path: entry for entry in store.entries()}
    listed = list(_listed(downloaded, verify=verify))
    for entry in store.damaged_entries():
        downloaded[entry.path] = entry
        listed.append(_damaged(entry, verify=verify))
    listed += _damaged_on_hub()
    if remove:
        return _remove(store, downloaded, listed, remove)
    if json:
        print_json(listed)
    else:
        _print(listed, verify=verify or any(model.checked for model in listed))
    return int(any(model.checked not in ("", "ok", _NO_CHECKSUM) for model in listed))


def _listed(downloaded: dict[Path, Entry], *, verify: bool) -> Iterable[Model]:
    """Yield each model once, with the shortest of its names."""
    names: dict[Path, list[str]] = {}
    licenses: dict[Path, str] = {}
    for _, model in local_models(PluginRegistry()):
        names.setdefault(model.path, []).append(model.name)
        licenses[model.path] = model.license
    for path, same in names.items():
        entry = downloaded.get(path)
        yield Model(
            name=min(same, key=len),
            num_bytes=entry.num_bytes if entry else _size(path),
            format=_format(path),
            license=licenses[path] or "unknown",
            path=path,
            checked=_check(path, entry) if verify else "",
        )


def _damaged(entry: Entry, *, verify: bool) -> Model:
    """Return a downloaded model that no source finds, because it is damaged."""
    is_pinned = entry.folder.name == SmolLM2Source.reference.requirement
    changed = find_changes(entry) if verify else find_wrong_sizes(entry)
    return Model(
        name=SmolLM2Source.name if is_pinned else f"pypi:{entry.folder.name}",
        num_bytes=entry.num_bytes,
        format=Path(entry.main).suffix[1:].lower() if entry.main else "safetensors",
        license=entry.license or "unknown",
        path=entry.path,
        checked=_changed(changed),
    )


def _damaged_on_hub() -> Iterable[Model]:
    """Yield the damaged models in the cache of the hub, which no source finds."""
    for name, path, changed in hub_cache.damaged_snapshots(hub_cache.hub_cache_dir()):
        yield Model(
            name=name,
            num_bytes=_size(path),
            format=_format(path),
            license=hub_cache.card_license(path) or "unknown",
            path=path,
            checked=_changed(changed),
        )


def _changed(names: Sequence[str]) -> str:
    return f"changed: {', '.join(names)}" if names else "ok"


def _check(path: Path, entry: Entry | None) -> str:
    if entry is not None:
        changed = find_changes(entry)
    elif hub_cache.is_hub_model(path):
        changed = hub_cache.find_changes(path)
    else:
        return _NO_CHECKSUM
    return _changed(changed)


def _print(models: Sequence[Model], *, verify: bool) -> None:
    headings = ("name", "size", "format", "license", "path", *(("check",) if verify else ()))
    rows = [
        (item.name, f"{item.num_bytes / 1e6:.1f} MB", item.format, item.license, str(item.path))
        + ((item.checked,) if verify else ())
        for item in models
    ]
    print_table(headings, rows)


def _remove(store: Store, downloaded: dict[Path, Entry], models: list[Model], name: str) -> int:
    for model in models:
        entry = downloaded.get(model.path)
        if entry is not None and name in (model.name, f"pypi:{entry.folder.name}"):
            store.remove(entry)
        elif entry is None and name == model.name and hub_cache.is_hub_model(model.path):
            _remove_from_hub_cache(model)
        else:
            continue
        print_line(f"Removed {model.name}: {model.num_bytes / 1e6:.1f} MB.")
        return 0
    names = [
        model.name
        for model in models
        if model.path in downloaded or hub_cache.is_hub_model(model.path)
    ]
    raise ModelError(
        f"{shorten(name)} is not a downloaded model.{nearest(name, names)}\n"
        f"Downloaded models: {', '.join(names) or 'none'}."
    )


def _remove_from_hub_cache(model: Model) -> None:
    try:
        hub_cache.remove_model(model.path)
    except OSError as error:
        raise ModelError(
            f"{model.name} cannot be removed: {error}.\nMake the cache writable."
        ) from None


def _size(path: Path) -> int:
    """Return the size of a file, or the total size of the files in a directory."""
    if hub_cache.is_hub_model(path):
        files = hub_cache.files_of(path)
        return sum(os.path.getsize(file) for file in files if os.path.isfile(file))
    files = [path] if path.is_file() else sorted(path.iterdir())[:_MAX_FILES]
    return sum(file.stat().st_size for file in files if file.is_file())


def _format(path: Path) -> str:
    return "safetensors" if os.path.isdir(path) else path.suffix[1:].lower()
