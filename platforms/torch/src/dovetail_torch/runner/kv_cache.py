"""Create the tensors of the KV cache and the attention layers that use them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace

import torch

from dovetail.errors import ContractError
from dovetail.interfaces import (
    AttentionBackend,
    AttentionGroupContext,
    AttentionLayer,
    AttentionLayerContext,
    AttentionMetadataBuilder,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    LatentAttentionSpec,
    StateSpec,
)
from dovetail.interfaces.attention import ROTARY
from dovetail_torch.attention.chunked_runs import ChunkedBuilder, ChunkedLayer
from dovetail_torch.attention.state_parts import StatePartsBuilder
from dovetail_torch.attention.workspace import AttentionWorkspace
from dovetail_torch.attention_table import AttentionTable
from dovetail_torch.graphs.plan import GRAPHS
from dovetail_torch.layers.attention import Attention, CacheLayer
from dovetail_torch.layers.state import StateLayer
from dovetail_torch.padded_attention import PaddedAttention
from dovetail_torch.runner.cache_buffers import CacheBuffers, Zeros, take_buffers
from dovetail_torch.runner.continuation import SUPPORTS_ADVANCE
from dovetail_torch.runner.step_limits import StepLimits

_BuilderKey = tuple[KVCacheSpec, int]
"""The spec and the KV-cache group of layers that share a builder."""


@dataclass(frozen=True, kw_only=True)
class AttentionState:
    """The attention and states of all layers: cache memory, layers and metadata builders.

    block_sizes: block size of each KV-cache group, in tokens. builders: one for each distinct spec,
    with the KV-cache group whose block table it reads. supports_advance: whether all builders are
    `AdvancingBuilder`s. supports_graphs: whether all builders are `CapturableBuilder`s.
    backend_name: name of the attention backend.
    """

    buffers: CacheBuffers
    table: AttentionTable
    block_sizes: tuple[int, ...]
    builders: tuple[tuple[AttentionMetadataBuilder, int], ...] = ()
    supports_advance: bool = False
    supports_graphs: bool = False
    backend_name: str = ""

    @property
    def reorder_thresholds(self) -> tuple[int, ...]:
        """The thresholds of all builders, ascending. Batches are ordered for all of them."""
        thresholds = {builder.reorder_threshold for builder, _ in self.builders}
        return tuple(sorted(thresholds - {0}))


def kv_cache_specs(
    backend: type[AttentionBackend] | None,
    layers: Mapping[str, CacheLayer],
    *,
    block_size: int,
    limits: StepLimits,
) -> dict[str, KVCacheSpec]:
    """Return each layer's KV-cache spec, with the head size that the backend stores.

    States have snapshots, so that prompts can continue cached prefixes.
    """
    attention, states = _by_kind(layers)
    specs: dict[str, KVCacheSpec] = {
        name: _spec(backend, layer, block_size, limits)
        for name, layer in attention.items()
        if not layer.bidirectional
    }
    return specs | {
        name: StateSpec(block_size=block_size, num_bytes=layer.num_bytes, snapshots=True)
        for name, layer in states.items()
    }


def _by_kind(
    layers: Mapping[str, CacheLayer],
) -> tuple[dict[str, Attention], dict[str, StateLayer]]:
    """Return the attention layers and the recurrent layers."""
    attention = {name: layer for name, layer in layers.items() if isinstance(layer, Attention)}
    states = {name: layer for name, layer in layers.items() if isinstance(layer, StateLayer)}
    return attention, states


def _spec(
    backend: type[AttentionBackend] | None, layer: Attention, block_size: int, limits: StepLimits
) -> FullAttentionSpec:
    spec = FullAttentionSpec(
        block_size=block_size,
        num_kv_heads=layer.num_kv_heads,
        head_size=_stored_head_size(backend, layer),
        dtype=limits.kv_cache_dtype,
        sliding_window=layer.sliding_window,
        chunk_size=_chunk_size(layer, limits),
        scale_bytes=limits.scale_bytes,
    )
    if not layer.value_size:
        return spec
    return LatentAttentionSpec(**asdict(spec), value_size=layer.value_size)


def make_attention(
    backend: type[AttentionBackend] | None,
    layers: Mapping[str, CacheLayer],
    config: KVCacheConfig,
    limits: StepLimits,
    *,
    options: Mapping[str, object],
    zeros: Zeros,
) -> AttentionState:
    """Allocate the cache and create the backend's layers and builders.

    layers: layers by name, in the order of their indices. backend: None only without attention
    layers. options: options of the backend plugin. zeros: allocates zeroed memory.
    """
    block_sizes = tuple(group.spec.block_size for group in config.groups)
    attention, state_layers = _by_kind(layers)
    if not layers:
        nothing = CacheBuffers(caches={}, pages_NP=())
        table = AttentionTable((), (), ())
        return AttentionState(buffers=nothing, table=table, block_sizes=block_sizes)
    if any(layer.bidirectional for layer in attention.values()):
        assert backend is not None, "attention layers need a backend"
        return _without_cache(backend, layers, block_sizes, limits, options)
    specs = _grouped_specs(backend, attention, config, limits)
    features = frozenset[str]() if backend is None else backend.capabilities.features
    is_chunked = any(spec.chunk_size for spec in specs.values())
    # Steps are continued in host memory only, where the parts of states can be advanced.
    advances = not attention or SUPPORTS_ADVANCE in features
    is_padded = any(specs[name].head_size != layer.head_size for name, layer in attention.items())
    buffers = take_buffers(backend, specs, config, zeros, state_layers=state_layers)
    keys = _builder_keys(layers, config, specs)
    builders = {key: index for index, key in enumerate(dict.fromkeys(keys))}
    workspace = AttentionWorkspace(limits.device)
    empty = torch.empty(0, dtype=limits.dtype, device=limits.device)
    return AttentionState(
        buffers=buffers,
        table=AttentionTable(
            [
                _cached_layer(backend, name, layer, specs, limits, options)
                for name, layer in layers.items()
            ],
            [buffers.caches.get(name, empty) for name in layers],
            [builders[key] for key in keys],
            rotates=ROTARY in features and not is_padded,
            states={
                index: buffers.states[name]
                for index, name in enumerate(layers)
                if name in state_layers
            },
        ),
        block_sizes=block_sizes,
        builders=tuple(
            (_builder(backend, key, limits, options, workspace), key[1]) for key in builders
        ),
        supports_advance=advances and not is_chunked,
        supports_graphs=GRAPHS in features and not (state_layers or is_chunked),
        backend_name="" if backend is None else backend.name,
    )


def _builder_keys(
    layers: Mapping[str, CacheLayer],
    config: KVCacheConfig,
    specs: Mapping[str, FullAttentionSpec],
) -> list[_BuilderKey]:
    """Return the key of each layer's builder. specs: the KV-cache specs of the attention layers."""
    group_of = {name: i for i, group in enumerate(config.groups) for name in group.layer_names}
    return [
        (specs.get(name, config.groups[group_of[name]].spec), group_of[name]) for name in layers
    ]


def _cached_layer(
    backend: type[AttentionBackend] | None,
    name: str,
    layer: CacheLayer,
    specs: Mapping[str, FullAttentionSpec],
    limits: StepLimits,
    options: Mapping[str, object],
) -> AttentionLayer | None:
    """Return the backend's layer for an attention layer; None for a recurrent layer."""
    if isinstance(layer, StateLayer):
        return None
    assert backend is not None, "attention layers need a backend"
    spec = specs[name]
    own = backend.create_layer(_layer_context(name, layer, spec.head_size, limits, options))
    own = _with_heads_of(own, layer, spec.head_size)
    return ChunkedLayer(own) if spec.chunk_size else own


def _grouped_specs(
    backend: type[AttentionBackend] | None,
    layers: Mapping[str, Attention],
    config: KVCacheConfig,
    limits: StepLimits,
) -> dict[str, FullAttentionSpec]:
    """Return the spec of each attention layer, with the block size of its group."""
    return {
        name: _spec(backend, layers[name], group.spec.block_size, limits)
        for group in config.groups
        for name in group.layer_names
        if name in layers
    }


def _without_cache(
    backend: type[AttentionBackend],
    layers: Mapping[str, CacheLayer],
    block_sizes: tuple[int, ...],
    limits: StepLimits,
    options: Mapping[str, object],
) -> AttentionState:
    """Return the attention of bidirectional layers. Raise ContractError if a layer is causal."""
    workspace = AttentionWorkspace(limits.device)
    builders: dict[FullAttentionSpec, int] = {}
    created: list[AttentionLayer] = []
    builder_of = []
    for name, layer in layers.items():
        if isinstance(layer, StateLayer) or not layer.bidirectional:
            raise ContractError(
                f"{name} is causal, but other attention layers of the model are bidirectional; "
                "this combination is not supported"
            )
        spec = FullAttentionSpec(
            block_size=block_sizes[0],
            num_kv_heads=layer.num_kv_heads,
            head_size=_stored_head_size(backend, layer),
            dtype=limits.kv_cache_dtype,
            sliding_window=layer.sliding_window,
        )
        own = backend.create_layer(_layer_context(name, layer, spec.head_size, limits, options))
        created.append(_with_heads_of(own, layer, spec.head_size))
        builder_of.append(builders.setdefault(spec, len(builders)))
    empty = torch.empty(0, dtype=limits.dtype, device=limits.device)
    contexts = (_group_context(spec, limits, options, workspace) for spec in builders)
    return AttentionState(
        buffers=CacheBuffers(caches={}, pages_NP=()),
        table=AttentionTable(created, [empty] * len(created), builder_of),
        block_sizes=block_sizes,
        builders=tuple(
            (backend.create_builder(replace(context, bidirectional=True)), 0)
            for context in contexts
        ),
        backend_name=backend.name,
    )


def make_builders(
    backend: type[AttentionBackend] | None,
    specs: Iterable[KVCacheSpec],
    limits: StepLimits,
    *,
    options: Mapping[str, object],
) -> list[AttentionMetadataBuilder]:
    """Return a builder for each distinct attention spec, to measure the memory of workspaces."""
    if backend is None:
        return []
    workspace = AttentionWorkspace(limits.device)
    return [
        backend.create_builder(_group_context(spec, limits, options, workspace))
        for spec in set(specs)
        if isinstance(spec, FullAttentionSpec)
    ]


def _chunk_size(layer: Attention, limits: StepLimits) -> int:
    """Return the chunk size of a layer, 0 if no sequence is longer."""
    return layer.chunk_size if layer.chunk_size < limits.max_model_len else 0


def _builder(
    backend: type[AttentionBackend] | None,
    key: _BuilderKey,
    limits: StepLimits,
    options: Mapping[str, object],
    workspace: AttentionWorkspace,
) -> AttentionMetadataBuilder:
    spec, _ = key
    if isinstance(spec, StateSpec):
        return StatePartsBuilder(spec, limits)
    assert backend is not None and isinstance(spec, FullAttentionSpec)
    context = _group_context(spec, limits, options, workspace)
    if spec.chunk_size:
        return ChunkedBuilder(backend, context)
    return backend.create_builder(context)


def _stored_head_size(backend: type[AttentionBackend] | None, layer: Attention) -> int:
    size = layer.head_size
    # If the backend supports no larger size, its own check raises the error.
    return size if backend is None else backend.capabilities.stored_head_size(size) or size


def _with_heads_of(own: AttentionLayer, layer: Attention, head_size: int) -> AttentionLayer:
    """Return `own`, whose heads have `head_size` features, for the model's heads."""
    num_added = head_size - layer.head_size
    if not num_added:
        return own
    return PaddedAttention(own, num_added, pads_values=not layer.value_size)


def _layer_context(
    name: str,
    layer: Attention,
    head_size: int,
    limits: StepLimits,
    options: Mapping[str, object],
) -> AttentionLayerContext:
    return AttentionLayerContext(
        layer_name=name,
        num_heads=layer.num_heads,
        num_kv_heads=layer.num_kv_heads,
        head_size=head_size,
        scale=layer.scale,
        dtype=limits.dtype,
        device=limits.device,
        sliding_window=layer.sliding_window,
        soft_cap=layer.soft_cap,
        sinks=layer.sinks,
        alibi_slopes=_slopes(layer, limits.device),
        kv_scales=layer.kv_scales,
        bidirectional=layer.bidirectional,
        value_size=layer.value_size,
        options=options,
    )


def _slopes(layer: Attention, device: torch.device) -> torch.Tensor | None:
    if not layer.alibi_slopes:
        return None
    return torch.tensor(layer.alibi_slopes, dtype=torch.float32, device=device)


def _group_context(
    spec: FullAttentionSpec,
    limits: StepLimits,
    options: Mapping[str, object],
    workspace: AttentionWorkspace,
) -> AttentionGroupContext:
    return AttentionGroupContext(
        spec=spec,
        device=limits.device,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=limits.max_model_len,
        options=options,
        workspace=workspace.take,
    )
