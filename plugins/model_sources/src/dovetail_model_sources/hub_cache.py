"""Models in the cache of huggingface_hub, which other tools share.

    models--ORGANIZATION--NAME/refs/REVISION            the commit
    models--ORGANIZATION--NAME/blobs/CHECKSUM           contents of a file
    models--ORGANIZATION--NAME/snapshots/COMMIT/NAME    a link to the contents

This module reads and removes models. This module needs neither huggingface_hub nor a network.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from dovetail.errors import ModelError
from dovetail.model_files import file_exists, open_model_file, read_json_object
from dovetail.value_checks import shorten
from dovetail_model_sources.hub_reference import (
    CARD_FILE,
    CONFIG_FILE,
    DEFAULT_REVISION,
    INDEX_FILE,
    MAX_SHARDS,
    SINGLE_FILE,
    HubReference,
    parse_hub_reference,
)

_LICENSE = re.compile(r"\A---\n(?:.*\n)*?license: *['\"]?(?P<license>[\w.-]{1,60})", re.ASCII)
_MAX_CARD_CHARS = 65_536
_SHARD = re.compile(r"\w[\w.+-]{0,199}\.safetensors", re.ASCII)
_COMMIT = re.compile(r"[\w-]{1,64}", re.ASCII)
_CHECKSUM = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_SHA256_DIGITS = 64
_CHUNK_BYTES = 1 << 20
_PROGRESS_BYTES = 64 << 20


def hub_cache_dir() -> Path:
    """Return the cache directory of huggingface_hub. It may not exist yet.

    An unknown user in "~user" is left as it is, as huggingface_hub does.
    """
    for variable, below in (("HF_HUB_CACHE", ""), ("HF_HOME", "hub")):
        if stated := os.environ.get(variable, ""):
            return Path(os.path.expanduser(os.path.expandvars(stated)), below).absolute()
    base = os.environ.get("XDG_CACHE_HOME", "") or "~/.cache"
    return Path(os.path.expanduser(base), "huggingface", "hub").absolute()


def find_snapshot(cache: Path, reference: HubReference) -> Path | None:
    """Return the directory of the revision in the cache, or None if there is none."""
    folder = cache / reference.folder_name
    commit = reference.revision
    try:
        with (folder / "refs" / reference.revision).open(encoding="ascii") as stream:
            commit = stream.read(100).strip()
    except (OSError, ValueError):
        pass  # the revision may be a commit
    snapshot = folder / "snapshots" / commit
    return snapshot if _COMMIT.fullmatch(commit) and os.path.isdir(snapshot) else None


def find_complete_model(cache: Path, reference: HubReference) -> Path | None:
    """Return the model directory or GGUF file in the cache, or None if it is incomplete."""
    snapshot = find_snapshot(cache, reference)
    if snapshot is None:
        return None
    if reference.file:
        names = reference.gguf_files()
        whole = all(os.path.isfile(snapshot / name) for name in names)
        return snapshot / names[0] if whole else None
    return snapshot if is_complete(snapshot) else None


def is_complete(snapshot: Path) -> bool:
    """Return whether a directory has config.json and all its safetensors files."""
    if not os.path.isfile(snapshot / CONFIG_FILE):
        return False
    if os.path.isfile(snapshot / SINGLE_FILE):
        return True
    try:
        shards = read_shards(snapshot / INDEX_FILE)
    except ModelError:
        return False
    return all(os.path.isfile(snapshot / name) for name in shards)


def read_shards(index: Path) -> tuple[str, ...]:
    """Return the sorted names of the weight files in an index. Raise ModelError for a bad index."""
    if not file_exists(index):
        raise ModelError(f"{index} does not exist.")
    table = read_json_object(index).get("weight_map")
    names = set(table.values()) if isinstance(table, dict) and _strings(table) else set()
    bad = sorted(name for name in names if not _SHARD.fullmatch(name))
    if not names or bad or len(names) > MAX_SHARDS:
        what = f"names the file {shorten(bad[0])}" if bad else f"names {len(names)} files"
        raise ModelError(
            f"{INDEX_FILE} is rejected: its weight_map {what}; it must name 1 to {MAX_SHARDS} "
            "files NAME.safetensors."
        )
    return tuple(sorted(names))


def _strings(table: dict[str, object]) -> bool:
    return all(isinstance(value, str) for value in table.values())


def snapshots(cache: Path) -> Iterator[tuple[str, Path]]:
    """Yield (name, model path) for every complete model in the cache, sorted by name."""
    for folder in _folders(cache, "models--*"):
        repo = folder.name.removeprefix("models--").replace("--", "/")
        names = dict(_refs(folder))
        for snapshot in _folders(folder / "snapshots", "*"):
            revision = names.get(snapshot.name, snapshot.name)
            try:
                reference = parse_hub_reference(f"{repo}@{revision}")
            except ModelError:
                continue
            if is_complete(snapshot):
                yield reference.title, snapshot
            yield from _gguf_models(reference, snapshot)


def damaged_snapshots(cache: Path) -> Iterator[tuple[str, Path, list[str]]]:
    """Yield (name, model path, file names) for models whose files are links to missing contents.

    A download that was interrupted leaves no such links.
    """
    for folder in _folders(cache, "models--*"):
        repo = folder.name.removeprefix("models--").replace("--", "/")
        names = dict(_refs(folder))
        for snapshot in _folders(folder / "snapshots", "*"):
            try:
                reference = parse_hub_reference(f"{repo}@{names.get(snapshot.name, snapshot.name)}")
            except ModelError:
                continue
            missing = sorted(file.name for file in snapshot.glob("*") if _is_dangling(file))
            others = [name for name in missing if not name.endswith(".gguf")]
            if others and not is_complete(snapshot):
                yield reference.title, snapshot, others
            for name in (name for name in missing if name not in others):
                yield replace(reference, file=name).title, snapshot / name, [name]


def _is_dangling(path: Path) -> bool:
    return os.path.islink(path) and not os.path.exists(path)


def card_license(path: Path) -> str:
    """Return the license that a model's card states, or "" if unknown. path: directory or file."""
    card = (path if os.path.isdir(path) else path.parent) / CARD_FILE
    try:
        with card.open(encoding="utf-8", errors="replace") as stream:
            match = _LICENSE.search(stream.read(_MAX_CARD_CHARS))
    except OSError:
        return ""
    return match["license"] if match else ""


def _gguf_models(reference: HubReference, snapshot: Path) -> Iterator[tuple[str, Path]]:
    for path in sorted(snapshot.glob("*.gguf")):
        try:
            file_reference = parse_hub_reference(
                f"{reference.repo}:{path.name}@{reference.revision}"
            )
        except ModelError:
            continue
        names = file_reference.gguf_files()
        if path.name == names[0] and all(os.path.isfile(snapshot / name) for name in names):
            yield file_reference.title, path


def _refs(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield (commit, name) of each branch and tag. The default branch comes last."""
    refs = folder / "refs"
    paths = sorted((path for path in refs.rglob("*") if os.path.isfile(path)), key=str)
    for path in sorted(paths, key=lambda path: path.name == DEFAULT_REVISION):
        try:
            yield path.read_text(encoding="ascii")[:100].strip(), str(path.relative_to(refs))
        except (OSError, ValueError):
            continue


def _folders(parent: Path, pattern: str) -> list[Path]:
    try:
        return sorted(path for path in parent.glob(pattern) if os.path.isdir(path))
    except OSError:
        return []


def is_hub_model(path: Path) -> bool:
    """Return whether `path` is a snapshot, or a file in a snapshot, of the cache."""
    return path.is_relative_to(hub_cache_dir())


def is_checksum(etag: str) -> bool:
    """Return whether a name in `blobs` is a checksum: SHA-256, or SHA-1 as in git."""
    return _CHECKSUM.fullmatch(etag) is not None


def has_checksum(path: Path, stated: str, progress: Callable[[], None] = lambda: None) -> bool:
    """Return whether the contents of a file have the checksum `stated`.

    64 digits: SHA-256. 40 digits: SHA-1 as git computes it, or of the contents alone. progress: is
    called after each 64 MiB.
    """
    if len(stated) == _SHA256_DIGITS:
        digests = [hashlib.sha256()]
    else:
        digests = [hashlib.sha1(usedforsecurity=False) for _ in range(2)]
        digests[0].update(b"blob %d\0" % path.stat().st_size)
    num_bytes = 0
    with open_model_file(path) as descriptor:
        while chunk := os.read(descriptor, _CHUNK_BYTES):
            for digest in digests:
                digest.update(chunk)
            num_bytes += len(chunk)
            if num_bytes >= _PROGRESS_BYTES:
                num_bytes = 0
                progress()
    return stated in (digest.hexdigest() for digest in digests)


def files_of(path: Path) -> list[Path]:
    """Return the files of a model: those of a snapshot, or all parts of a GGUF file."""
    if path.is_dir():
        return sorted(file for file in path.iterdir() if os.path.isfile(file) or _is_dangling(file))
    names = HubReference(repo="", file=path.name).gguf_files()
    return [path.with_name(name) for name in names]


def find_changes(path: Path) -> list[str]:
    """Return the names of a model's files whose contents do not match their checksums."""
    changed = []
    for file in files_of(path):
        stated = file.resolve().name
        try:
            same = not is_checksum(stated) or has_checksum(file, stated)
        except (ModelError, OSError):
            same = False
        if not same:
            changed.append(file.name)
    return changed


def remove_model(path: Path) -> None:
    """Delete the files of a model that no other revision uses. Raises OSError if this fails."""
    snapshot = path if path.is_dir() else path.parent
    folder = snapshot.parents[1]
    links = files_of(path)
    blobs = {link.resolve() for link in links}
    for link in links:
        link.unlink(missing_ok=True)
    if not any(snapshot.iterdir()):
        snapshot.rmdir()
        for commit, name in _refs(folder):
            if commit == snapshot.name:
                (folder / "refs" / name).unlink()
    used = {link.resolve() for link in (folder / "snapshots").rglob("*")}
    for blob in blobs - used:
        blob.unlink(missing_ok=True)
    with suppress(OSError):  # another revision exists
        (folder / "snapshots").rmdir()
        shutil.rmtree(folder)
