"""The cache of packed weights as the worker uses it: restore before loading, save after packing.

The cache never prevents a start: a problem with a directory or file is logged once, and the weights
are repacked. This module does not depend on a packing format: linear methods exchange bytes
(`HasPackedForm`).
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import astuple
from typing import Any, cast

from torch import nn

from dovetail_cpu.packed_cache.huge_pages import HugePageMover, can_move
from dovetail_cpu.packed_cache.packed_file import (
    PackedEntry,
    PackedFileError,
    read_packed,
    write_packed,
)
from dovetail_cpu.packed_cache.packed_form import PACKED_FORM, HasPackedForm
from dovetail_cpu.packed_cache.prefetch import PackedPrefetch
from dovetail_torch.cache_folder import CacheFolder, FolderError
from dovetail_torch.layers.linear import ParallelLinear, linear_layers

logger = logging.getLogger(__name__)

_GIB = 1 << 30
_LOADING_VERSION = 2
"""Version of weight loading. Increase it when the same files result in different weights.

Since version 2, a tied head that differs from the embedding in the files is loaded, not dropped.
"""


class PackedCache:
    """The cache entry of one model.

    fingerprint: fingerprint of the weights. files: see `prefetch.weight_files`. min_bytes: smaller
    models are not cached, because packing them is faster than mapping.
    """

    def __init__(
        self,
        folder: CacheFolder,
        model: nn.Module,
        fingerprint: str,
        *,
        files: list[list[int]],
        min_bytes: int,
    ) -> None:
        self._folder = folder
        self._layers = {
            name: layer
            for name, layer in linear_layers(model)
            if PACKED_FORM in getattr(layer.linear_method, "provides", ())
            and _method(layer).packed_bytes(layer)
        }
        self._sizes = {
            name: _method(layer).packed_bytes(layer) for name, layer in self._layers.items()
        }
        self._num_bytes = sum(self._sizes.values())
        self._is_used = bool(self._layers) and self._num_bytes >= min_bytes
        self._key = _key(self._layers, self._sizes, fingerprint) | {"files": files}
        text = json.dumps(self._key, sort_keys=True).encode()
        self._name = hashlib.blake2b(text, digest_size=16).hexdigest()
        self._saving: threading.Thread | None = None
        self._mapped: memoryview | None = None
        self._mover: HugePageMover | None = None

    def restore(self, *, num_threads: int, prefetch: PackedPrefetch | None = None) -> bool:
        """Restore the packed weights of all layers. Return False if none are cached.

        prefetch: reads a file in the background, perhaps the one of this model.
        """
        if not self._is_used:
            return False
        try:
            forms = self._read(num_threads, prefetch)
        except (FolderError, PackedFileError, OSError) as error:
            logger.warning(
                "Packed weights in %s are not used: %s. They are repacked from the checkpoint.",
                self._folder.path,
                error,
            )
            return False
        for name, form in forms.items():
            layer = self._layers[name]
            _method(layer).restore(layer, form)
        if forms:
            # All forms are parts of one mapping.
            self._mapped = memoryview(next(iter(forms.values())).obj)
            logger.info("Mapped %.2f GiB of packed weights.", self._num_bytes / _GIB)
        return bool(forms)

    def save(self) -> None:
        """Start a thread that writes all packed weights. `wait` waits for it."""
        if not self._is_used:
            return
        entries = [
            PackedEntry(name=name, form=_method(layer).packed_form(layer))
            for name, layer in self._layers.items()
        ]
        saving = threading.Thread(target=self._write, args=(entries,), name="dovetail-packed-cache")
        try:
            saving.start()
        except RuntimeError as error:  # the limit on threads may be reached
            logger.warning("Packed weights cannot be cached in %s: %s.", self._folder.path, error)
        else:
            self._saving = saving

    def move_to_huge_pages(self, num_sharing: int) -> None:
        """Start a thread that moves restored weights to huge pages, if there is enough memory.

        num_sharing: number of processes on this machine that do this at the same time.
        """
        if self._mapped is not None and can_move(num_sharing * len(self._mapped)):
            # RuntimeError: the limit on threads may be reached; the weights are slower to read.
            with suppress(RuntimeError):
                self._mover = HugePageMover(self._mapped)
        self._mapped = None

    def wait(self) -> None:
        """Wait until the packed weights are written. Stop moving them to huge pages."""
        if self._saving is not None:
            self._saving.join()
        if self._mover is not None:
            self._mover.stop()

    def _read(self, num_threads: int, prefetch: PackedPrefetch | None) -> dict[str, memoryview]:
        """Return the packed weights of all layers, or {} if there is no file."""
        fd = self._folder.open(self._name)
        if fd is None:
            return {}
        try:
            verified = None if prefetch is None else prefetch.take(fd)
            forms = read_packed(fd, self._key, num_threads=num_threads, verified=verified)
            if {name: len(form) for name, form in forms.items()} != self._sizes:
                raise PackedFileError("the file does not contain exactly the layers of this model")
        except PackedFileError as error:
            self._folder.drop(self._name)
            raise PackedFileError(f"{self._name}: {error}") from error
        finally:
            os.close(fd)
        return forms

    def _write(self, entries: list[PackedEntry]) -> None:
        def write(fd: int) -> None:
            write_packed(fd, self._key, entries)

        try:
            self._folder.store(self._name, self._num_bytes, write)
        except (FolderError, OSError) as error:
            logger.warning("Packed weights cannot be cached in %s: %s.", self._folder.path, error)
        else:
            logger.info(
                "Cached %.2f GiB of packed weights in %s.",
                self._num_bytes / _GIB,
                self._folder.path,
            )


def _method(layer: ParallelLinear) -> HasPackedForm:
    return cast(HasPackedForm, layer.linear_method)


def _key(
    layers: Mapping[str, ParallelLinear], sizes: Mapping[str, int], fingerprint: str
) -> dict[str, Any]:
    """Return the cache key: everything that the packed bytes depend on, as plain JSON values."""
    layer_info = [
        [
            name,
            layer.shape.part_names,
            # The shards of all ranks have the same size and different contents.
            [astuple(shard) for shard in (layer.in_shard, *layer.part_shards)],
            sizes[name],
        ]
        for name, layer in layers.items()
    ]
    digest = hashlib.blake2b(json.dumps(layer_info).encode(), digest_size=16).hexdigest()
    formats = {_method(layer).packed_format() for layer in layers.values()}
    return {
        "weights": fingerprint,
        "loading": _LOADING_VERSION,
        "layers": digest,
        "formats": sorted(formats),
    }
