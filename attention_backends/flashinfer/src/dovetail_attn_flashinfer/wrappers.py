"""FlashInfer's wrappers: creates them, plans them, and launches their kernels.

A wrapper holds the plan of its last `plan` call, so each layer shape has its own wrappers, which
all steps reuse. Every choice that FlashInfer would make is fixed here ("fa2" or "fa3", not "auto"):
its own choice depends on shapes and on installed packages.

Shape legend: T tokens, H query heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from math import log
from typing import Any

import flashinfer
import torch

from dovetail.errors import ConfigError
from dovetail.interfaces.kv_cache import FullAttentionSpec
from dovetail_attn_flashinfer.cache_dtype import cache_type
from dovetail_attn_flashinfer.layout import PageLists, Part
from dovetail_attn_flashinfer.shape import Launch, LayerShape

LAYOUT = "HND"
DECODE_KERNELS = "fa2"
"""The kernels of decodes, with tensor cores. FA3 does not split contexts."""

GRAPH_INTEGERS_BYTES = 1 << 20
"""Memory for the plan of a graph on the device, and as much on the host. A plan of 512 rows takes
about 40 KiB."""

LN_2 = log(2)

_sink_kernels: dict[tuple[object, ...], tuple[int, torch.dtype]] = {}
"""The head size and cache dtype of each sink kernel that this process has loaded. FlashInfer's
names of sink kernels do not contain them, so a second head size or dtype would load the kernel of
the first."""


class SinkMode(Enum):
    """How a layer's attention sinks are computed.

    IN_KERNEL: by FlashInfer's sink wrapper, which has no soft cap. RESCALED: the result without
    sinks is multiplied by 1 / (1 + exp(sink - logsumexp)). The other wrappers ignore their argument
    `sinks`.
    """

    NONE = 0
    IN_KERNEL = 1
    RESCALED = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphSize:
    """The size of a captured step of decodes.

    num_rows: number of requests; the batch size of a captured wrapper is fixed. max_pages: maximum
    number of blocks that all requests list together.
    """

    num_rows: int
    max_pages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WrapperKey:
    """Identifies a wrapper. captured_size: number of requests of the captured graph, or 0."""

    shape: LayerShape
    is_decode: bool
    sink_mode: SinkMode
    captured_size: int = 0


class PlannedWrapper:
    """A wrapper, and the event after the copies of its last plan.

    `plan` writes to page-locked memory of the wrapper and starts a copy to the device. The next
    `plan` overwrites this memory, so it first waits until the copy has ended. The copy precedes the
    step that it plans, so `plan` never waits for that step.
    captured_size: as in `WrapperKey`.
    """

    def __init__(self, wrapper: Any, copied: Any, captured_size: int = 0) -> None:
        self.wrapper = wrapper
        self._copied = copied
        self._captured_size = captured_size
        self._is_planned = False

    def plan(self, *args: object, **kwargs: object) -> None:
        """Plan a step.

        Raises ConfigError if the workspace is too small. For a graph raises RuntimeError, because
        steps can run without graphs.
        """
        if self._copied is not None and self._is_planned:
            self._copied.synchronize()
        try:
            self.wrapper.plan(*args, **kwargs)
        except RuntimeError as error:
            if "workspace buffer" not in str(error):
                raise
            if self._captured_size:
                raise RuntimeError(
                    "the workspace of the attention backend 'flashinfer' is too small for graphs "
                    f"of {self._captured_size} requests; increase its option workspace_mib, or "
                    "lower max_graph_size"
                ) from error
            raise ConfigError(
                "the workspace of the attention backend 'flashinfer' is too small for this step; "
                f"increase its option workspace_mib. FlashInfer reported: {error}"
            ) from error
        if self._copied is not None:
            self._copied.record()
        self._is_planned = True


class GraphMemory:
    """Device memory of captured wrappers.

    Graphs of all sizes share the page list and, for each layer shape, the memory of plans: only one
    step runs at a time, and each replay writes both again.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._integers: dict[WrapperKey, torch.Tensor] = {}
        self._pages_N = self._column(0)

    def integers(self, key: WrapperKey) -> torch.Tensor:
        """Return the memory of plans, uint8. key: the key of the wrapper, without a size."""
        result = self._integers.get(key)
        if result is None:
            result = torch.empty(GRAPH_INTEGERS_BYTES, dtype=torch.uint8, device=self._device)
            self._integers[key] = result
        return result

    def decode_buffers(self, graph: GraphSize) -> dict[str, object]:
        """Return the arguments of a decode wrapper for a graph."""
        return {
            "use_cuda_graph": True,
            "paged_kv_indptr_buffer": self._column(graph.num_rows + 1),
            "paged_kv_indices_buffer": self._pages(graph.max_pages),
            "paged_kv_last_page_len_buffer": self._column(graph.num_rows),
        }

    def prefill_buffers(self, graph: GraphSize) -> dict[str, object]:
        """Return the arguments of a prefill or sink wrapper for a graph."""
        return {
            "use_cuda_graph": True,
            "qo_indptr_buf": self._column(graph.num_rows + 1),
            "paged_kv_indptr_buf": self._column(graph.num_rows + 1),
            "paged_kv_indices_buf": self._pages(graph.max_pages),
            "paged_kv_last_page_len_buf": self._column(graph.num_rows),
        }

    def _pages(self, max_pages: int) -> torch.Tensor:
        """Return the page list. Captures start with the largest size, which allocates it."""
        if len(self._pages_N) < max_pages:
            self._pages_N = self._column(max_pages)
        return self._pages_N

    def _column(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int32, device=self._device)


class WrapperPool:
    """The wrappers of a KV-cache group, by layer shape.

    workspace: uint8, shared by all wrappers, because launches run one after another. prefill: "fa2"
    or "fa3". pdl: whether kernels may start before the previous kernel has ended.
    """

    def __init__(
        self, spec: FullAttentionSpec, workspace: torch.Tensor, *, prefill: str, pdl: bool
    ) -> None:
        self._spec = spec
        self._cache_dtype = cache_type(spec)
        self._workspace = workspace
        self._prefill = prefill
        self._pdl = pdl
        self._planned: dict[WrapperKey, PlannedWrapper] = {}
        self._graph_memory = GraphMemory(workspace.device)

    def launch(
        self, shape: LayerShape, part: Part, lists: PageLists, graph: GraphSize | None = None
    ) -> Launch:
        """Plan a part of a step for the layers of `shape`, and return its launch.

        The launch is valid until the next call for the same shape and kind of part. graph: the size
        of the graph that contains the launch. A captured launch stays valid as long as the pool
        exists. It uses the latest plan of its size, and must be planned again before each replay.
        """
        mode = self._sink_mode(shape, part)
        num_rows = graph.num_rows if graph else 0
        key = WrapperKey(
            shape=shape, is_decode=part.is_decode, sink_mode=mode, captured_size=num_rows
        )
        result = self._planned.get(key)
        if result is None:
            result = self._planned[key] = self._create(key, graph)
        self._plan(result, key, lists)
        return WrapperLaunch(
            wrapper=result.wrapper, tokens=part.tokens, shape=shape, sink_mode=mode, pdl=self._pdl
        )

    def _kernels(self, is_decode: bool) -> str:
        return DECODE_KERNELS if is_decode else self._prefill

    @property
    def _window_left(self) -> int:
        """Number of positions before a query's own position that it sees; -1 for all."""
        return self._spec.sliding_window - 1 if self._spec.sliding_window else -1

    def _sink_mode(self, shape: LayerShape, part: Part) -> SinkMode:
        if not shape.has_sinks:
            return SinkMode.NONE
        if shape.soft_cap:
            return SinkMode.RESCALED
        kernel = (shape.dtype, self._window_left >= 0, self._kernels(part.is_decode))
        own = (self._spec.head_size, self._cache_dtype)
        is_loaded = _sink_kernels.setdefault(kernel, own) == own
        return SinkMode.IN_KERNEL if is_loaded else SinkMode.RESCALED

    def _create(self, key: WrapperKey, graph: GraphSize | None) -> PlannedWrapper:
        # Not inference tensors: a later step may run outside of inference mode.
        with torch.inference_mode(False):
            wrapper = self._create_wrapper(key, graph)
            if graph is not None:
                integers = self._graph_memory.integers(replace(key, captured_size=0))
                wrapper.reset_workspace_buffer(self._workspace, integers)
        device = self._workspace.device
        event = None if device.type == "cpu" else torch.get_device_module(device).Event()
        return PlannedWrapper(wrapper, event, key.captured_size)

    def _create_wrapper(self, key: WrapperKey, graph: GraphSize | None) -> Any:
        kernels = self._kernels(key.is_decode)
        memory = self._graph_memory
        if key.sink_mode is SinkMode.IN_KERNEL:
            size = self._spec.head_size
            return flashinfer.BatchAttentionWithAttentionSinkWrapper(
                self._workspace,
                LAYOUT,
                backend=kernels,
                q_data_type=key.shape.dtype,
                kv_data_type=self._cache_dtype,
                head_dim_qk=size,
                head_dim_vo=size,
                window_left=self._window_left,
                **({} if graph is None else memory.prefill_buffers(graph)),
            )
        if key.is_decode:
            return flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                self._workspace,
                LAYOUT,
                use_tensor_cores=True,
                backend=kernels,
                **({} if graph is None else memory.decode_buffers(graph)),
            )
        return flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            self._workspace, LAYOUT, backend=kernels
        )

    def _plan(self, planned: PlannedWrapper, key: WrapperKey, lists: PageLists) -> None:
        spec, shape = self._spec, key.shape
        pages = (lists.page_indptr_R1, lists.pages_N, lists.last_page_len_R)
        sizes = (shape.num_heads, spec.num_kv_heads, spec.head_size, spec.block_size)
        options: dict[str, object] = {
            "pos_encoding_mode": "NONE",
            "window_left": self._window_left,
            "logits_soft_cap": shape.soft_cap,
            "sm_scale": shape.scale,
            "q_data_type": shape.dtype,
            "kv_data_type": self._cache_dtype,
            "o_data_type": shape.dtype,
            "non_blocking": True,
        }
        if key.is_decode and key.sink_mode is not SinkMode.IN_KERNEL:
            planned.plan(*pages, *sizes, **options)
        else:
            lens = {"seq_lens": lists.key_lens_R}  # copied to the device, so page-locked
            planned.plan(lists.query_indptr_R1, *pages, *sizes, causal=True, **lens, **options)


@dataclass(frozen=True, slots=True, kw_only=True)
class WrapperLaunch:
    """A launch of a planned wrapper over the tokens of a part."""

    wrapper: Any
    tokens: slice
    shape: LayerShape
    sink_mode: SinkMode
    pdl: bool

    def __call__(
        self,
        q_THD: torch.Tensor,
        kv_cache: torch.Tensor,
        sinks_H: torch.Tensor | None,
        out_THD: torch.Tensor,
    ) -> None:
        """Attend for the tokens of the part, and write the result to `out_THD`."""
        q_THD, out_THD = q_THD[self.tokens], out_THD[self.tokens]
        if self.sink_mode is SinkMode.IN_KERNEL:
            extra = (sinks_H, self.shape.scale)
            self.wrapper.run(q_THD, kv_cache, *extra, out=out_THD, enable_pdl=self.pdl)
        elif self.sink_mode is SinkMode.NONE:
            self.wrapper.run(q_THD, kv_cache, out=out_THD, enable_pdl=self.pdl)
        else:
            assert sinks_H is not None
            _, log2_sums_TH = self.wrapper.run(
                q_THD, kv_cache, out=out_THD, return_lse=True, enable_pdl=self.pdl
            )
            shares_TH = torch.sigmoid(log2_sums_TH * LN_2 - sinks_H)
            out_THD.mul_(shares_TH.unsqueeze(-1))
