"""Native experts at every level of this CPU: bitwise equal to single packed linears."""

import ctypes

import pytest
import torch

import dovetail_cpu_kernels as native
from dovetail_cpu_kernels import linear
from dovetail_cpu_kernels.experts import ExpertsArgs, SelectExpertsArgs
from dovetail_cpu_kernels.ops import op

pytestmark = [
    pytest.mark.skipif(not native.status().available, reason=native.status().reason),
    pytest.mark.usefixtures("restored"),
]

KINDS = {"bf16": (linear.BF16, 0), "int8": (linear.INT8, 0), "int4": (linear.INT4, 32)}
NUM_EXPERTS, SIZE, INNER = 7, 80, 48


def random_values(*size, seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*size, generator=generator) * scale).bfloat16()


class Stack:
    """Packed random weights of all experts [E, N, K], with biases [E, N]."""

    def __init__(self, kind, N, K, *, gate_up, seed):
        self.shape = linear.PackedLinear(kind=kind[0], group=kind[1], N=N, K=K, gate_up=gate_up)
        self.bias = random_values(NUM_EXPERTS, N, seed=seed + 1)
        self.memory = torch.zeros(NUM_EXPERTS * self.shape.num_bytes + 64, dtype=torch.uint8)
        self.packed = -(-self.memory.data_ptr() // 64) * 64
        for expert in range(NUM_EXPERTS):
            weight = random_values(N, K, seed=seed + 2 + expert, scale=K**-0.5)
            assert linear.pack(self.shape, weight.data_ptr(), self.address(expert)) == 0

    def address(self, expert):
        return self.packed + expert * self.shape.num_bytes

    def apply(self, expert, x, *, dtype, limit=0.0, alpha=0.0):
        y = torch.empty(len(x), self.shape.num_outputs, dtype=dtype)
        args = linear.new_args(self.shape, self.address(expert))
        args.x, args.y, args.M = x.data_ptr(), y.data_ptr(), len(x)
        args.bias = self.bias[expert].data_ptr()
        args.limit, args.alpha = limit, alpha
        args.flags |= linear.OUT_F32 * (dtype == torch.float32)
        linear.operation(self.shape.kind)(ctypes.addressof(args))
        return y


def compute(stacks, x, experts, weights, *, limit=0.0, alpha=0.0):
    gate_up, down = stacks
    y = torch.full((len(x), SIZE + 3), 7.0).bfloat16()
    args = ExpertsArgs(gate_up=gate_up.packed, down=down.packed, num_experts=NUM_EXPERTS)
    args.x, args.experts, args.weights = x.data_ptr(), experts.data_ptr(), weights.data_ptr()
    args.gate_up_bias, args.down_bias = gate_up.bias.data_ptr(), down.bias.data_ptr()
    args.num_tokens, args.top_k = experts.shape
    args.y, args.size, args.inner = y.data_ptr(), SIZE, INNER
    args.x_stride, args.y_stride = x.stride(0), y.stride(0)
    args.gate_up_kind = args.down_kind = gate_up.shape.kind
    args.gate_up_group = args.down_group = gate_up.shape.group
    args.limit, args.alpha = limit, alpha
    op("experts")(ctypes.addressof(args))
    assert (y[:, SIZE:] == 7.0).all()
    return y[:, :SIZE]


def sum_of_single_tokens(stacks, x, experts, weights, **activation):
    """Compute each token and expert alone and add the outputs in the order of the experts."""
    gate_up, down = stacks
    sums = torch.zeros(len(x), SIZE)
    for token, row in enumerate(x):
        for place in experts[token].argsort().tolist():
            expert = int(experts[token, place])
            inner = gate_up.apply(expert, row[None], dtype=torch.bfloat16, **activation)
            sums[token] += weights[token, place] * down.apply(expert, inner, dtype=torch.float32)[0]
    return sums.bfloat16()


@pytest.mark.parametrize("name", KINDS)
def test_the_expert_output_of_a_token_equals_the_sum_of_single_linear_layers(level, name):
    stacks = (
        Stack(KINDS[name], 2 * INNER, SIZE, gate_up=True, seed=0),
        Stack(KINDS[name], SIZE, INNER, gate_up=False, seed=50),
    )
    # 1,221 rows need two waves, and one expert gets most of them.
    x = random_values(407, SIZE + 5, seed=1)[:, 2 : SIZE + 2]
    generator = torch.Generator().manual_seed(2)
    share = torch.tensor([0.1, 8.0, 0.0, 1.0, 1.0, 1.0, 0.1])
    experts = share.expand(len(x), -1).multinomial(3, generator=generator)
    weights = torch.rand(experts.shape, generator=generator)
    want = sum_of_single_tokens(stacks, x[:40], experts, weights)
    for num_tokens in (1, 2, 40, 407):
        for threads in (1, 2):
            native.set_num_threads(threads)
            got = compute(stacks, x[:num_tokens], experts[:num_tokens], weights[:num_tokens])
            assert torch.equal(got[:40], want[:num_tokens])


def test_the_activation_with_a_limit_equals_that_of_gpt_oss(level):
    stacks = (
        Stack(KINDS["bf16"], 2 * INNER, SIZE, gate_up=True, seed=0),
        Stack(KINDS["bf16"], SIZE, INNER, gate_up=False, seed=50),
    )
    x, experts, weights = random_values(5, SIZE, seed=1), torch.tensor([[3]] * 5), torch.ones(5, 1)
    activation = {"limit": 0.75, "alpha": 1.702}
    got = compute(stacks, x, experts, weights, **activation)
    assert torch.equal(got, sum_of_single_tokens(stacks, x, experts, weights, **activation))
    weight = random_values(2 * INNER, SIZE, seed=2 + 3, scale=SIZE**-0.5)
    gate, up = (x.double() @ weight.double().T + stacks[0].bias[3].double()).chunk(2, dim=1)
    gate, up = gate.clamp(max=0.75), up.clamp(-0.75, 0.75)
    want = gate * torch.sigmoid(1.702 * gate) * (up + 1)
    inner = stacks[0].apply(3, x, dtype=torch.float32, **activation)
    torch.testing.assert_close(inner.double(), want, rtol=1e-5, atol=1e-5)


def test_a_token_with_nan_inputs_has_nan_outputs_and_does_not_change_other_tokens(level):
    stacks = (
        Stack(KINDS["int8"], 2 * INNER, SIZE, gate_up=True, seed=0),
        Stack(KINDS["int8"], SIZE, INNER, gate_up=False, seed=50),
    )
    x, weights = random_values(6, SIZE, seed=1), torch.full((6, 2), 0.5)
    experts = torch.tensor([[1, 4]] * 6)
    want = compute(stacks, x, experts, weights)
    x[2, 7] = torch.nan
    for activation in ({}, {"limit": 1.0, "alpha": 1.702}):
        got = compute(stacks, x, experts, weights, **activation)
        assert got[2].isnan().all()
        assert activation or torch.equal(got[[0, 1, 3, 4, 5]], want[[0, 1, 3, 4, 5]])


def route(x, weight, top_k, *, correction=None, **fields):
    experts = torch.full((len(x), top_k), -1)
    weights = torch.empty(len(x), top_k)
    args = SelectExpertsArgs(num_groups=1, top_groups=1, scale=1.0, top_k=top_k, **fields)
    args.x, args.weight = x.data_ptr(), weight.data_ptr()
    args.experts, args.weights = experts.data_ptr(), weights.data_ptr()
    args.correction = None if correction is None else correction.data_ptr()
    args.num_tokens, args.size = x.shape
    args.num_experts = len(weight)
    args.x_stride, args.weight_stride = x.stride(0), weight.stride(0)
    op("select_experts")(ctypes.addressof(args))
    return experts, weights


def test_the_experts_of_a_token_do_not_depend_on_the_batch(level):
    x, weight = random_values(73, 135, seed=1), random_values(50, 135, seed=2, scale=0.1)
    native.set_num_threads(2)
    experts, weights = route(x, weight, 6, renormalize=1)
    for token in range(len(x)):
        alone = route(x[token : token + 1], weight, 6, renormalize=1)
        assert torch.equal(experts[token], alone[0][0])
        assert torch.equal(weights[token], alone[1][0])
    scores = (x.double() @ weight.double().T).softmax(-1)
    want, best = scores.topk(6)
    assert torch.equal(experts, best)
    torch.testing.assert_close(
        weights.double(), want / want.sum(1, keepdim=True), rtol=1e-5, atol=0
    )


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_a_token_with_nonfinite_values_gets_valid_and_distinct_experts(level, broken):
    x, weight = random_values(9, 40, seed=1), random_values(10, 40, seed=2)
    want, _ = route(x, weight, 4)
    x[5, 3] = broken
    for fields in ({}, {"sigmoid": 1}):
        experts, _ = route(x, weight, 4, **fields)
        assert all(0 <= e < 10 for e in experts[5].tolist()) and len(set(experts[5].tolist())) == 4
        assert torch.equal(experts[:5], want[:5])


def test_experts_with_equal_scores_are_ordered_by_index(level):
    x, weight = random_values(3, 40, seed=1), torch.zeros(9, 40).bfloat16()
    correction = torch.zeros(9)
    correction[6] = 1.0
    experts, weights = route(x, weight, 3, correction=correction)
    assert experts.tolist() == [[6, 0, 1]] * 3
    torch.testing.assert_close(weights, torch.full((3, 3), 1 / 9))
