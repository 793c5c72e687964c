"""Paged attention in float64 torch, with the checks and the limits of the real kernels.

Each function raises ValueError for an argument that the real kernel rejects, ignores or misreads.
Values are multiplied by weights of 0 wherever a kernel does so: NaN in a value that a kernel reads
gives NaN.

Dimensions: R requests, T tokens, H query heads, K key-value heads, D head size, N blocks,
B block size, M width of a block table, Q queries and L positions of a request.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

import torch

HALF = (torch.float16, torch.bfloat16)
FP8 = torch.float8_e4m3fn
NUM_PROCESSORS = 132
LEAST_TILE = 64

calls: deque[tuple[str, dict]] = deque(maxlen=60)
"""The latest calls: the name of the kernel, and its arguments by name."""


def require(right: bool, text: str) -> None:
    """Raise ValueError with `text` unless `right` is true."""
    if not right:
        raise ValueError(f"the real kernel rejects, ignores or misreads this call: {text}")


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A kernel call. loads_whole_blocks: whether it also multiplies values after the last token."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    starts: torch.Tensor
    lens: torch.Tensor
    table: torch.Tensor
    max_query_len: int
    scale: float
    window: tuple[int, int]
    soft_cap: float = 0.0
    sinks: torch.Tensor | None = None
    descales: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
    loads_whole_blocks: bool = False


def check(kernel: Kernel, *, page_multiple: int) -> None:
    """Check dtypes, shapes and strides, which all kernels check in the same way."""
    q, k, v, table = kernel.q, kernel.k, kernel.v, kernel.table
    aligned = 16 // q.element_size()
    for name, x in (("q", q), ("k", k), ("v", v)):
        require(x.dtype in (*HALF, FP8) and x.dtype == q.dtype, f"{name} is {x.dtype}")
        require(x.stride(-1) == 1, f"the last stride of {name} is not 1")
        require(not any(stride % aligned for stride in x.stride()[:-1]), f"{name} is not aligned")
    for x in kernel.descales:
        shape = (table.shape[0], k.shape[2])
        is_right = x is None or (x.dtype == torch.float32 and x.shape == shape)
        require(is_right and (x is None or q.dtype == FP8), "the descales do not fit")
    require(k.dim() == 4 and k.shape == v.shape, "the cache is not [blocks, size, heads, D]")
    require(not k.shape[1] % page_multiple, f"page size {k.shape[1]}")
    require(q.shape[2] == k.shape[3] and not q.shape[2] % 8, f"head size {q.shape[2]}")
    require(q.shape[2] <= 256, f"head size {q.shape[2]}")
    require(not q.shape[1] % k.shape[2], "the heads do not divide evenly")
    for name, x in (("cu_seqlens_q", kernel.starts), ("seqlens_k", kernel.lens)):
        require(x.dtype == torch.int32 and x.is_contiguous(), f"{name} is {x.dtype}")
    require(table.dtype == torch.int32 and table.stride(-1) == 1, f"the table is {table.dtype}")
    rows = table.shape[0]
    require(kernel.starts.shape == (rows + 1,), "cu_seqlens_q has a different number of rows")
    require(kernel.lens.shape == (rows,), "the lengths have a different number of rows")
    require(int(kernel.starts[-1]) == q.shape[0], "cu_seqlens_q does not end at the last query")
    counts = kernel.starts.diff()
    require(bool((counts <= kernel.max_query_len).all()), "max_seqlen_q is too small")
    require(isinstance(kernel.window, tuple), "the window is not a tuple")


def attend(kernel: Kernel) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the attention of all requests, float64 [T, H, D], and its logsumexp, [H, T]."""
    out_THD = torch.empty(kernel.q.shape, dtype=torch.float64)
    lse_TH = torch.empty(kernel.q.shape[:2])
    for row, length in enumerate(kernel.lens.tolist()):
        start, end = kernel.starts[row : row + 2].tolist()
        q_QHD = kernel.q[start:end]
        keys_values = cached(kernel, row, length)
        out_THD[start:end], lse_TH[start:end] = attend_row(kernel, q_QHD, keys_values, length)
    return out_THD, lse_TH.T


def cached(kernel: Kernel, row: int, length: int) -> list[torch.Tensor]:
    """Return the keys and values of a request's blocks, float64 [positions, K, D]."""
    num_blocks = -(-length // kernel.k.shape[1])
    require(num_blocks <= kernel.table.shape[1], "the table is too narrow")
    blocks = kernel.table[row, :num_blocks].long()
    tensors = []
    for x, scales_RK in zip((kernel.k, kernel.v), kernel.descales, strict=True):
        blocks_BKD = x.view(torch.uint8)[blocks].view(FP8) if x.dtype == FP8 else x[blocks]
        scale_K1 = 1.0 if scales_RK is None else scales_RK[row].double()[:, None]
        tensors.append(blocks_BKD.flatten(0, 1).double() * scale_K1)
    return tensors


def attend_row(
    kernel: Kernel, q_QHD: torch.Tensor, keys_values: list[torch.Tensor], length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the attention of one request, float64 [Q, H, D], and its logsumexp, [Q, H]."""
    group = q_QHD.shape[1] // kernel.k.shape[2]
    keys, values = keys_values
    if not kernel.loads_whole_blocks:
        values = values[:length]
    keys, values = (x.repeat_interleave(group, 1) for x in (keys[:length], values))
    scores_HQL = torch.einsum("qhd,lhd->hql", q_QHD.double(), keys) * kernel.scale
    if kernel.soft_cap:
        scores_HQL = kernel.soft_cap * torch.tanh(scores_HQL / kernel.soft_cap)
    keys_L = torch.arange(length)
    own_Q1 = keys_L[length - q_QHD.shape[0] :, None]
    left, right = kernel.window
    seen_QL = torch.ones(len(own_Q1), length, dtype=torch.bool)
    if right >= 0:
        seen_QL &= keys_L <= own_Q1 + right
    if left >= 0:
        seen_QL &= keys_L >= own_Q1 - left
    scores_HQL = scores_HQL.masked_fill(~seen_QL, float("-inf"))
    if kernel.sinks is not None:
        sinks_HQ1 = kernel.sinks.double()[:, None, None].expand(-1, len(own_Q1), 1)
        scores_HQL = torch.cat([scores_HQL, sinks_HQ1], -1)
    weights_HQL = scores_HQL.softmax(-1)[..., :length]
    weights_HQP = torch.nn.functional.pad(weights_HQL, (0, len(values) - length))
    return torch.einsum("hqp,phd->qhd", weights_HQP, values), scores_HQL.logsumexp(-1).T


def write(kernel: Kernel, out: torch.Tensor) -> torch.Tensor:
    """Compute the attention and write it to `out`, whose layout is checked.

    Return the logsumexp.
    """
    dtype = torch.bfloat16 if kernel.q.dtype == FP8 else kernel.q.dtype
    require(out.dtype == dtype and out.shape == kernel.q.shape, "out does not fit q")
    require(out.is_contiguous(), "out is not contiguous")
    out_THD, lse_HT = attend(kernel)
    out.copy_(out_THD)
    return lse_HT


def fa2(kernel: Kernel, *, page_multiple: int, causal: bool, max_key_len: int) -> Kernel:
    """Check the arguments for FlashAttention 2. Return the call that it computes."""
    check(kernel, page_multiple=page_multiple)
    require(kernel.sinks is None, "FlashAttention 2 has no sinks")
    require(kernel.q.dtype != FP8, "FlashAttention 2 has no fp8")
    require(bool((kernel.lens <= max_key_len).all()), "max_seqlen_k is too small")
    left, right = kernel.window
    if causal:
        right = 0
    return replace(kernel, window=(-1 if left >= max_key_len else left, right))


def reorders_heads(kernel: Kernel) -> bool:
    """Return whether FlashAttention 2 treats the heads of a group as queries."""
    grouped = kernel.q.shape[1] > kernel.k.shape[2]
    return kernel.max_query_len == 1 and grouped and kernel.window[0] < 0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The values that the scheduler metadata of FlashAttention 3 depend on, except the lengths."""

    num_rows: int
    max_query_len: int
    max_key_len: int
    heads: tuple[int, int, int]
    dtype: torch.dtype
    page_size: int
    causal: bool
    window: tuple[int, int]
    has_soft_cap: bool
    num_splits: int


def scheduler_metadata(plan: Plan, lens: torch.Tensor) -> torch.Tensor:
    """Return metadata of the real length, which contain all values that they depend on."""
    left, right = plan.window
    left = -1 if left >= plan.max_key_len - 1 else left
    is_local = left >= 0
    num_vectors = 2 + (not is_local) + (plan.causal or is_local)
    rounded = -(-plan.num_rows // 4) * 4
    metadata = torch.zeros(num_vectors * rounded + 1, dtype=torch.int32)
    metadata[: plan.num_rows] = lens
    metadata[rounded:-1] = hash(replace(plan, window=(left, right))) % (1 << 31)
    return metadata  # the last item is the semaphore


def check_scheduler_metadata(plan: Plan, lens: torch.Tensor, metadata: torch.Tensor | None) -> None:
    """Check that the metadata belong to this call, not to other lengths or another layer."""
    if metadata is None:
        return
    require(
        metadata.dtype == torch.int32 and metadata.is_contiguous(), "the metadata are not int32"
    )
    expected = scheduler_metadata(plan, lens)
    require(metadata.shape == expected.shape, f"the metadata have {len(metadata)} items")
    require(torch.equal(metadata, expected), "the metadata belong to another call")


def fa3(kernel: Kernel, plan: Plan, metadata: torch.Tensor | None, *, page_multiple: int) -> Kernel:
    """Check the arguments for FlashAttention 3. Return the call that it computes."""
    check(kernel, page_multiple=page_multiple)
    check_scheduler_metadata(plan, kernel.lens, metadata)
    require(bool((kernel.lens <= plan.max_key_len).all()), "max_seqlen_k is too small")
    sinks = kernel.sinks
    if sinks is not None:
        require(sinks.dtype == torch.bfloat16, f"the sinks are {sinks.dtype}")
        require(sinks.shape == (kernel.q.shape[1],) and sinks.is_contiguous(), "shape of sinks")
    num_queries = kernel.max_query_len * (kernel.q.shape[1] // kernel.k.shape[2])
    whole = kernel.k.shape[1] >= LEAST_TILE and num_queries > LEAST_TILE
    left, right = kernel.window
    if plan.causal:
        right = 0
    return replace(kernel, window=(left, right), loads_whole_blocks=whole)
