"""Paged attention as ctypes structs: the layout of `dovetail_attention.h`.

An `AttentionArgs` is filled once per layer; between calls only changed fields are set. Addresses
are integers, such as `tensor.data_ptr()`; the owner of the memory must keep it alive.
"""

from __future__ import annotations

import ctypes

from dovetail_cpu_kernels.library import check_result, library, native_operation

CACHE_BF16, CACHE_INT8 = 0, 1
BLOCK_MULTIPLE = 16
"""Block sizes and head sizes are multiples of this number."""
MAX_HEAD_SIZE = 640


class AttentionBatchSize(ctypes.Structure):
    """The struct `dk_attention_batch`: the requests and tokens of a step."""

    _fields_ = (
        ("num_runs", ctypes.c_int64),
        ("num_tokens", ctypes.c_int64),
    )


class AttentionArgs(ctypes.Structure):
    """The struct `dk_attention_args`. The first 14 fields, integers, change between calls."""

    _fields_ = (
        ("q", ctypes.c_void_p),
        ("k", ctypes.c_void_p),
        ("v", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("q_token_stride", ctypes.c_int64),
        ("q_head_stride", ctypes.c_int64),
        ("k_token_stride", ctypes.c_int64),
        ("k_head_stride", ctypes.c_int64),
        ("v_token_stride", ctypes.c_int64),
        ("v_head_stride", ctypes.c_int64),
        ("out_token_stride", ctypes.c_int64),
        ("out_head_stride", ctypes.c_int64),
        ("cache", ctypes.c_void_p),
        ("block_stride", ctypes.c_int64),
        ("batch", ctypes.c_void_p),
        ("query_start", ctypes.c_void_p),
        ("seq_lens", ctypes.c_void_p),
        ("block_table", ctypes.c_void_p),
        ("slot_mapping", ctypes.c_void_p),
        ("block_table_stride", ctypes.c_int64),
        ("workspace", ctypes.c_void_p),
        ("workspace_floats", ctypes.c_int64),
        ("num_heads", ctypes.c_int64),
        ("num_kv_heads", ctypes.c_int64),
        ("head_size", ctypes.c_int64),
        ("value_size", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("cache_kind", ctypes.c_int64),
        ("window", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("soft_cap", ctypes.c_float),
        ("sinks", ctypes.c_void_p),
    )


class BidirectionalArgs(ctypes.Structure):
    """The struct `dk_bidirectional_args`. Its first 12 fields are integers that change per call."""

    _fields_ = (
        ("q", ctypes.c_void_p),
        ("k", ctypes.c_void_p),
        ("v", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("q_token_stride", ctypes.c_int64),
        ("q_head_stride", ctypes.c_int64),
        ("k_token_stride", ctypes.c_int64),
        ("k_head_stride", ctypes.c_int64),
        ("v_token_stride", ctypes.c_int64),
        ("v_head_stride", ctypes.c_int64),
        ("out_token_stride", ctypes.c_int64),
        ("out_head_stride", ctypes.c_int64),
        ("batch", ctypes.c_void_p),
        ("query_start", ctypes.c_void_p),
        ("num_heads", ctypes.c_int64),
        ("num_kv_heads", ctypes.c_int64),
        ("head_size", ctypes.c_int64),
        ("window", ctypes.c_int64),
        ("scale", ctypes.c_float),
    )


class AttentionWork(ctypes.Structure):
    """The struct `dk_attention_work`: how a call would be distributed over the team's threads.

    num_items: items that threads claim. num_waves: parts that run one by one. cost: total
    cost of all items. longest_cost: the minimum cost of the busiest thread, if all threads are
    equally fast.
    """

    _fields_ = (
        ("num_items", ctypes.c_int64),
        ("num_waves", ctypes.c_int64),
        ("cost", ctypes.c_int64),
        ("longest_cost", ctypes.c_int64),
    )


def plan_attention(args: AttentionArgs) -> AttentionWork:
    """Return how a call of `dk_attention` would be distributed over the team's threads."""
    work = AttentionWork()
    function = library().dk_attention_plan
    function.argtypes, function.restype = [ctypes.c_void_p] * 2, check_result
    function(ctypes.addressof(args), ctypes.addressof(work))
    return work


def attention_operation() -> ctypes._NamedFuncPointer:
    """Return `dk_attention`: call it with the address of an AttentionArgs."""
    return native_operation("attention")


def bidirectional_operation() -> ctypes._NamedFuncPointer:
    """Return `dk_bidirectional`: call it with the address of a BidirectionalArgs."""
    return native_operation("bidirectional")


def attention_block_bytes(
    num_kv_heads: int, head_size: int, block_size: int, cache_kind: int, value_size: int = 0
) -> int:
    """Return the size of one block of one layer's cache. value_size: 0 for separate values."""
    function = library().dk_attention_block_bytes
    function.argtypes, function.restype = [ctypes.c_int64] * 5, ctypes.c_int64
    return int(function(num_kv_heads, head_size, block_size, cache_kind, value_size))
