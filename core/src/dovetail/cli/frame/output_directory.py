"""Writes an output directory atomically: it gets its final name when it is complete."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dovetail.errors import ConfigError

MODEL_FILE = "config.json"
"""The file by which `--overwrite` recognizes the directory of a model."""


def check_output(
    option: str, output: Path, num_bytes: int, *, overwrite: bool | None = None
) -> None:
    """Raise ConfigError if the directory exists, cannot be created, or does not fit on the disk.

    option: the name of the option. overwrite: whether `output` may be an empty directory or the
    directory of a model, which is then replaced; None if the command has no option for this.
    """
    if os.path.lexists(output):
        if not overwrite:
            advice = "specify another directory" + ("" if overwrite is None else ", or --overwrite")
            raise ConfigError(f"{option}={output} already exists; {advice}.")
        _check_replaceable(option, output)
    parent = output.absolute().parent
    if not os.path.isdir(parent) or not os.access(parent, os.W_OK | os.X_OK):
        raise ConfigError(f"{option}={output}: {parent} is not a directory that can be written to.")
    free = shutil.disk_usage(parent).free
    if free < num_bytes:
        raise ConfigError(
            f"{option}={output}: about {num_bytes / 1e6:.0f} MB are needed, but {parent} has "
            f"{free / 1e6:.0f} MB of free space."
        )


def _check_replaceable(option: str, output: Path) -> None:
    if os.path.islink(output) or not os.path.isdir(output):
        raise ConfigError(f"{option}={output} is not a directory, so it is not overwritten.")
    try:
        has_files = any(output.iterdir())
    except OSError as error:
        raise _unwritable(option, output, error) from None
    if has_files and not os.path.isfile(output / MODEL_FILE):
        raise ConfigError(
            f"{option}={output} contains files but no {MODEL_FILE}, so it is not a model directory "
            "and is not overwritten. Specify another directory."
        )


@contextmanager
def new_directory(option: str, output: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield a temporary directory next to `output` that becomes `output` if no error occurs.

    overwrite: whether it replaces a directory that exists at the end. Raises ConfigError if it
    cannot be written, for example because the disk is full.
    """
    parent = output.absolute().parent
    try:
        folder = Path(tempfile.mkdtemp(prefix=f".{output.name}-", dir=parent))
    except OSError as error:
        raise _unwritable(option, output, error) from None
    try:
        yield folder
        folder.chmod(0o755)
        if overwrite and os.path.lexists(output):
            _replace(option, output, folder)
        else:
            os.rename(folder, output)
    except OSError as error:
        raise _unwritable(option, output, error) from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _replace(option: str, output: Path, folder: Path) -> None:
    """Replace the directory `output` by `folder`, and delete the old contents."""
    _check_replaceable(option, output)
    old = Path(tempfile.mkdtemp(prefix=f".{output.name}-old-", dir=folder.parent))
    os.rename(output, old)
    try:
        os.rename(folder, output)
    except BaseException:
        os.rename(old, output)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _unwritable(option: str, output: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{option}={output} cannot be written: {error.strerror}.")
