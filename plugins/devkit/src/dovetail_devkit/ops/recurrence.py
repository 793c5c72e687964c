"""The conformance cases of `gated_recurrence`, for providers that override it.

The reference is a loop over tokens in float64. torch is imported within functions.
Dimensions: T tokens, B blocks, C channels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import product
from typing import TYPE_CHECKING

from dovetail.interfaces.ops import (
    GatedRecurrenceInputs,
    Ops,
    StateParts,
    overridden_operations,
)
from dovetail_devkit.case import Case
from dovetail_devkit.comparison import exact, expect_close, random_tensor
from dovetail_devkit.expectation import expect
from dovetail_devkit.ops.states import (
    REQUESTS,
    SLACK,
    each_part,
    expect_states,
    make_parts,
    paged,
)

if TYPE_CHECKING:
    import torch

_CHANNELS = (24, 65)


def recurrence_cases(
    ops_cls: type[Ops], device: torch.device, *, dtypes: Iterable[str]
) -> Iterator[Case]:
    """Yield the cases of `gated_recurrence` if the class overrides it."""
    if "gated_recurrence" not in overridden_operations(ops_cls):
        return
    for num_channels, name, dtype in product(_CHANNELS, REQUESTS, tuple(dtypes)):
        yield Case(
            name=f"gated_recurrence {num_channels}, {name} in {dtype}",
            run=partial(_check, ops_cls, num_channels, REQUESTS[name], dtype, device),
        )


def recur_gated(
    inputs: GatedRecurrenceInputs, states_BC: torch.Tensor, parts: StateParts
) -> torch.Tensor:
    """Return the result of `gated_recurrence` in float64 on the host, and update the states."""
    import torch

    decay_gates = (exact(inputs.decay_gates_TC) + exact(inputs.decay_bias_C)).sigmoid()
    decay_TC = (exact(inputs.rates_C) * decay_gates).exp()
    scale_TC = (1 - decay_TC.square()).sqrt()
    input_gates = (exact(inputs.input_gates_TC) + exact(inputs.input_bias_C)).sigmoid()
    x_TC = exact(inputs.x_TC) * input_gates
    rows = []
    for start, end, read, write in each_part(parts):
        if read >= 0:
            state_C = exact(states_BC[read])
        else:
            state_C, scale_TC[start] = torch.zeros(states_BC.shape[1:]).double(), 1
        for t in range(start, end):
            state_C = decay_TC[t] * state_C + scale_TC[t] * x_TC[t]
            rows.append(state_C)
        states_BC[write] = state_C.to(states_BC)
    return torch.stack(rows)


def _check(
    ops_cls: type[Ops],
    num_channels: int,
    requests: tuple[tuple[int, ...], ...],
    dtype: str,
    device: torch.device,
) -> None:
    parts, num_blocks = make_parts(requests, device)

    def values(*shape: int, seed: int, dtype: str = dtype) -> torch.Tensor:
        return random_tensor(shape, dtype=dtype, device=device, seed=seed)

    def factors(seed: int) -> torch.Tensor:
        return values(num_channels, seed=seed, dtype="float32")

    # Views of one tensor, so that the rows are not adjacent.
    wide_TC = values(sum(parts.sizes), 3 * num_channels + 5, seed=1)
    x_TC, input_TC, decay_TC, _ = wide_TC.split([*[num_channels] * 3, 5], dim=1)
    inputs = GatedRecurrenceInputs(
        x_TC=x_TC,
        input_gates_TC=input_TC,
        decay_gates_TC=decay_TC,
        input_bias_C=factors(2),
        decay_bias_C=factors(3),
        rates_C=-0.3 * factors(4).abs(),
    )
    got_states, want_states = (
        paged(values(num_blocks, num_channels + 16, seed=5, dtype="float32"), num_channels)
        for _ in range(2)
    )
    want_TC = recur_gated(inputs, want_states, parts)
    before = wide_TC.clone()
    got_TC = ops_cls().gated_recurrence(inputs, got_states, parts)
    what = f"gated_recurrence {num_channels} of {dtype}"
    expect(before.equal(wide_TC), f"{what} must not change its inputs")
    expect_close(got_TC, want_TC, dtype=dtype, what=what, slack=SLACK)
    expect_states(got_states, want_states, parts, what)
