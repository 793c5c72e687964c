"""The memory of the KV cache: buffers of pages, and each layer's view of the one that it uses.

Layers of different KV-cache groups share a buffer, since a block belongs to one group at a time.
The memory is only laid out here, never touched: where it is given lazily, a page costs nothing
before it is written.
Depends on no attention beyond the shape of a cache.
Legend: N blocks, P bytes of a page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from dovetail.errors import ModelError
from dovetail.interfaces import AttentionBackend, FullAttentionSpec, KVCacheConfig

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
    "fp8_e4m3": torch.float8_e4m3fn,
}

PADDED_PAGES = "padded_pages"
"""What a backend declares in its features if a block's bytes may be more than its layer uses."""

Zeros = Callable[[int], torch.Tensor]
"""Gives so many bytes of the device's memory: uint8, one dimension, all zero."""


@dataclass(frozen=True, kw_only=True)
class CacheBuffers:
    """The cache's memory. caches: each layer's view, by name, shaped as its backend asks.

    pages_NP: uint8, one tensor a buffer; row b holds all that block b keeps there. () where some
    backend's layout does not put blocks first.
    """

    caches: Mapping[str, torch.Tensor]
    pages_NP: tuple[torch.Tensor, ...]


def take_buffers(
    backend: type[AttentionBackend],
    specs: Mapping[str, FullAttentionSpec],
    config: KVCacheConfig,
    zeros: Zeros,
) -> CacheBuffers:
    """Take the memory of `config` and lay the layers' caches out in it.

    specs: of each layer, by name. zeros: where the memory comes from. Raises ModelError where
    layers of one buffer cannot share it in the backend's layout.
    """
    num_blocks, page = config.num_blocks, config.page_size_bytes
    buffers = [zeros(num_blocks * page) for _ in range(config.num_buffers)]
    shapes = {name: backend.kv_cache_shape(num_blocks, spec) for name, spec in specs.items()}
    blocks_first = all(shape[0] == num_blocks for shape in shapes.values())
    padded = any(spec.page_size_bytes < page for spec in specs.values())
    places = {
        name: group.place(layer)
        for group in config.groups
        for layer, name in enumerate(group.layer_names)
    }
    layouts = {(shapes[name], spec.dtype) for name, spec in specs.items()}
    if padded and not (blocks_first and PADDED_PAGES in backend.capabilities.features):
        sizes = sorted({spec.page_size_bytes for spec in specs.values()})
        raise ModelError(
            f"the layers' blocks take {sizes} bytes and share pages of {page}, but the attention "
            f"backend {backend.name!r} does not declare {PADDED_PAGES!r}; choose another one."
        )
    if len(config.groups) > 1 and len(layouts) > 1 and not blocks_first:
        raise ModelError(
            f"layers of different shapes share memory block by block, but in the layout of the "
            f"attention backend {backend.name!r} blocks do not come first; choose another one."
        )
    caches = {
        name: _view(buffers[buffer], start, shapes[name], specs[name], num_blocks)
        for name, (buffer, start) in places.items()
    }
    pages_NP = tuple(buffer.view(num_blocks, page) for buffer in buffers) if blocks_first else ()
    return CacheBuffers(caches=caches, pages_NP=pages_NP)


def _view(
    buffer: torch.Tensor,
    start: int,
    shape: tuple[int, ...],
    spec: FullAttentionSpec,
    num_blocks: int,
) -> torch.Tensor:
    """Return a layer's cache: from byte `start` of each page on."""
    dtype = DTYPES[spec.dtype]
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes == len(buffer):
        return buffer.view(dtype).view(shape)
    own_NP = buffer.view(num_blocks, -1)[:, start : start + num_bytes // num_blocks]
    return own_NP.view(dtype).unflatten(1, shape[1:])
