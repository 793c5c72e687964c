"""Counts bytes and FLOPs of the Triton kernels in typical calls, and prints them as JSON.

TRITON_INTERPRET=1 python tests/docs/kernel_traffic.py [NAME…]

Needed bytes: each input, weight, key and value that the result depends on is read once, and each
result is written once. Needed FLOPs: those of causal pairs only. Legend: T tokens, H query heads, K
key-value heads, D head size, R rows, N features.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "attention_backends" / "triton" / "tests" / "interpreted"))

import torch  # noqa: E402
from attention_rows import Rows  # noqa: E402

from dovetail.interfaces.ops import (  # noqa: E402
    DrawColumns,
    GatedRecurrenceInputs,
    LatentWeights,
    LinearAttentionInputs,
    StateParts,
)
from dovetail_attn_triton.backend import TritonAttentionBackend  # noqa: E402
from dovetail_devkit.attention.case import AttentionCase  # noqa: E402
from dovetail_devkit.attention.rows import AttentionRows  # noqa: E402
from dovetail_devkit.triton.traffic import Traffic, count_traffic  # noqa: E402
from dovetail_ops_triton.ops import TritonOps  # noqa: E402

_H, _K, _D = 8, 2, 128
_R, _N, _VOCAB = 4, 2048, 8192
_BYTES = 2


@dataclass(frozen=True, kw_only=True)
class Counted:
    """The counts of one call, and the bytes and FLOPs that it needs.

    needed_flops: 0 if memory is the limit.
    """

    name: str
    launches: int
    needed_bytes: int
    moved_bytes: int
    requested_bytes: int
    needed_flops: int
    flops: int


def _counted(name: str, traffic: Traffic, needed_bytes: int, needed_flops: int = 0) -> Counted:
    return Counted(
        name=name,
        launches=traffic.launches,
        needed_bytes=needed_bytes,
        moved_bytes=traffic.moved_bytes,
        requested_bytes=traffic.requested_bytes,
        needed_flops=needed_flops,
        flops=traffic.flops,
    )


def _attention(
    name: str,
    lengths: list[int],
    num_new: int,
    cache_dtype: str = "",
    *,
    is_bound_by_flops: bool = False,
) -> Counted:
    """Count a step with `num_new` new tokens per request. lengths: those after the step."""
    shape = {"num_heads": _H, "num_kv_heads": _K, "head_size": _D, "dtype": torch.bfloat16}
    rows = Rows(lengths, cache_dtype=cache_dtype, **shape)
    rows.cache.view(torch.uint8).zero_()
    rows.done = [length - num_new for length in lengths]
    runs = [(row, num_new) for row in range(len(lengths))]
    metadata = rows.builder.build(rows.batch(runs))
    with count_traffic() as traffic:
        rows.forward(runs, metadata, rows.layer)
    per_token = rows.spec.page_size_bytes // rows.spec.block_size  # keys, values and scales
    new = num_new * len(lengths)
    cached = per_token * sum(lengths) + per_token * new  # read all, write the new ones
    tensors = new * _D * _BYTES * (2 * _H + 2 * _K)  # queries, results, new keys and values
    pairs = sum(length - place for length in lengths for place in range(num_new))
    flops = 4 * _H * _D * pairs if is_bound_by_flops else 0
    return _counted(name, traffic, cached + tensors, flops)


def _op(name: str, call: Callable[[TritonOps], object], needed_bytes: int) -> Counted:
    ops = TritonOps()
    with count_traffic() as traffic:
        call(ops)
    return _counted(name, traffic, needed_bytes)


def _norm() -> Counted:
    x, weight = torch.zeros(_R, _N, dtype=torch.bfloat16), torch.ones(_N, dtype=torch.bfloat16)
    needed = _BYTES * (2 * _R * _N + _N)
    return _op("rms_norm", lambda ops: ops.rms_norm(x, weight, 1e-6), needed)


def _add_norm() -> Counted:
    x, weight = torch.zeros(_R, _N, dtype=torch.bfloat16), torch.ones(_N, dtype=torch.bfloat16)
    residual, needed = x.clone(), _BYTES * (4 * _R * _N + _N)
    return _op("add_rms_norm", lambda ops: ops.add_rms_norm(x, residual, weight, 1e-6), needed)


def _gate() -> Counted:
    x, needed = torch.zeros(_R, 2 * _N, dtype=torch.bfloat16), _BYTES * 3 * _R * _N
    return _op("silu_and_mul", lambda ops: ops.silu_and_mul(x), needed)


def _rotary() -> Counted:
    q, k = (torch.zeros(_R, heads, _D, dtype=torch.bfloat16) for heads in (_H, _K))
    table, positions = torch.zeros(64, _D), torch.arange(_R)
    needed = 2 * _BYTES * _R * (_H + _K) * _D + _R * (4 * _D + 8)
    return _op("rotary_embedding", lambda ops: ops.rotary_embedding(q, k, positions, table), needed)


def _embedding() -> Counted:
    table, ids = torch.zeros(64, _N, dtype=torch.bfloat16), torch.arange(_R)
    needed = 2 * _BYTES * _R * _N + 8 * _R
    return _op("embedding", lambda ops: ops.embedding(ids, table), needed)


def _best() -> Counted:
    logits = torch.zeros(_R, _VOCAB, dtype=torch.bfloat16)
    needed = _BYTES * _R * _VOCAB + 8 * _R
    return _op("best_tokens", lambda ops: ops.best_tokens(logits), needed)


def _draw() -> Counted:
    """Count sampling from logits with Qwen3's vocabulary size. Few tokens pass the filters."""
    vocab_size = 151_936
    source = torch.Generator().manual_seed(1)
    logits = (2 * torch.randn(1, vocab_size, generator=source)).bfloat16()
    columns = DrawColumns(
        temperature_R=torch.ones(1),
        top_k_R=torch.full((1,), 50, dtype=torch.int32),
        top_p_R=torch.full((1,), 0.9),
        min_p_R=torch.zeros(1),
        seeds_R=torch.zeros(1, dtype=torch.int64),
        positions_R=torch.zeros(1, dtype=torch.int64),
    )
    needed = _BYTES * logits.numel() + 40
    return _op("draw_tokens: top-k, top-p", lambda ops: ops.draw_tokens(logits, columns), needed)


def _layer_norm() -> Counted:
    x = torch.zeros(_R, _N, dtype=torch.bfloat16)
    weight, bias = (torch.ones(_N, dtype=torch.bfloat16) for _ in range(2))
    needed = _BYTES * (2 * _R * _N + 2 * _N)
    return _op("layer_norm", lambda ops: ops.layer_norm(x, weight, bias, 1e-6), needed)


def _decodes() -> StateParts:
    blocks_R, ones = torch.arange(_R), (1,) * _R
    return StateParts(sizes=ones, num_parts=ones, reads_N=blocks_R, writes_N=blocks_R)


def _convolution() -> Counted:
    """Count decodes: each reads and writes the last three inputs."""
    x, weight = (torch.zeros(*shape, dtype=torch.bfloat16) for shape in ((_R, _N), (_N, 4)))
    states = torch.zeros(_R, 3, _N, dtype=torch.bfloat16)
    needed = _BYTES * (2 * x.numel() + weight.numel() + 2 * states.numel()) + 16 * _R
    name = f"causal_conv: {_R} decodes"
    return _op(name, lambda ops: ops.causal_conv(x, weight, None, states, _decodes()), needed)


def _linear_attention(name: str, num_tokens: int, parts: StateParts) -> Counted:
    """Count the delta rule: each request reads and writes a state per head."""
    q, k = (torch.zeros(num_tokens, _K, _D, dtype=torch.bfloat16) for _ in range(2))
    v = torch.zeros(num_tokens, _H, _D, dtype=torch.bfloat16)
    steps, beta = torch.zeros(2, num_tokens, _H, dtype=torch.bfloat16)
    inputs = LinearAttentionInputs(
        q_TGK=q,
        k_TGK=k,
        v_THV=v,
        steps_TH=steps,
        step_bias_H=torch.zeros(_H),
        rates_H=torch.zeros(_H),
        beta_TH=beta,
        key_eps=1e-6,
    )
    states = torch.zeros(len(parts.sizes), _H, _D, _D)
    needed = 8 * states.numel() + _BYTES * (2 * q.numel() + v.numel() + 2 * steps.numel())
    needed += 4 * v.numel() + 8 * _H + 16 * len(parts.sizes)
    call = lambda ops: ops.linear_attention(inputs, states, parts)  # noqa: E731
    return _op(name, call, needed)


def _linear_prompt() -> Counted:
    """Count one prompt, without its FLOPs, because they depend on the algorithm."""
    block, num_tokens = torch.zeros(1, dtype=torch.int64), 1024
    parts = StateParts(sizes=(num_tokens,), num_parts=(1,), reads_N=block, writes_N=block)
    return _linear_attention("linear_attention: prompt of 1,024 tokens", num_tokens, parts)


def _gated_recurrence(name: str, num_tokens: int, parts: StateParts) -> Counted:
    """Count recurrences with a state of one number per channel."""
    x, input_gates, decay_gates = torch.zeros(3, num_tokens, _N, dtype=torch.bfloat16)
    inputs = GatedRecurrenceInputs(
        x_TC=x,
        input_gates_TC=input_gates,
        decay_gates_TC=decay_gates,
        input_bias_C=torch.zeros(_N),
        decay_bias_C=torch.zeros(_N),
        rates_C=torch.zeros(_N),
    )
    states = torch.zeros(len(parts.sizes), _N)
    needed = _BYTES * 4 * x.numel() + 8 * states.numel() + 12 * _N + 16 * len(parts.sizes)
    return _op(name, lambda ops: ops.gated_recurrence(inputs, states, parts), needed)


def _recurrent_prompt() -> Counted:
    block, num_tokens = torch.zeros(1, dtype=torch.int64), 64
    parts = StateParts(sizes=(num_tokens,), num_parts=(1,), reads_N=block, writes_N=block)
    return _gated_recurrence("gated_recurrence: prompt of 64 tokens", num_tokens, parts)


def _gated_norm() -> Counted:
    x, gate = torch.zeros(_R, _H, _D), torch.zeros(_R, _H, _D, dtype=torch.bfloat16)
    weight = torch.ones(_D, dtype=torch.bfloat16)
    needed = 4 * x.numel() + _BYTES * (2 * gate.numel() + _D)
    call = lambda ops: ops.gated_rms_norm(x, gate, weight, 1e-6, norm_first=True)  # noqa: E731
    return _op("gated_rms_norm", call, needed)


def _sigmoid() -> Counted:
    x, gate = (torch.zeros(_R, _N, dtype=torch.bfloat16) for _ in range(2))
    return _op("sigmoid_and_mul", lambda ops: ops.sigmoid_and_mul(x, gate), _BYTES * 3 * x.numel())


def _gelu() -> Counted:
    x, gate = (torch.zeros(_R, _N, dtype=torch.bfloat16) for _ in range(2))
    needed = _BYTES * 3 * x.numel()
    return _op("gelu_tanh_and_mul", lambda ops: ops.gelu_tanh_and_mul(x, gate), needed)


def _soft_cap() -> Counted:
    logits = torch.zeros(_R, _VOCAB, dtype=torch.bfloat16)
    needed = _BYTES * 2 * logits.numel()
    return _op("soft_cap", lambda ops: ops.soft_cap(logits, 30.0), needed)


def _shared_expert() -> Counted:
    y, shared, x = (torch.zeros(_R, _N, dtype=torch.bfloat16) for _ in range(3))
    gate = torch.zeros(_N, dtype=torch.bfloat16)
    needed = _BYTES * (4 * y.numel() + _N)
    call = lambda ops: ops.add_shared_expert(y, shared, x, gate)  # noqa: E731
    return _op("add_shared_expert, gate", call, needed)


def _latent_inputs() -> Counted:
    """Count `latent_inputs` for decodes, with the vector sizes of DeepSeek V3 and 16 heads."""
    heads, plain, rank, rotary = 16, 128, 512, 64
    q = torch.zeros(_R, heads, plain + rotary, dtype=torch.bfloat16)
    latent = torch.zeros(_R, rank + rotary, dtype=torch.bfloat16)
    weights = LatentWeights(
        norm_L=torch.ones(rank, dtype=torch.bfloat16),
        eps=1e-6,
        key_HNL=torch.zeros(heads, plain, rank, dtype=torch.bfloat16),
    )
    table, positions = torch.zeros(64, rotary), torch.arange(_R)
    results = _R * (heads + 1) * (rank + rotary)
    needed = _BYTES * (q.numel() + latent.numel() + rank + weights.key_HNL.numel() + results)
    call = lambda ops: ops.latent_inputs(q, latent, weights, positions, table)  # noqa: E731
    return _op(f"latent_inputs: {_R} decodes", call, needed + _R * (4 * rotary + 8))


def _latent() -> Counted:
    """Count latent attention for decodes, with the vector sizes of DeepSeek V3 and 16 heads."""
    num_rows, length, heads, size, value_size = 8, 400, 16, 576, 512
    case = AttentionCase(
        runs=((length, 1),) * num_rows,
        dtype="bfloat16",
        num_heads=heads,
        num_kv_heads=1,
        head_size=size,
        value_size=value_size,
    )
    rows = AttentionRows(TritonAttentionBackend, case, torch.device("cpu"))
    rows.cache.view(torch.uint8).zero_()
    batch = rows.batch([(row, length, 1) for row in range(num_rows)])
    metadata = rows.builder.build(batch)
    q, k = (torch.zeros(num_rows, n, size, dtype=torch.bfloat16) for n in (heads, 1))
    out = torch.zeros(num_rows, heads, value_size, dtype=torch.bfloat16)
    with count_traffic() as traffic:
        rows.layer.forward(q, k, k[..., :value_size], rows.cache, metadata, out)
    vectors = size * num_rows * (length + 3)  # read all, read and write the new ones
    needed = _BYTES * (vectors + q.numel() + out.numel())
    name = f"latent attention: {num_rows} decodes of {length} tokens"
    return _counted(name, traffic, needed)


CALLS: dict[str, Callable[[], Counted]] = {
    "decode": lambda: _attention("attention: 4 decodes of 400 tokens", [400] * 4, 1),
    "split": lambda: _attention("attention: 1 decode of 900 tokens, in splits", [900], 1),
    "fp8": lambda: _attention(
        "attention: 4 decodes of 400 tokens, fp8 cache", [400] * 4, 1, "fp8_e4m3"
    ),
    "prefill": lambda: _attention(
        "attention: prefill of 1,024 tokens", [1024], 1024, is_bound_by_flops=True
    ),
    "rms_norm": _norm,
    "add_rms_norm": _add_norm,
    "silu_and_mul": _gate,
    "rotary_embedding": _rotary,
    "embedding": _embedding,
    "best_tokens": _best,
    "draw_tokens": _draw,
    "layer_norm": _layer_norm,
    "causal_conv": _convolution,
    "linear_attention": lambda: _linear_attention(
        f"linear_attention: {_R} decodes", _R, _decodes()
    ),
    "linear_prompt": _linear_prompt,
    "gated_recurrence": lambda: _gated_recurrence(
        f"gated_recurrence: {_R} decodes", _R, _decodes()
    ),
    "recurrent_prompt": _recurrent_prompt,
    "gated_rms_norm": _gated_norm,
    "sigmoid_and_mul": _sigmoid,
    "gelu_tanh_and_mul": _gelu,
    "soft_cap": _soft_cap,
    "add_shared_expert": _shared_expert,
    "latent_inputs": _latent_inputs,
    "latent": _latent,
}


def main() -> None:
    """Count the named calls, or all."""
    print(json.dumps([asdict(CALLS[name]()) for name in sys.argv[1:] or CALLS]))


if __name__ == "__main__":
    main()
