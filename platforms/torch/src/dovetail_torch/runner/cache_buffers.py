"""The memory of the KV cache: buffers of pages, and each layer's view of its buffer.

Layers of different KV-cache groups share a buffer, because a block belongs to one group at a time.
This module divides the memory but does not write to it: with lazy allocation, a page needs no
memory until it is written. This module depends only on the shape of a cache, not on attention.
Dimensions: N blocks, P bytes of a page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch

from dovetail.errors import ModelError
from dovetail.interfaces import AttentionBackend, FullAttentionSpec, KVCacheConfig
from dovetail_torch.layers.state import StateLayer

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}

PADDED_PAGES = "padded_pages"
"""Feature of attention backends that accept blocks with unused bytes between them."""

Zeros = Callable[[int], torch.Tensor]
"""A function that returns zeroed device memory of this many bytes: uint8, one dimension."""


@dataclass(frozen=True, kw_only=True)
class CacheBuffers:
    """The cache's memory. caches: each attention layer's view by name, in its backend's shape.

    states: the tensors of each recurrent layer, by name: [N, *shape].
    pages_NP: uint8, one tensor per buffer; row b contains all of block b. () if the blocks are not
    the first dimension in a backend's layout.
    """

    caches: Mapping[str, torch.Tensor]
    pages_NP: tuple[torch.Tensor, ...]
    states: Mapping[str, tuple[torch.Tensor, ...]] = field(default_factory=dict)


def take_buffers(
    backend: type[AttentionBackend] | None,
    specs: Mapping[str, FullAttentionSpec],
    config: KVCacheConfig,
    zeros: Zeros,
    *,
    state_layers: Mapping[str, StateLayer] = MappingProxyType({}),
) -> CacheBuffers:
    """Allocate the memory of `config` and create the views of the layers.

    specs: spec of each attention layer, by name. backend: None only without attention layers.
    zeros: allocates zeroed memory. Raises ModelError if layers of one buffer cannot share it in the
    backend's layout.
    """
    num_blocks, page = config.num_blocks, config.page_size_bytes
    buffers = [zeros(num_blocks * page) for _ in range(config.num_buffers)]
    shapes: dict[str, tuple[int, ...]] = {}
    features, backend_name = frozenset[str](), ""
    if backend is not None:
        shapes = {name: backend.kv_cache_shape(num_blocks, spec) for name, spec in specs.items()}
        features, backend_name = backend.capabilities.features, backend.name
    blocks_first = all(shape[0] == num_blocks for shape in shapes.values())
    padded = any(spec.page_size_bytes < page for spec in specs.values())
    indexes = {
        name: group.place(layer)
        for group in config.groups
        for layer, name in enumerate(group.layer_names)
    }
    layouts = {(shapes[name], spec.dtype) for name, spec in specs.items()}
    if padded and not (blocks_first and PADDED_PAGES in features):
        sizes = sorted({spec.page_size_bytes for spec in specs.values()})
        raise ModelError(
            f"the blocks of the layers have {sizes} bytes and share pages of {page} bytes, but "
            "the attention "
            f"backend {backend_name!r} does not declare {PADDED_PAGES!r}; choose another "
            "attention_backend."
        )
    num_layouts = len(layouts) + bool(state_layers)
    if len(config.groups) > 1 and num_layouts > 1 and not blocks_first:
        raise ModelError(
            "layers of different shapes share blocks of memory, but blocks are not the first "
            f"dimension in the layout of the attention backend {backend_name!r}; choose another "
            "attention_backend."
        )
    caches = {
        name: _view(buffers[buffer], start, shapes[name], specs[name], num_blocks)
        for name, (buffer, start) in indexes.items()
        if name in specs
    }
    states = {
        name: _state_views(buffers[buffer].view(num_blocks, page), start, state_layers[name])
        for name, (buffer, start) in indexes.items()
        if name in state_layers
    }
    pages_NP = tuple(buffer.view(num_blocks, page) for buffer in buffers) if blocks_first else ()
    return CacheBuffers(caches=caches, pages_NP=pages_NP, states=states)


def _state_views(pages_NP: torch.Tensor, start: int, layer: StateLayer) -> tuple[torch.Tensor, ...]:
    """Return views of a layer's state tensors, which start at byte `start` of each page."""
    views = []
    for tensor, num_bytes in zip(layer.tensors, layer.sizes, strict=True):
        used = math.prod(tensor.shape) * tensor.dtype.itemsize
        own_NP = pages_NP[:, start : start + used]
        views.append(own_NP.view(tensor.dtype).unflatten(1, tensor.shape))
        start += num_bytes
    return tuple(views)


def _view(
    buffer: torch.Tensor,
    start: int,
    shape: tuple[int, ...],
    spec: FullAttentionSpec,
    num_blocks: int,
) -> torch.Tensor:
    """Return a view of a layer's cache, which starts at byte `start` of each page."""
    dtype = DTYPES[spec.dtype]
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes == len(buffer):
        return buffer.view(dtype).view(shape)
    own_NP = buffer.view(num_blocks, -1)[:, start : start + num_bytes // num_blocks]
    return own_NP.view(dtype).unflatten(1, shape[1:])
