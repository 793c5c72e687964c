"""Triton's ops in the interpreter: cases that the conformance suite does not include."""

import pytest
import torch
import triton
import triton.language as tl

from dovetail.errors import ContractError
from dovetail.interfaces.ops import (
    ExpertRouting,
    ExpertWeights,
    GatedRecurrenceInputs,
    LatentWeights,
    LinearAttentionInputs,
    RouterWeights,
)
from dovetail_devkit.fakes.ops import FakeOps
from dovetail_devkit.ops.experts import expert_sums
from dovetail_devkit.ops.states import make_parts
from dovetail_ops_triton.kernels.functions import one_minus_exp, softplus
from dovetail_ops_triton.ops import TritonOps


@pytest.fixture
def ops():
    return TritonOps()


def normal(*shape, dtype=torch.float32, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def reference_norm(x, weight):
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()


@pytest.mark.parametrize(
    "x",
    [
        normal(2, 3, 2, 16),
        normal(16),
        normal(3, 16).T,
        normal(3, 8, 64)[:, 2:5, 16:32],
    ],
    ids=["four dimensions", "one dimension", "strided features", "heads of a product"],
)
def test_rows_may_have_any_strides(ops, x):
    weight = normal(x.shape[-1], seed=2)
    actual = ops.rms_norm(x, weight, 1e-6)
    assert actual.is_contiguous() and actual.shape == x.shape
    assert torch.allclose(actual.double(), reference_norm(x, weight), atol=1e-5)
    wide = torch.cat((x, x), dim=-1)
    gate = ops.silu_and_mul(wide)
    assert gate.is_contiguous()
    assert torch.allclose(gate, torch.nn.functional.silu(x) * x, atol=1e-5)


def test_the_residual_is_summed_in_place(ops):
    x, wide, weight = normal(5, 24), normal(5, 48, seed=3), normal(24, seed=4)
    residual, expected = wide[:, :24], wide[:, :24] + x
    normed, summed = ops.add_rms_norm(x, residual, weight, 1e-6)
    assert summed.data_ptr() == residual.data_ptr() and torch.equal(residual, expected)
    assert torch.allclose(normed.double(), reference_norm(expected, weight), atol=1e-5)


def test_all_heads_are_rotated_if_one_program_rotates_only_a_part_of_them(ops):
    q, k = normal(2, 20, 128), normal(2, 11, 128, seed=2)
    positions, cos_sin = torch.tensor([3, 1]), normal(5, 96, seed=3)
    actual = ops.rotary_embedding(q, k, positions, cos_sin)
    expected = FakeOps().rotary_embedding(q, k, positions, cos_sin)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(actual, expected, strict=True))


def test_empty_inputs_give_empty_outputs(ops):
    nothing, weight = torch.empty(0, 16), torch.ones(16)
    assert ops.rms_norm(nothing, weight, 1e-6).shape == (0, 16)
    assert ops.add_rms_norm(nothing, nothing.clone(), weight, 1e-6)[0].shape == (0, 16)
    assert ops.silu_and_mul(nothing).shape == (0, 8)
    assert ops.layer_norm(nothing, weight, None, 1e-6).shape == (0, 16)
    assert ops.add_layer_norm(nothing, nothing.clone(), weight, weight, 1e-6)[0].shape == (0, 16)
    router, routing = RouterWeights(weight_ED=torch.ones(4, 16)), ExpertRouting(top_k=2)
    experts, weights = ops.select_experts(nothing, router, routing)
    assert (experts.shape, weights.shape) == ((0, 2), (0, 2))
    layer = ExpertWeights(gate_up_EGD=torch.ones(4, 6, 16), down_EDI=torch.ones(4, 16, 3))
    assert ops.fused_experts(nothing, experts, weights, layer).shape == (0, 16)
    assert ops.offset_rms_norm(nothing, weight, 1e-6).shape == (0, 16)
    assert ops.sigmoid_and_mul(nothing, nothing).shape == (0, 16)
    assert ops.gelu_tanh_and_mul(nothing, nothing).shape == (0, 16)
    assert ops.scale(nothing, 2.0).shape == ops.soft_cap(nothing, 2.0).shape == (0, 16)
    assert ops.add_shared_expert(nothing, nothing, nothing, weight).shape == (0, 16)
    heads = nothing.unflatten(1, (2, 8))
    assert ops.gated_rms_norm(heads, heads, weight[:8], 1e-6, norm_first=True).shape == (0, 2, 8)
    assert ops.head_linear(heads, torch.ones(2, 5, 8)).shape == (0, 2, 5)
    ids = torch.empty(0, dtype=torch.int64)
    projections = LatentWeights(norm_L=weight[:6], eps=1e-6, key_HNL=torch.ones(2, 4, 6))
    queries, keys = ops.latent_inputs(heads, nothing[:, :10], projections, ids, torch.ones(9, 4))
    assert (queries.shape, keys.shape) == ((0, 2, 10), (0, 1, 10))
    assert ops.embedding(ids, torch.ones(3, 16)).shape == (0, 16)
    assert ops.best_tokens(nothing).shape == (0,)
    q, k = ops.rotary_embedding(
        torch.empty(0, 4, 16), torch.empty(0, 2, 16), ids, torch.ones(9, 16)
    )
    assert (q.shape, k.shape) == ((0, 4, 16), (0, 2, 16))


def test_an_unsupported_dtype_is_rejected_with_advice(ops):
    wide = torch.ones(2, 16, dtype=torch.float64)
    weight = torch.ones(16, dtype=torch.float64)
    calls = [
        lambda: ops.rms_norm(wide, weight, 1e-6),
        lambda: ops.silu_and_mul(wide),
        lambda: ops.best_tokens(wide),
        lambda: ops.layer_norm(wide, None, None, 1e-6),
        lambda: ops.select_experts(wide, RouterWeights(weight_ED=wide), ExpertRouting(top_k=1)),
    ]
    for call in calls:
        with pytest.raises(ContractError, match=r"torch\.float64.*torch\.bfloat16.*'torch'"):
            call()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_the_results_of_a_row_do_not_depend_on_other_rows(ops, dtype):
    x, residual = normal(9, 96, dtype=dtype), normal(9, 96, dtype=dtype, seed=5)
    weight = normal(96, dtype=dtype, seed=6)
    alone = slice(4, 5)
    assert torch.equal(ops.rms_norm(x, weight, 1e-6)[alone], ops.rms_norm(x[alone], weight, 1e-6))
    assert torch.equal(ops.silu_and_mul(x)[alone], ops.silu_and_mul(x[alone]))
    bias = normal(96, dtype=dtype, seed=7)
    layer_norm = ops.layer_norm(x, weight, bias, 1e-6)
    assert torch.equal(layer_norm[alone], ops.layer_norm(x[alone], weight, bias, 1e-6))
    together = ops.add_layer_norm(x, residual.clone(), weight, bias, 1e-6)[0]
    by_itself = ops.add_layer_norm(x[alone], residual[alone].clone(), weight, bias, 1e-6)[0]
    assert torch.equal(together[alone], by_itself)
    norm = ops.offset_rms_norm(x, weight, 1e-6)
    assert torch.equal(norm[alone], ops.offset_rms_norm(x[alone], weight, 1e-6))
    gated = ops.sigmoid_and_mul(x, residual)
    assert torch.equal(gated[alone], ops.sigmoid_and_mul(x[alone], residual[alone]))
    gated = ops.gelu_tanh_and_mul(x, residual)
    assert torch.equal(gated[alone], ops.gelu_tanh_and_mul(x[alone], residual[alone]))
    assert torch.equal(ops.soft_cap(x, 3.0)[alone], ops.soft_cap(x[alone], 3.0))
    shared = ops.add_shared_expert(x, residual, x, weight)
    by_itself = ops.add_shared_expert(x[alone], residual[alone], x[alone], weight)
    assert torch.equal(shared[alone], by_itself)
    groups, gates = x.float().unflatten(1, (4, 24)), residual.unflatten(1, (4, 24))
    gated = ops.gated_rms_norm(groups, gates, weight[:24], 1e-6, norm_first=False)
    by_itself = ops.gated_rms_norm(groups[alone], gates[alone], weight[:24], 1e-6, norm_first=False)
    assert torch.equal(gated[alone], by_itself)
    router, routing = RouterWeights(weight_ED=normal(20, 96, dtype=dtype)), ExpertRouting(top_k=3)
    many, one = (ops.select_experts(rows, router, routing) for rows in (x, x[alone]))
    assert all(torch.equal(a[alone], b) for a, b in zip(many, one, strict=True))
    together = ops.add_rms_norm(x, residual.clone(), weight, 1e-6)[0]
    by_itself = ops.add_rms_norm(x[alone], residual[alone].clone(), weight, 1e-6)[0]
    assert torch.equal(together[alone], by_itself)


def test_latent_inputs_do_not_depend_on_other_tokens(ops):
    """The last token is computed by a second program of the same head."""
    q, latent = normal(66, 2, 24, dtype=torch.float16), normal(66, 28, dtype=torch.float16, seed=2)
    weights = LatentWeights(
        norm_L=normal(20, dtype=torch.float16, seed=3),
        eps=1e-6,
        key_HNL=normal(2, 16, 20, dtype=torch.float16, seed=4),
    )
    positions, table = torch.arange(66), normal(66, 8, seed=5)
    together = ops.latent_inputs(q, latent, weights, positions, table)
    alone = ops.latent_inputs(q[65:], latent[65:], weights, positions[65:], table)
    expected = FakeOps().latent_inputs(q, latent, weights, positions, table)
    for actual, own, exact in zip(together, alone, expected, strict=True):
        assert torch.equal(actual[65:], own)
        assert torch.allclose(actual, exact, atol=1e-2, rtol=1e-2)


@triton.jit
def softplus_kernel(x_ptr, y_ptr, SIZE: tl.constexpr):
    lanes = tl.arange(0, SIZE)
    tl.store(y_ptr + lanes, softplus(tl.load(x_ptr + lanes)))


def test_small_step_sizes_have_a_small_relative_error():
    x = torch.linspace(-40, 40, 1024)
    actual = torch.zeros(1024)
    softplus_kernel[(1,)](x, actual, SIZE=1024)
    assert torch.allclose(actual.double(), x.double().exp().log1p(), rtol=1e-6, atol=0)


@triton.jit
def one_minus_exp_kernel(x_ptr, y_ptr, SIZE: tl.constexpr):
    lanes = tl.arange(0, SIZE)
    tl.store(y_ptr + lanes, one_minus_exp(tl.load(x_ptr + lanes)))


def test_the_difference_of_one_and_a_slow_decay_has_a_small_relative_error():
    x = -torch.logspace(-30, 3, 1024)
    actual = torch.zeros(1024)
    one_minus_exp_kernel[(1,)](x, actual, SIZE=1024)
    assert torch.allclose(actual.double(), -x.double().expm1(), rtol=1e-6, atol=0)


def test_weak_decays_after_a_strong_one_are_accurate(ops):
    """Differences of sums from the start of the chunk would have errors of several percent."""
    steps = torch.full((12, 1), -5.0)
    steps[2] = 1e6
    inputs = LinearAttentionInputs(
        q_TGK=normal(12, 1, 16),
        k_TGK=normal(12, 1, 16, seed=2),
        v_THV=normal(12, 1, 16, seed=3),
        steps_TH=steps,
        step_bias_H=torch.zeros(1),
        rates_H=-torch.ones(1),
        beta_TH=normal(12, 1, seed=4),
        key_eps=1e-6,
    )
    parts, num_blocks = make_parts([(12,)], torch.device("cpu"))
    own_states, states = (torch.zeros(num_blocks, 1, 16, 16) for _ in range(2))
    actual = ops.linear_attention(inputs, own_states, parts)
    expected = FakeOps().linear_attention(inputs, states, parts)
    assert torch.allclose(actual, expected, atol=2e-6)
    assert torch.allclose(own_states[parts.writes_N], states[parts.writes_N], atol=2e-6)


def recurrence(num_channels, tokens=slice(0, 3)):
    """Return inputs of these tokens of a gated recurrence; the tokens are among the first 26."""
    return GatedRecurrenceInputs(
        x_TC=normal(26, num_channels)[tokens],
        input_gates_TC=normal(26, num_channels, seed=2)[tokens],
        decay_gates_TC=normal(26, num_channels, seed=3)[tokens],
        input_bias_C=normal(num_channels, seed=4),
        decay_bias_C=normal(num_channels, seed=5),
        rates_C=-normal(num_channels, seed=6).abs(),
    )


def test_a_divided_prompt_has_the_same_gated_recurrence(ops):
    """The last two tokens are decodes. A NaN is only in the results of its own channel."""

    def run(*steps):
        states, results, start = torch.zeros(2, 70), [], 0
        for number, size in enumerate(steps):
            parts, _ = make_parts([(size,)], torch.device("cpu"))
            parts.reads_N.fill_(1 if number else -1)
            parts.writes_N.fill_(1)
            inputs = recurrence(70, slice(start, start + size))
            inputs.x_TC[:, 66] = torch.nan
            results.append(ops.gated_recurrence(inputs, states, parts))
            start += size
        return torch.cat((*results, states[1:]))

    together = run(26)
    assert together.isnan().any(0).nonzero().tolist() == [[66]]
    assert torch.equal(run(9, 15, 1, 1).nan_to_num(), together.nan_to_num())


def test_repeated_calls_do_not_use_the_slow_host_functions_of_triton(ops, monkeypatch):
    """`triton.cdiv` and `triton.next_power_of_2` take about 2 µs each, in every layer."""
    x, weight, ids = normal(3, 16), normal(16, seed=2), torch.tensor([1, 0, 2])
    heads, router = x.unflatten(1, (2, 8)), RouterWeights(weight_ED=normal(4, 16))
    layer = ExpertWeights(gate_up_EGD=normal(4, 6, 16), down_EDI=normal(4, 16, 3))
    experts = ops.select_experts(x, router, ExpertRouting(top_k=2))
    latent = LatentWeights(norm_L=weight[:6], eps=1e-6, key_HNL=normal(2, 4, 6))
    inputs = LinearAttentionInputs(
        q_TGK=heads,
        k_TGK=heads,
        v_THV=heads,
        steps_TH=normal(3, 2),
        step_bias_H=normal(2),
        rates_H=-normal(2).abs(),
    )
    parts, num_blocks = make_parts([(1,), (2,)], torch.device("cpu"))
    calls = (
        lambda: ops.add_rms_norm(x, x.clone(), weight, 1e-6),
        lambda: ops.layer_norm(x, weight, None, 1e-6),
        lambda: ops.rotary_embedding(heads, heads, ids, normal(3, 8)),
        lambda: ops.silu_and_mul(x),
        lambda: ops.sigmoid_and_mul(x, x),
        lambda: ops.gelu_tanh_and_mul(x, x),
        lambda: ops.soft_cap(ops.scale(x, 2.0), 3.0),
        lambda: ops.gated_rms_norm(heads, heads, weight[:8], 1e-6, norm_first=True),
        lambda: ops.add_shared_expert(x, x, x, weight),
        lambda: ops.latent_inputs(heads, x[:, :10], latent, ids, normal(3, 4)),
        lambda: ops.select_experts(x, router, ExpertRouting(top_k=2)),
        lambda: ops.fused_experts(x, *experts, layer),
        lambda: ops.causal_conv(x, normal(16, 4), None, torch.zeros(num_blocks, 3, 16), parts),
        lambda: ops.linear_attention(inputs, torch.zeros(num_blocks, 2, 8, 8), parts),
        lambda: ops.gated_recurrence(recurrence(16), torch.zeros(num_blocks, 16), parts),
    )
    for call in calls:
        call()
    for name in ("cdiv", "next_power_of_2"):
        monkeypatch.delattr(triton, name)
    for call in calls:
        call()


def test_a_token_with_nan_logits_gets_distinct_valid_experts(ops):
    x = normal(3, 32)
    x[1] = torch.nan
    routing = ExpertRouting(top_k=4, num_groups=4, top_groups=2)
    experts, weights = ops.select_experts(x, RouterWeights(weight_ED=normal(12, 32)), routing)
    assert all(len({*row}) == 4 and min(row) >= 0 and max(row) < 12 for row in experts.tolist())
    assert weights[1].isnan().all() and weights[[0, 2]].isfinite().all()


def test_the_first_of_equal_experts_is_selected(ops):
    router = RouterWeights(weight_ED=torch.zeros(40, 16))
    experts, weights = ops.select_experts(normal(2, 16), router, ExpertRouting(top_k=3))
    assert experts.tolist() == [[0, 1, 2]] * 2
    assert torch.allclose(weights, torch.full((2, 3), 1 / 40))


@pytest.mark.parametrize("num_tokens", [3, 90])
def test_experts_with_many_tokens_have_several_tiles(ops, num_tokens):
    """All tokens use the last expert and the first one, and the sort needs several blocks."""
    x, generator = normal(num_tokens, 24, dtype=torch.float16), torch.Generator().manual_seed(1)
    layer = ExpertWeights(
        gate_up_EGD=normal(40, 20, 24, dtype=torch.float16) / 4,
        down_EDI=normal(40, 24, 10, dtype=torch.float16) / 4,
    )
    middle = torch.rand(num_tokens, 38, generator=generator).argsort(-1)[:, :14] + 1
    ends = torch.tensor([[39, 0]]).expand(num_tokens, -1)
    experts = torch.cat((ends, middle), dim=1)
    weights = torch.rand(experts.shape, generator=generator)
    actual = ops.fused_experts(x, experts, weights, layer)
    expected = expert_sums(x, experts, weights, layer)
    assert torch.allclose(actual.double(), expected, atol=2e-2)


@pytest.mark.parametrize(
    "name", ["causal_conv", "plain_causal_conv", "linear_attention", "gated_recurrence"]
)
def test_states_and_results_of_a_request_do_not_depend_on_other_requests(ops, name):
    def run(requests, tokens):
        """Return results and states. Requests without a block of their own begin with zeros."""
        parts, num_blocks = make_parts(requests, torch.device("cpu"))
        parts.reads_N.clamp_(max=-1)
        if name.endswith("causal_conv"):
            states, x = torch.zeros(num_blocks, 3, 20), normal(26, 20)[tokens]
            out = getattr(ops, name)(x, normal(20, 4), None, states, parts)
        elif name == "gated_recurrence":
            states = torch.zeros(num_blocks, 20)
            out = ops.gated_recurrence(recurrence(20, tokens), states, parts)
        else:
            states = torch.zeros(num_blocks, 2, 16, 8)
            inputs = LinearAttentionInputs(
                q_TGK=normal(26, 1, 16)[tokens] / 4,
                k_TGK=normal(26, 1, 16, seed=2)[tokens] / 4,
                v_THV=normal(26, 2, 8, seed=3)[tokens],
                steps_TH=normal(26, 2, seed=4)[tokens],
                step_bias_H=normal(2, seed=6),
                rates_H=-normal(2, seed=7).abs(),
                beta_TH=normal(26, 2, seed=5)[tokens],
                key_eps=1e-6,
            )
            out = ops.linear_attention(inputs, states, parts)
        return out, states[parts.writes_N]

    requests = [(20,), (1,), (5,)]
    together, states = run(requests, slice(0, 26))
    start = 0
    for index, request in enumerate(requests):
        tokens = slice(start, start + sum(request))
        alone, own = run([request], tokens)
        assert torch.equal(together[tokens], alone) and torch.equal(states[index], own[0])
        start = tokens.stop
