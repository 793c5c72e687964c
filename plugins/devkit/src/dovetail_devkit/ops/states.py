"""The conformance cases of recurrent operations, for providers that override them.

The operations are `causal_conv`, `plain_causal_conv`, `linear_attention` and `gated_rms_norm`; the
cases of `gated_recurrence` are in recurrence.py. The references are loops over tokens in float64.
torch is imported within functions.
Dimensions: T tokens, N segments, B blocks, C channels, W kernel size, H heads, G groups of heads,
K and V features of a key and of a value, I features of a group of a norm.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

from dovetail.interfaces.ops import (
    LinearAttentionInputs,
    Ops,
    StateParts,
    overridden_operations,
)
from dovetail_devkit.case import Case
from dovetail_devkit.comparison import exact, expect_close, random_tensor
from dovetail_devkit.expectation import expect

if TYPE_CHECKING:
    import torch

SLACK = 4.0
"""Factor for the tolerance of outputs and states, which are sums over many tokens."""

REQUESTS = {
    "decodes": ((1,), (1,), (1,)),
    "one new request": ((5,),),
    "one long segment": ((150,),),
    "segments of several sizes": ((3, 64, 1), (1,), (2, 2, 70), (1, 1)),
}
"""The sizes of the segments of each request."""
_NEW = (1, 4)
"""Of five requests, these have no state before the step."""
_SHARED = 2
"""Of three requests, this one begins with a state that it does not overwrite."""


@dataclass(frozen=True, kw_only=True)
class _Heads:
    """A case of `linear_attention`. delta: whether the delta rule applies."""

    groups: int
    heads: int
    key_size: int
    value_size: int
    delta: bool
    skip: bool = False
    key_eps: float = 0.0
    limits: tuple[float, float] = (0.0, math.inf)


_CHANNELS = ((24, 4, True), (80, 4, False), (33, 2, True), (64, 3, False))
"""The channels, kernel size and whether there is a bias, of each case of `causal_conv`."""
_HEADS = (
    _Heads(groups=2, heads=4, key_size=16, value_size=24, delta=True, key_eps=1e-2),
    _Heads(groups=1, heads=3, key_size=20, value_size=16, delta=False, skip=True),
    _Heads(groups=4, heads=4, key_size=8, value_size=33, delta=True, skip=True, key_eps=1e-6),
    _Heads(groups=2, heads=6, key_size=128, value_size=64, delta=False, limits=(0.4, 0.9)),
)
_GROUPS = ((1, 2, 16), (5, 3, 40), (7, 1, 33))
"""The shape of x in each case of `gated_rms_norm`."""
_EPS = 1e-3


def state_cases(
    ops_cls: type[Ops], device: torch.device, *, dtypes: Iterable[str]
) -> Iterator[Case]:
    """Yield the cases of the recurrent operations that the class overrides."""
    dtypes = tuple(dtypes)
    overridden = overridden_operations(ops_cls)
    checks: tuple[tuple[str, Any, tuple[Any, ...]], ...] = (
        ("causal_conv", partial(_check_conv, "causal_conv"), _CHANNELS),
        ("plain_causal_conv", partial(_check_conv, "plain_causal_conv"), _CHANNELS),
        ("linear_attention", _check_attention, _HEADS),
    )
    for operation, check, shapes in checks:
        if operation not in overridden:
            continue
        for shape, name, dtype in product(shapes, REQUESTS, tuple(dtypes)):
            yield Case(
                name=f"{operation} {shape}, {name} in {dtype}",
                run=partial(check, ops_cls, shape, REQUESTS[name], dtype, device),
            )
    if "gated_rms_norm" in overridden:
        for sizes, norm_first, dtype in product(_GROUPS, (False, True), tuple(dtypes)):
            yield Case(
                name=f"gated_rms_norm {sizes}, norm_first={norm_first} in {dtype}",
                run=partial(_check_gated_norm, ops_cls, sizes, norm_first, dtype, device),
            )


def make_parts(requests: Iterable[tuple[int, ...]], device: torch.device) -> tuple[StateParts, int]:
    """Return the segments of a step, and the number of blocks that they need.

    requests: sizes of the segments of each request. Some requests are new. The last segment of a
    request writes to the block that its first segment reads, and the others write to blocks of
    their own. Some requests begin with the state of a block that no segment writes, as after a
    cached prefix.
    """
    import torch

    sizes: list[int] = []
    num_parts, reads, writes, end = [], [], [], 1
    for number, parts in enumerate(requests):
        first = end
        end += len(parts)
        own = [*range(first + 1, end), first]
        is_new = number % 5 in _NEW
        if number % 3 == _SHARED:
            first, end = end, end + 1
        sizes += parts
        num_parts.append(len(parts))
        reads += [-1 if is_new else first, *own[:-1]]
        writes += own
    # The blocks of the requests are neither in order nor adjacent.
    created = StateParts(
        sizes=tuple(sizes),
        num_parts=tuple(num_parts),
        reads_N=torch.tensor([end - block if block > 0 else -1 for block in reads], device=device),
        writes_N=torch.tensor([end - block for block in writes], device=device),
    )
    return created, end + 1


def convolve(
    x_TC: torch.Tensor,
    weight_CW: torch.Tensor,
    bias_C: torch.Tensor | None,
    states_BWC: torch.Tensor,
    parts: StateParts,
    *,
    activated: bool = True,
) -> torch.Tensor:
    """Return the result of `causal_conv` in float64 on the host, and update the states.

    activated: False for `plain_causal_conv`.
    """
    import torch

    weight = exact(weight_CW)
    rows = []
    for start, end, read, write in each_part(parts):
        before = exact(states_BWC[read]) if read >= 0 else torch.zeros(states_BWC.shape[1:])
        inputs = torch.cat((before.double(), exact(x_TC[start:end])))
        for token in range(end - start):
            total_C = (inputs[token : token + weight.shape[1]] * weight.T).sum(0)
            if bias_C is not None:
                total_C = total_C + exact(bias_C)
            rows.append(total_C * total_C.sigmoid() if activated else total_C)
        states_BWC[write] = inputs[end - start :].to(states_BWC)
    return torch.stack(rows)


def recur(
    inputs: LinearAttentionInputs, states_BHKV: torch.Tensor, parts: StateParts
) -> torch.Tensor:
    """Return the result of `linear_attention` in float64 on the host, and update the states."""
    import torch

    num_heads = inputs.v_THV.shape[1]
    repeats = num_heads // inputs.q_TGK.shape[1]
    length = inputs.q_TGK.shape[-1] ** -0.5
    q_THK, k_THK = (
        _normalized(exact(x), inputs.key_eps, length).repeat_interleave(repeats, 1)
        for x, length in ((inputs.q_TGK, length), (inputs.k_TGK, 1.0))
    )
    v_THV = exact(inputs.v_THV)
    steps_TH = torch.nn.functional.softplus(exact(inputs.steps_TH) + exact(inputs.step_bias_H))
    steps_TH = steps_TH.clamp(*inputs.step_limits)
    decay_TH = (exact(inputs.rates_H) * steps_TH).exp()
    beta_TH = None if inputs.beta_TH is None else exact(inputs.beta_TH).sigmoid()
    rows = []
    for start, end, read, write in each_part(parts):
        shape = states_BHKV.shape[1:]
        state = exact(states_BHKV[read]) if read >= 0 else torch.zeros(shape).double()
        for t in range(start, end):
            state = state * decay_TH[t][:, None, None]
            u_HV = v_THV[t] * steps_TH[t][:, None]
            if beta_TH is not None:
                known_HV = (state * k_THK[t][:, :, None]).sum(1)
                u_HV = beta_TH[t][:, None] * (v_THV[t] - known_HV)
            state = state + k_THK[t][:, :, None] * u_HV[:, None]
            y_HV = (state * q_THK[t][:, :, None]).sum(1)
            if inputs.skip_H is not None:
                y_HV = y_HV + exact(inputs.skip_H)[:, None] * v_THV[t]
            rows.append(y_HV)
        states_BHKV[write] = state.to(states_BHKV)
    return torch.stack(rows)


def _normalized(x_TGK: torch.Tensor, eps: float, length: float) -> torch.Tensor:
    if not eps:
        return x_TGK
    return x_TGK / (x_TGK.square().sum(-1, keepdim=True) + eps).sqrt() * length


def normalize_gated(
    x_TGI: torch.Tensor,
    gate_TGI: torch.Tensor,
    weight_GI: torch.Tensor,
    eps: float,
    *,
    norm_first: bool,
) -> torch.Tensor:
    """Return the result of `gated_rms_norm` in float64 on the host."""
    x, gate = exact(x_TGI), exact(gate_TGI)
    gate = gate * gate.sigmoid()
    x = x if norm_first else x * gate
    y = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * exact(weight_GI)
    return y * gate if norm_first else y


def each_part(parts: StateParts) -> Iterator[tuple[int, int, int, int]]:
    """Yield the first token, the end, and the blocks read and written, of each segment."""
    start = 0
    blocks = zip(parts.sizes, parts.reads_N.tolist(), parts.writes_N.tolist(), strict=True)
    for size, read, write in blocks:
        yield start, start + size, read, write
        start += size


def _check_conv(
    operation: str,
    ops_cls: type[Ops],
    channels: tuple[int, int, bool],
    requests: tuple[tuple[int, ...], ...],
    dtype: str,
    device: torch.device,
) -> None:
    num_channels, width, has_bias = channels
    parts, num_blocks = make_parts(requests, device)
    num_tokens = sum(parts.sizes)

    def values(*shape: int, seed: int) -> torch.Tensor:
        return random_tensor(shape, dtype=dtype, device=device, seed=seed)

    x_TC = values(num_tokens, 2 * num_channels, seed=1)[:, :num_channels]
    weight_CW = values(num_channels, width, seed=2)
    bias_C = values(num_channels, seed=3) if has_bias else None
    size = (width - 1) * num_channels
    got_states, want_states = (
        paged(values(num_blocks, size + 32, seed=4), size).unflatten(1, (width - 1, num_channels))
        for _ in range(2)
    )
    activated = operation == "causal_conv"
    want_TC = convolve(x_TC, weight_CW, bias_C, want_states, parts, activated=activated)
    before = x_TC.clone()
    got_TC = getattr(ops_cls(), operation)(x_TC, weight_CW, bias_C, got_states, parts)
    expect(before.equal(x_TC), f"{operation} must not change its input")
    what = f"{operation} {channels}"
    expect_close(got_TC, want_TC, dtype=dtype, what=what)
    same = got_states.nan_to_num(nan=1e4).equal(want_states.nan_to_num(nan=1e4))
    expect(same, f"{what}: the states must be the last inputs, in the blocks of the segments")


def _check_attention(
    ops_cls: type[Ops],
    heads: _Heads,
    requests: tuple[tuple[int, ...], ...],
    dtype: str,
    device: torch.device,
) -> None:
    parts, num_blocks = make_parts(requests, device)
    num_tokens = sum(parts.sizes)

    def values(*shape: int, seed: int, dtype: str = dtype) -> torch.Tensor:
        return random_tensor(shape, dtype=dtype, device=device, seed=seed)

    # Views of one tensor, as from a projection.
    key_size, value_size = heads.groups * heads.key_size, heads.heads * heads.value_size
    sizes = [key_size, key_size, value_size, heads.heads, heads.heads]
    scale = 1.0 if heads.key_eps else heads.key_size**-0.5
    x_TC = values(num_tokens, sum(sizes) + 3, seed=1)
    x_TC[:, : 2 * key_size] *= scale
    q, k, v_TC, steps_TH, beta_TH, _ = x_TC.split([*sizes, 3], dim=1)

    def factors(seed: int) -> torch.Tensor:
        return values(heads.heads, seed=seed, dtype="float32")

    inputs = LinearAttentionInputs(
        q_TGK=q.unflatten(1, (heads.groups, -1)),
        k_TGK=k.unflatten(1, (heads.groups, -1)),
        v_THV=v_TC.unflatten(1, (heads.heads, -1)),
        steps_TH=steps_TH,
        step_bias_H=factors(2),
        step_limits=heads.limits,
        rates_H=-factors(4).abs(),
        beta_TH=beta_TH if heads.delta else None,
        skip_H=factors(5) if heads.skip else None,
        key_eps=heads.key_eps,
    )
    shape = (heads.heads, heads.key_size, heads.value_size)
    size = heads.heads * heads.key_size * heads.value_size
    got_states, want_states = (
        paged(values(num_blocks, size + 16, seed=6, dtype="float32"), size).unflatten(1, shape)
        for _ in range(2)
    )
    want_THV = recur(inputs, want_states, parts)
    before = x_TC.clone()
    got_THV = ops_cls().linear_attention(inputs, got_states, parts)
    what = f"linear_attention {heads} of {dtype}"
    expect(before.equal(x_TC), f"{what} must not change its inputs")
    expect_close(got_THV, want_THV, dtype="float32", what=what, slack=SLACK)
    expect_states(got_states, want_states, parts, what)


def expect_states(
    got_states: torch.Tensor, want_states: torch.Tensor, parts: StateParts, what: str
) -> None:
    """Fail unless the written blocks are close and the other blocks are equal; all are float32."""
    written = parts.writes_N.tolist()
    for block in set(range(len(got_states))) - set(written):  # block 0 contains NaN
        same = got_states[block].nan_to_num(nan=1e4).equal(want_states[block].nan_to_num(nan=1e4))
        expect(same, f"{what}: block {block} was changed, but no segment writes to it")
    want = exact(want_states[written])
    expect_close(
        got_states[written], want, dtype="float32", what=f"{what}, the states", slack=SLACK
    )


def _check_gated_norm(
    ops_cls: type[Ops],
    shape: tuple[int, int, int],
    norm_first: bool,
    dtype: str,
    device: torch.device,
) -> None:
    num_tokens, num_groups, size = shape

    def values(*shape: int, seed: int, dtype: str = dtype) -> torch.Tensor:
        return random_tensor(shape, dtype=dtype, device=device, seed=seed)

    x_TGI = values(*shape, seed=1, dtype="float32")
    wide_TC = values(num_tokens, 2 * num_groups * size, seed=2)
    gate_TGI = wide_TC[:, : num_groups * size].unflatten(1, (num_groups, size))
    for weight_GI in (values(size, seed=3), values(num_groups, size, seed=4)):
        want = normalize_gated(x_TGI, gate_TGI, weight_GI, _EPS, norm_first=norm_first)
        got = ops_cls().gated_rms_norm(
            x_TGI.clone(), gate_TGI, weight_GI, _EPS, norm_first=norm_first
        )
        what = f"gated_rms_norm {shape}, norm_first={norm_first}, weight {list(weight_GI.shape)}"
        expect_close(got, want, dtype=dtype, what=what)


def paged(rows_BP: torch.Tensor, size: int) -> torch.Tensor:
    """Return the first `size` values of each row, a view. Block 0 is never allocated: it is NaN."""
    rows_BP[0] = float("nan")
    return rows_BP[:, :size]
