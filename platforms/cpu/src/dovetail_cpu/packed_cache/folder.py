"""The directory of packed weights. This module does not import torch."""

from __future__ import annotations

import os
from pathlib import Path

from dovetail.config.user_paths import user_path
from dovetail_cpu.options import CPUWorkerOptions
from dovetail_torch.cache_folder import CacheFolder, user_cache_folder

CACHE_VARIABLE = "DOVETAIL_PACKED_CACHE"
"""Environment variable with the directory for packed weights, or "off" to disable the cache."""
OFF = "off"
ENDING = ".packed"
_GIB = 1 << 30


def default_folder() -> Path:
    """Return the default directory of packed weights."""
    return user_cache_folder("packed")


def packed_folder(path: Path, max_bytes: int) -> CacheFolder:
    """Return the directory of packed weights in `path`."""
    return CacheFolder(path=path, max_bytes=max_bytes, ending=ENDING)


def chosen_folder(options: CPUWorkerOptions) -> CacheFolder | None:
    """Return the directory that the options and the environment select, or None for no cache.

    None also if the user has no home directory for the default. Raises ConfigError, with the
    option or the variable, for a path that cannot exist.
    """
    name, directory = "packed_cache", options.packed_cache
    if directory == "auto":
        name, directory = CACHE_VARIABLE, os.environ.get(CACHE_VARIABLE, "")
    if directory == OFF:
        return None
    try:
        path = user_path(name, directory).absolute() if directory else default_folder()
    except RuntimeError:  # no home directory
        return None
    return packed_folder(path, int(options.packed_cache_gib * _GIB))
