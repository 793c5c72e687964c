"""The safetensors files of a model directory, and the contents of their headers.

This module reads headers and the shard index only. All problems with files (missing, truncated,
contradicting the index) are found here, before the first weight is read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from dovetail.errors import ModelError, WeightError
from dovetail.model_files import file_exists, open_model_file, read_json_object
from dovetail.value_checks import shorten

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLE_ENDINGS = (".bin", ".pt", ".pth", ".ckpt")
MAX_HEADER_BYTES = 64 << 20
"""Published checkpoints have headers of less than 1 MiB."""
MAX_SHARDS = 10_000
MAX_NAME_CHARS = 500
_MAX_ERROR_CHARS = 200
_LENGTH_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class WeightEntry:
    """One weight according to its file's header. `dtype` as in safetensors, such as "BF16"."""

    name: str
    path: Path
    shape: tuple[int, ...]
    dtype: str


def find_weight_files(model_dir: Path) -> dict[Path, frozenset[str]]:
    """Return the files to read, each with the weight names that the index lists for it.

    A single file has priority over an index and has no listed names. Raises WeightError if
    there are no files to read, the index is invalid or a shard is missing.
    """
    single, index = model_dir / SINGLE_FILE, model_dir / INDEX_FILE
    if file_exists(single):
        return {single: frozenset()}
    if not file_exists(index):
        raise WeightError(_nothing_to_read(model_dir))
    promised: dict[str, set[str]] = {}
    for name, file_name in _read_index(index).items():
        # Only file names are allowed: an index must not point outside of the model directory.
        if not isinstance(file_name, str) or os.path.basename(file_name) != file_name:
            raise WeightError(
                f"{index}: weight {shorten(name)} must be in a file of the same directory, "
                f"not in {shorten(file_name)}"
            )
        promised.setdefault(file_name, set()).add(name)
    if len(promised) > MAX_SHARDS:
        raise WeightError(
            f"{index} lists {len(promised)} shards; at most {MAX_SHARDS} are supported"
        )
    absent = sorted(name for name in promised if not file_exists(model_dir / name))
    if absent:
        raise WeightError(
            f"{index} lists {len(promised)} shards, but {len(absent)} of them are missing "
            f"({', '.join(map(shorten, absent[:5]))}): download or copy them into {model_dir}"
        )
    return {model_dir / name: frozenset(promised[name]) for name in sorted(promised)}


def read_headers(files: dict[Path, frozenset[str]]) -> dict[str, WeightEntry]:
    """Return all weights by name, in the order of the files.

    Raises WeightError for a corrupt or truncated file, a weight that the index lists but the
    file does not contain, a weight in two files, and a name that cannot be shown.
    """
    entries: dict[str, WeightEntry] = {}
    for path, promised in files.items():
        for entry in _read_header(path):
            if entry.name in entries:
                raise WeightError(
                    f"{path}: weight {entry.name} is also in {entries[entry.name].path.name}: "
                    "one of the two files belongs to another checkpoint"
                )
            entries[entry.name] = entry
        broken = sorted(promised - entries.keys())
        if broken:
            raise WeightError(
                f"{path}: {INDEX_FILE} lists {_shown(broken[0])} for this file, which does not "
                f"contain it "
                f"({len(broken)} such weights): the index and the file belong to different "
                "checkpoints"
            )
    return entries


@contextmanager
def open_weight_file(path: Path) -> Iterator[int]:
    """Yield the descriptor of a regular file. Raise WeightError if it cannot be read."""
    try:
        with open_model_file(path) as descriptor:
            yield descriptor
    except ModelError as error:
        raise WeightError(str(error)) from None


@contextmanager
def open_weights(path: Path) -> Iterator[Any]:
    """Map a safetensors file for reading. Convert its errors to WeightError with its name."""
    try:
        with _open(path) as handle:
            yield handle
    except SafetensorError as error:
        raise WeightError(
            f"{path} cannot be read ({_shown(str(error))}): the file is truncated or not a "
            "safetensors file; "
            "download it again and compare its size and checksum with the source's"
        ) from error


def _open(path: Path) -> Any:
    _check_header_length(path)
    try:
        return safe_open(path, framework="pt")
    except (OSError, RuntimeError) as error:
        raise WeightError(f"{path} cannot be opened: {error}") from error


def _check_header_length(path: Path) -> None:
    """Raise WeightError if `path` is not a regular file, or its header length is invalid."""
    with open_weight_file(path) as descriptor:
        size = os.fstat(descriptor).st_size
        length = int.from_bytes(os.pread(descriptor, _LENGTH_BYTES, 0), "little")
    if not size:
        raise WeightError(f"{path} is empty; download it again")
    if not 0 < length <= min(MAX_HEADER_BYTES, size - _LENGTH_BYTES):
        raise WeightError(
            f"{path} declares a header of {length} bytes, but the file has {size} bytes, and a "
            f"header may have at most {MAX_HEADER_BYTES}: the file is truncated or not a "
            f"safetensors file; "
            "download it again and compare its size and checksum with the source's"
        )


def _read_header(path: Path) -> Iterator[WeightEntry]:
    with open_weights(path) as handle:
        for name in handle.keys():  # noqa: SIM118 - a handle is not a mapping
            if len(name) > MAX_NAME_CHARS or not name.isprintable():
                raise WeightError(
                    f"{path} has a weight with the name {shorten(name)}; names must have at most "
                    f"{MAX_NAME_CHARS} characters, all printable"
                )
            view = handle.get_slice(name)
            shape = tuple(view.get_shape())
            yield WeightEntry(name=name, path=path, shape=shape, dtype=view.get_dtype())


def _shown(text: str) -> str:
    """Return a text from a file for a message: its first characters, on one line."""
    return "".join(x if x.isprintable() else " " for x in text[:_MAX_ERROR_CHARS])


def _read_index(index: Path) -> dict[str, Any]:
    try:
        weight_map = read_json_object(index).get("weight_map")
    except ModelError as error:
        raise WeightError(
            f"{error}\nThe file is not an index of shards: download it again."
        ) from None
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightError(f"{index}: weight_map is empty or not an object: download the file again")
    return weight_map


def _nothing_to_read(model_dir: Path) -> str:
    names = sorted(path.name for path in model_dir.iterdir()) if model_dir.is_dir() else []
    problem = f"{model_dir} has neither {SINGLE_FILE} nor {INDEX_FILE}"
    others = [name for name in names if name.endswith(".safetensors")]
    if others:
        return (
            f"{problem}; it contains only {', '.join(others[:3])}: add the index that "
            "belongs to these files"
        )
    pickles = [name for name in names if name.endswith(PICKLE_ENDINGS)]
    if pickles:
        return (
            f"{problem}; it contains only {', '.join(pickles[:3])}. Pickled weights can run "
            "code and are never "
            "read: convert to safetensors, with transformers "
            "AutoModelForCausalLM.from_pretrained(old).save_pretrained(new)"
        )
    listing = ", ".join(names[:5]) or "nothing"
    return (
        f"{problem}; it contains {listing}: add the weights, or set load_format='dummy' to "
        "use random weights"
    )
