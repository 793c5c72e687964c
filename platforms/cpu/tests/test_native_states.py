"""Native recurrent operations: contract suite at every level, batch invariance and layouts."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

import dovetail_cpu_kernels as native
from dovetail.interfaces.ops import LinearAttentionInputs, StateParts, StatePartsMemory
from dovetail_cpu.native_library import probe_fast
from dovetail_cpu.native_ops import NativeOps
from dovetail_cpu_kernels.library import LEVELS
from dovetail_devkit.case import run_all
from dovetail_devkit.ops.latent_and_gates import latent_and_gate_cases
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
    assert len(cases) == 38
    run_all(cases)


@at_every_level
def test_latent_attention_gates_and_shared_experts_meet_their_contract(level):
    cases = list(latent_and_gate_cases(NativeOps, HOST, dtypes=["bfloat16"]))
    assert len(cases) == 6
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


def test_the_results_of_a_request_do_not_depend_on_other_requests():
    torch.manual_seed(0)
    sizes, blocks, num_tokens = (3, 1, 40, 1), (5, 2, 7, 4), 45
    x_TC, weight_CW = torch.randn(num_tokens, 72).bfloat16(), torch.randn(72, 4).bfloat16()
    conv_states = torch.randn(9, 3, 72).bfloat16()
    states = torch.randn(9, 4, 24, 40)
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


@pytest.mark.parametrize("change", ["float32", "strided channels", "wide kernel"])
def test_convolutions_that_the_kernel_does_not_support_use_torch(change):
    torch.manual_seed(0)
    dtype = torch.float32 if change == "float32" else torch.bfloat16
    width = 65 if change == "wide kernel" else 4
    x_TC = torch.randn(5, 24, dtype=dtype)
    if change == "strided channels":
        x_TC = torch.randn(24, 5, dtype=dtype).T
    weight_CW, states = torch.randn(24, width, dtype=dtype), torch.randn(3, width - 1, 24).to(dtype)
    parts, expected_states = parts_of([4, 1], [1, 2]), states.clone()
    expected = TorchOps().causal_conv(x_TC, weight_CW, None, expected_states, parts)
    assert torch.equal(NativeOps().causal_conv(x_TC, weight_CW, None, states, parts), expected)
    assert torch.equal(states, expected_states)
