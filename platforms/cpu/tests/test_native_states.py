"""Native recurrent and elementwise operations: contract, batch invariance and layouts."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

import dovetail_cpu_kernels as native
from dovetail.interfaces.ops import (
    GatedRecurrenceInputs,
    LinearAttentionInputs,
    StateParts,
    StatePartsMemory,
)
from dovetail_cpu.native_library import probe_fast
from dovetail_cpu.native_ops import NativeOps, latent_and_gates, states
from dovetail_cpu_kernels.library import LEVELS
from dovetail_devkit.case import run_all
from dovetail_devkit.ops.elementwise import elementwise_cases
from dovetail_devkit.ops.latent_and_gates import latent_and_gate_cases
from dovetail_devkit.ops.recurrence import recur_gated, recurrence_cases
from dovetail_devkit.ops.states import state_cases
from dovetail_torch.layers import TorchOps

if probe_fast().usable:
    from dovetail_cpu.replay import ReplayProvider

pytestmark = pytest.mark.skipif(not probe_fast().usable, reason="native kernels are not usable")
HOST = torch.device("cpu")


@pytest.fixture
def level(request):
    library = native.library()
    before = library.dk_level()
    if not library.dk_supports_level(LEVELS.index(request.param)):
        pytest.skip(f"this CPU does not have {request.param}")
    library.dk_set_level(LEVELS.index(request.param))
    yield
    library.dk_set_level(before)


at_every_level = pytest.mark.parametrize(
    "level", ["portable", "avx2", "avx512", "avx512_bf16"], indirect=True
)


@pytest.mark.costly
@at_every_level
def test_recurrent_operations_meet_their_contract_at_every_level(level):
    cases = list(state_cases(NativeOps, HOST, dtypes=["bfloat16"]))
    assert len(cases) == 54
    run_all(cases)


@at_every_level
def test_operations_of_gated_recurrences_meet_their_contract_without_torch(level, monkeypatch):
    monkeypatch.setattr(states, "_TORCH", None)
    dtypes = ["bfloat16", "float32"]
    cases = list(recurrence_cases(NativeOps, HOST, dtypes=dtypes))
    convolutions = state_cases(NativeOps, HOST, dtypes=dtypes)
    cases += [case for case in convolutions if case.name.startswith("plain_causal_conv")]
    assert len(cases) == 48
    run_all(cases)


@at_every_level
def test_latent_attention_gates_and_shared_experts_meet_their_contract(level):
    cases = list(latent_and_gate_cases(NativeOps, HOST, dtypes=["bfloat16"]))
    assert len(cases) == 6
    run_all(cases)


@at_every_level
def test_gated_gelu_scales_and_soft_caps_meet_their_contract_without_torch(level, monkeypatch):
    monkeypatch.setattr(latent_and_gates, "_TORCH", None)
    cases = list(elementwise_cases(NativeOps, HOST, dtypes=["bfloat16"]))
    logits = elementwise_cases(NativeOps, HOST, dtypes=["float32"])
    cases += [case for case in logits if not case.name.startswith("gelu")]
    assert len(cases) == 5
    run_all(cases)


def test_a_step_whose_inputs_have_no_fixed_addresses_is_not_recorded():
    """The memory of such inputs is freed after the step, so a replay would read other values."""
    x_TC, states = torch.randn(2, 8).bfloat16(), torch.zeros(3, 3, 8).bfloat16()
    weight_CW, ops = torch.randn(8, 4).bfloat16(), NativeOps()
    memory = StatePartsMemory(
        num_requests_1=torch.tensor([1]),
        num_parts_R=torch.tensor([1]),
        sizes_N=torch.tensor([2]),
        reads_N=torch.tensor([-1]),
        writes_N=torch.tensor([2]),
    )
    parts = parts_of([2], [2])

    def failure_reason(parts):
        run = partial(ops.causal_conv, x_TC, weight_CW, None, states, parts)
        return ReplayProvider().capture(lambda: (run(),)).failure_reason

    assert "aten::" in failure_reason(parts)
    assert failure_reason(replace(parts, memory=memory)) == ""


def parts_of(sizes, blocks):
    """Return one part for each request, which reads and writes one block."""
    index = torch.tensor(blocks)
    return StateParts(
        sizes=tuple(sizes), num_parts=(1,) * len(sizes), reads_N=index, writes_N=index
    )


def attention(num_tokens):
    """Return random inputs with the delta rule, and states of nine blocks."""
    inputs = LinearAttentionInputs(
        q_TGK=torch.randn(num_tokens, 2, 24).bfloat16(),
        k_TGK=torch.randn(num_tokens, 2, 24).bfloat16(),
        v_THV=torch.randn(num_tokens, 4, 40).bfloat16(),
        steps_TH=torch.randn(num_tokens, 4).bfloat16(),
        step_bias_H=torch.randn(4),
        rates_H=-torch.rand(4),
        beta_TH=torch.randn(num_tokens, 4).bfloat16(),
        key_eps=1e-6,
    )
    return inputs, torch.randn(9, 4, 24, 40)


def test_the_results_of_a_request_do_not_depend_on_other_requests():
    torch.manual_seed(0)
    sizes, blocks, num_tokens = (3, 1, 40, 1), (5, 2, 7, 4), 45
    x_TC, weight_CW = torch.randn(num_tokens, 72).bfloat16(), torch.randn(72, 4).bfloat16()
    conv_states = torch.randn(9, 3, 72).bfloat16()
    inputs, states = attention(num_tokens)

    def run(tokens, parts):
        own_conv, own_states = conv_states.clone(), states.clone()
        fields = ("q_TGK", "k_TGK", "v_THV", "steps_TH", "beta_TH")
        own = replace(inputs, **{name: getattr(inputs, name)[tokens] for name in fields})
        ops = NativeOps()
        return (
            ops.causal_conv(x_TC[tokens], weight_CW, None, own_conv, parts),
            ops.linear_attention(own, own_states, parts),
            own_conv,
            own_states,
        )

    together = run(slice(None), parts_of(sizes, blocks))
    start = 0
    for size, block in zip(sizes, blocks, strict=True):
        tokens = slice(start, start + size)
        alone = run(tokens, parts_of([size], [block]))
        assert torch.equal(alone[0], together[0][tokens])
        assert torch.equal(alone[1], together[1][tokens])
        assert torch.equal(alone[2][block], together[2][block])
        assert torch.equal(alone[3][block], together[3][block])
        start += size
    # Dividing a request into parts does not change its results.
    divided = replace(parts_of([10, 30], [7, 7]), num_parts=(2,), writes_N=torch.tensor([8, 7]))
    again = run(slice(4, 44), divided)
    assert torch.equal(again[1], together[1][4:44])
    assert torch.equal(again[3][7], together[3][7])


@at_every_level
@pytest.mark.parametrize("rule", [True, False], ids=["delta rule", "plain"])
def test_a_nan_in_the_gates_of_linear_attention_reaches_all_later_results(level, rule):
    torch.manual_seed(0)
    inputs, states = attention(45)
    inputs = replace(inputs, beta_TH=inputs.beta_TH if rule else None)
    parts = parts_of((3, 1, 40, 1), (5, 2, 7, 4))
    clean = NativeOps().linear_attention(inputs, states.clone(), parts)
    assert clean.isfinite().all()
    for name in ("steps_TH", "beta_TH") if rule else ("steps_TH",):
        changed = replace(inputs, **{name: getattr(inputs, name).clone()})
        getattr(changed, name)[10, 2] = torch.nan
        own = states.clone()
        result = NativeOps().linear_attention(changed, own, parts)
        assert result[10:44, 2].isnan().all() and own[7, 2].isnan().all(), name
        result[10:44, 2] = clean[10:44, 2]
        assert torch.equal(result, clean)


@pytest.mark.parametrize("change", ["float16", "strided channels", "wide kernel"])
def test_convolutions_that_the_kernel_does_not_support_use_torch(change):
    torch.manual_seed(0)
    dtype = torch.float16 if change == "float16" else torch.bfloat16
    width = 65 if change == "wide kernel" else 4
    x_TC = torch.randn(5, 24, dtype=dtype)
    if change == "strided channels":
        x_TC = torch.randn(24, 5, dtype=dtype).T
    weight_CW, states = torch.randn(24, width, dtype=dtype), torch.randn(3, width - 1, 24).to(dtype)
    parts, expected_states = parts_of([4, 1], [1, 2]), states.clone()
    expected = TorchOps().causal_conv(x_TC, weight_CW, None, expected_states, parts)
    assert torch.equal(NativeOps().causal_conv(x_TC, weight_CW, None, states, parts), expected)
    assert torch.equal(states, expected_states)


def recurrence(num_tokens, num_channels, dtype=torch.bfloat16):
    """Return random inputs, and states of nine blocks."""
    values = torch.randn(3, num_tokens, num_channels)
    inputs = GatedRecurrenceInputs(
        x_TC=values[0].to(dtype),
        input_gates_TC=values[1].to(dtype),
        decay_gates_TC=values[2].to(dtype),
        input_bias_C=torch.randn(num_channels),
        decay_bias_C=torch.randn(num_channels),
        rates_C=-0.3 * torch.rand(num_channels),
    )
    return inputs, torch.randn(9, num_channels)


def part_of(inputs, tokens):
    fields = ("x_TC", "input_gates_TC", "decay_gates_TC")
    return replace(inputs, **{name: getattr(inputs, name)[tokens] for name in fields})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_gated_recurrence_does_not_depend_on_other_requests_or_on_steps(dtype):
    torch.manual_seed(0)
    sizes, blocks = (3, 1, 40, 1), (5, 2, 7, 4)
    inputs, before = recurrence(sum(sizes), 72, dtype)
    weight_CW = torch.randn(72, 4).to(dtype)
    kept = torch.randn(9, 3, 72).to(dtype)

    def run(tokens, parts, states_BWC, states_BC):
        own, ops = part_of(inputs, tokens), NativeOps()
        out_TC = ops.plain_causal_conv(own.x_TC, weight_CW, None, states_BWC, parts)
        return torch.stack((out_TC, ops.gated_recurrence(own, states_BC, parts)))

    states_BWC, states_BC = kept.clone(), before.clone()
    together = run(slice(None), parts_of(sizes, blocks), states_BWC, states_BC)
    start = 0
    for size, block in zip(sizes, blocks, strict=True):
        own_BWC, own_BC = kept.clone(), before.clone()
        tokens = slice(start, start + size)
        alone = run(tokens, parts_of([size], [block]), own_BWC, own_BC)
        assert torch.equal(alone, together[:, tokens])
        assert torch.equal(own_BWC[block], states_BWC[block])
        assert torch.equal(own_BC[block], states_BC[block])
        start += size
    # Neither parts of a step nor several steps change the results of a request.
    own_BWC, own_BC = kept.clone(), before.clone()
    divided = replace(parts_of([10, 13], [7, 7]), num_parts=(2,), writes_N=torch.tensor([8, 7]))
    first = run(slice(4, 27), divided, own_BWC, own_BC)
    steps = [run(slice(t, t + 1), parts_of([1], [7]), own_BWC, own_BC) for t in range(27, 44)]
    assert torch.equal(torch.cat((first, *steps), dim=1), together[:, 4:44])
    assert torch.equal(own_BWC[7], states_BWC[7]) and torch.equal(own_BC[7], states_BC[7])


@at_every_level
def test_a_native_recurrence_is_precise_for_slow_decays_and_keeps_nan_in_its_request(level):
    torch.manual_seed(0)
    inputs, _ = recurrence(304, 5, torch.float32)
    rates_C = torch.tensor([-1e-7, -1e-3, -0.1, -20.0, -1e4])
    inputs = replace(inputs, rates_C=rates_C, decay_gates_TC=8 * inputs.decay_gates_TC)
    parts = replace(parts_of([3, 300, 1], [0, 1, 2]), reads_N=torch.full((3,), -1))
    expected, actual = (torch.zeros(3, 5) for _ in range(2))
    exact_TC = recur_gated(inputs, expected, parts)
    # For the slowest decay, 1 - a² in float32 would not have a single correct digit.
    result = NativeOps().gated_recurrence(inputs, actual, parts)
    assert torch.allclose(result.double(), exact_TC, rtol=1e-5, atol=1e-6)
    assert torch.allclose(actual, expected, rtol=1e-5, atol=1e-6)
    for name in ("x_TC", "input_gates_TC", "decay_gates_TC"):
        changed = replace(inputs, **{name: getattr(inputs, name).clone()})
        getattr(changed, name)[1] = torch.nan
        result = NativeOps().gated_recurrence(changed, actual, parts)
        assert result.isnan().any(-1).tolist() == [False, True, True, *[False] * 301], name


@pytest.mark.parametrize("change", ["float16", "strided channels", "float64 rates"])
def test_recurrences_that_the_kernel_does_not_support_use_torch(change):
    torch.manual_seed(0)
    inputs, before = recurrence(5, 24, torch.float16 if change == "float16" else torch.bfloat16)
    if change == "strided channels":
        inputs = replace(inputs, input_gates_TC=inputs.input_gates_TC.T.contiguous().T)
    if change == "float64 rates":
        inputs = replace(inputs, rates_C=inputs.rates_C.double())
    parts, expected_states = parts_of([4, 1], [1, 2]), before.clone()
    expected = TorchOps().gated_recurrence(inputs, expected_states, parts)
    assert torch.equal(NativeOps().gated_recurrence(inputs, before, parts), expected)
    assert torch.equal(before, expected_states)


@pytest.mark.parametrize("field", ["input_gates_TC", "decay_bias_C", "rates_C"])
def test_tensors_of_different_sizes_do_not_reach_the_kernel(field):
    """The kernel would read memory behind the smaller tensor."""
    inputs, before = recurrence(5, 24)
    changed = replace(inputs, **{field: getattr(inputs, field)[..., :20]})
    with pytest.raises(RuntimeError, match=r"\(24\).*\(20\)|\(20\).*\(24\)"):
        NativeOps().gated_recurrence(changed, before, parts_of([5], [1]))


@pytest.mark.parametrize("field", ["steps_TH", "step_bias_H", "rates_H", "beta_TH"])
def test_attention_inputs_of_different_sizes_do_not_reach_the_kernel(field):
    inputs, states = attention(5)
    changed = replace(inputs, **{field: getattr(inputs, field)[..., :3]})
    with pytest.raises(RuntimeError, match=r"\(4\).*\(3\)|\(3\).*\(4\)"):
        NativeOps().linear_attention(changed, states, parts_of([5], [1]))


def test_a_bias_of_another_size_does_not_reach_the_convolution():
    x_TC, weight_CW = torch.randn(5, 24).bfloat16(), torch.randn(24, 4).bfloat16()
    states, bias_C = torch.zeros(3, 3, 24).bfloat16(), torch.randn(20).bfloat16()
    with pytest.raises(RuntimeError, match=r"\(24\).*\(20\)|\(20\).*\(24\)"):
        NativeOps().causal_conv(x_TC, weight_CW, bias_C, states, parts_of([5], [1]))


def test_attention_factors_of_a_different_dtype_use_torch():
    torch.manual_seed(0)
    inputs, states = attention(5)
    inputs = replace(inputs, step_bias_H=inputs.step_bias_H.double())
    parts, own = parts_of([4, 1], [1, 2]), states.clone()
    expected = TorchOps().linear_attention(inputs, own, parts)
    assert torch.equal(NativeOps().linear_attention(inputs, states, parts), expected)
    assert torch.equal(states, own)
