"""The arguments of a kernel call. A table of each provider maps them to the provider's names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from dovetail.errors import ContractError
from dovetail_attn_flash_attn.providers.provider import CallTensors, LayerShape, StepTensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """All arguments of a kernel call. tensors: None while scheduler metadata are computed."""

    shape: LayerShape
    step: StepTensors
    tensors: CallTensors | None = None
    scheduler_metadata: torch.Tensor | None = None

    @property
    def attention(self) -> CallTensors:
        """The tensors of an attention call."""
        assert self.tensors is not None
        return self.tensors


def _sinks(call: Call) -> torch.Tensor | None:
    """Return the sinks in bfloat16: the only dtype that the kernels support."""
    sinks_H = call.attention.sinks_H
    return None if sinks_H is None else sinks_H.to(torch.bfloat16)


def _descale(call: Call, index: int) -> torch.Tensor | None:
    """Return a scale of fp8 keys (0) or values (1) as float32 [R, K]: a view of one number."""
    scales = call.attention.kv_scales
    if scales is None:
        return None
    return scales[index].expand(call.step.num_rows, call.shape.num_kv_heads)


TERMS: Mapping[str, Callable[[Call], object]] = {
    "queries": lambda call: call.attention.q_THD,
    "keys": lambda call: call.attention.keys_NBKD,
    "values": lambda call: call.attention.values_NBKD,
    "out": lambda call: call.attention.out_THD,
    "sinks": _sinks,
    "key_scales": lambda call: _descale(call, 0),
    "value_scales": lambda call: _descale(call, 1),
    "scheduler_metadata": lambda call: call.scheduler_metadata,
    "num_rows": lambda call: call.step.num_rows,
    "query_start": lambda call: call.step.query_start_R1,
    "key_lens": lambda call: call.step.key_lens_R,
    "cu_key_lens": lambda call: call.step.cu_key_lens_R1,
    "table": lambda call: call.step.table_RM,
    "block_size": lambda call: call.step.block_size,
    "max_query_len": lambda call: call.step.max_query_len,
    "max_key_len": lambda call: call.step.max_key_len,
    "num_splits": lambda call: call.step.num_splits,
    "num_heads": lambda call: call.shape.num_heads,
    "num_kv_heads": lambda call: call.shape.num_kv_heads,
    "head_size": lambda call: call.shape.head_size,
    "dtype": lambda call: call.shape.dtype,
    "scale": lambda call: call.shape.scale,
    "causal": lambda call: True,
    "window_size": lambda call: call.shape.window_size,
    "window_left": lambda call: call.shape.window_size[0],
    "window_right": lambda call: call.shape.window_size[1],
    "soft_cap": lambda call: call.shape.soft_cap,
    "has_soft_cap": lambda call: call.shape.soft_cap > 0,
}


def arguments(names: Mapping[str, str], call: Call) -> dict[str, object]:
    """Return the keyword arguments of a call.

    names: the provider's name of each term that it supports. Raises ContractError if the layer has
    a soft cap, sinks or scales and the provider has no name for them: they must not be ignored.
    """
    tensors = call.tensors
    if tensors is not None:
        if call.shape.soft_cap and "soft_cap" not in names:
            raise ContractError("the selected provider does not support the soft cap of a layer")
        if tensors.sinks_H is not None and "sinks" not in names:
            raise ContractError("the selected provider does not support the sinks of a layer")
        if tensors.kv_scales is not None and "key_scales" not in names:
            raise ContractError("the selected provider does not support an fp8 KV cache")
    return {name: TERMS[term](call) for term, name in names.items()}
