"""Tensors of other dtypes, sizes and layouts do not reach the native kernels.

The kernels do not check their arguments: they would read or write memory behind such a tensor. An
operation uses torch instead, which supports the tensors or raises an error.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from dovetail.interfaces import LinearShape
from dovetail.interfaces.linear_method import ExpertLayers
from dovetail.interfaces.ops import (
    ExpertRouting,
    GatedRecurrenceInputs,
    LatentWeights,
    LinearAttentionInputs,
    RouterWeights,
    StateParts,
)
from dovetail_cpu.native_library import probe_fast
from dovetail_cpu.native_ops import NativeOps, latent_and_gates, provider, states
from dovetail_torch.layers import TorchOps

pytestmark = pytest.mark.skipif(not probe_fast().usable, reason="native kernels are not usable")

HOST = torch.device("cpu")
T, D, H, S, P, E, V = 5, 24, 4, 16, 32, 6, 40


def numbers(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).bfloat16()


LATENT = LatentWeights(key_HNL=numbers(H, 8, 12), norm_L=numbers(12), eps=1e-6)
TABLE = torch.ones(P, S)
POSITIONS = torch.arange(T)
ROUTER = RouterWeights(weight_ED=numbers(E, D), bias_E=numbers(E), correction_E=torch.ones(E))
ROUTING = ExpertRouting(top_k=2)
X, ROW = numbers(T, D), numbers(D)
HEADS = numbers(T, H, S)
BLOCKS = torch.tensor([0, 1])
PARTS = StateParts(sizes=(2, 3), num_parts=(1, 1), reads_N=BLOCKS, writes_N=BLOCKS)
OTHER_PARTS = [
    replace(PARTS, sizes=(2, 4)),
    replace(PARTS, sizes=(5,)),
    replace(PARTS, reads_N=BLOCKS.int()),
    replace(PARTS, writes_N=BLOCKS[:1]),
]
ONES = torch.ones(D)
RECURRENCE = GatedRecurrenceInputs(
    x_TC=X, input_gates_TC=X, decay_gates_TC=X, input_bias_C=ONES, decay_bias_C=ONES, rates_C=-ONES
)
ATTENTION = LinearAttentionInputs(
    q_TGK=numbers(T, H, 8),
    k_TGK=numbers(T, H, 8),
    v_THV=HEADS,
    steps_TH=numbers(T, H),
    beta_TH=None,
    step_bias_H=torch.ones(H),
    rates_H=-torch.ones(H),
    skip_H=None,
    key_eps=0.0,
    step_limits=(0.0, 1.0),
)

# Operation: supported arguments, then each with one that the kernel does not support.
CASES = {
    "rms_norm": ((X, ROW, 1e-6), {1: [ROW[:-1], ROW.float(), numbers(D, 2)[:, 0]]}),
    "offset_rms_norm": ((HEADS, numbers(S), 1e-6), {1: [numbers(S - 1)]}),
    "add_rms_norm": ((X, X.clone(), ROW, 1e-6), {1: [X[:-1].clone()], 2: [ROW[:-1]]}),
    "add_offset_rms_norm": ((X, X.clone(), ROW, 1e-6), {1: [X[:, :-1].clone()], 2: [ROW.float()]}),
    "layer_norm": ((X, ROW, ROW, 1e-6), {1: [ROW[:-1]], 2: [ROW[:-1], ROW.float()]}),
    "add_layer_norm": ((X, X.clone(), ROW, None, 1e-6), {1: [X[:-1].clone()], 2: [ROW[:-1]]}),
    "rotary_embedding": (
        (HEADS, HEADS, POSITIONS, TABLE),
        {
            0: [HEADS[:-1]],
            1: [HEADS[..., :-2].contiguous()],
            2: [POSITIONS.int(), POSITIONS[:-1]],
            3: [TABLE.double(), TABLE.T.contiguous().T],
        },
    ),
    "silu_and_mul": ((X,), {0: [X[:, 1:]]}),
    "sigmoid_and_mul": ((X, X), {1: [X[:1], X[:, :1]]}),
    "gelu_tanh_and_mul": ((X, X), {1: [X[:1], X[:, :-1]]}),
    "scale": ((X.clone(), 2.0), {0: [X[:1].clone().expand(T, D)]}),
    "soft_cap": ((X.clone(), 2.0), {0: [X[:1].clone().expand(T, D)]}),
    "add_shared_expert": (
        (X.clone(), X, X, ROW),
        {1: [X[:1]], 2: [X[:, :-1]], 3: [ROW[:-1], ROW.float()]},
    ),
    "head_linear": ((HEADS, numbers(H, 8, S)), {1: [numbers(H - 1, 8, S), numbers(H, 8, S - 1)]}),
    "select_experts": (
        (X, ROUTER, ROUTING),
        {
            0: [X[:, :-1]],
            1: [replace(ROUTER, bias_E=ROUTER.bias_E[1:]), replace(ROUTER, bias_E=torch.ones(E))],
        },
    ),
    "embedding": ((torch.arange(T), numbers(V, D)), {0: [torch.arange(T).int()]}),
    "mask_tokens": (
        (torch.ones(T, V), torch.arange(2), torch.ones(2, V // 8, dtype=torch.uint8)),
        {
            1: [torch.arange(2).int(), torch.arange(3)],
            2: [torch.ones(2, V // 8 - 1, dtype=torch.uint8), torch.ones(2, V // 8).int()],
        },
    ),
    "latent_inputs": (
        (numbers(T, H, 8 + S), numbers(T, 12 + S), LATENT, POSITIONS, TABLE),
        {
            0: [numbers(T, H + 1, 8 + S)],
            1: [numbers(T - 1, 12 + S), numbers(T, 11 + S)],
            2: [replace(LATENT, norm_L=torch.ones(12))],
            3: [POSITIONS.int()],
            4: [TABLE.double()],
        },
    ),
    "causal_conv": (
        (X, numbers(D, 4), ROW, numbers(2, 3, D), PARTS),
        {3: [numbers(2, 2, D)], 4: OTHER_PARTS},
    ),
    "gated_recurrence": ((RECURRENCE, torch.zeros(2, D), PARTS), {2: OTHER_PARTS}),
    "linear_attention": ((ATTENTION, torch.zeros(2, H, 8, S), PARTS), {2: OTHER_PARTS}),
    "gated_rms_norm": (
        (torch.ones(T, 2, 8), numbers(T, 2, 8), numbers(2, 8), 1e-6),
        {1: [numbers(T, 2, 7), numbers(T - 1, 2, 8)], 2: [numbers(1, 8), numbers(7)]},
    ),
}
CHANGES = [
    pytest.param(name, index, changed, id=f"{name}-{index}-{number}")
    for name, (_, changes) in CASES.items()
    for index, options in changes.items()
    for number, changed in enumerate(options)
]


@pytest.fixture
def in_torch(monkeypatch):
    """Return the names of the operations that torch computes, without computing them."""
    names = []

    class Recorder:
        def __getattr__(self, name):
            return lambda *args, **kwargs: names.append(name)

    for module in (provider, latent_and_gates, states):
        monkeypatch.setattr(module, "_TORCH", Recorder())
    return names


def call(name, arguments):
    keywords = {"norm_first": True} if name == "gated_rms_norm" else {}
    return getattr(NativeOps(), name)(*arguments, **keywords)


@pytest.mark.parametrize("name", CASES)
def test_supported_arguments_reach_the_kernel(name, in_torch):
    arguments, _ = CASES[name]
    call(name, arguments)
    assert not in_torch


@pytest.mark.parametrize(("name", "index", "changed"), CHANGES)
def test_operations_on_other_arguments_use_torch(name, index, changed, in_torch):
    arguments, _ = CASES[name]
    call(name, (*arguments[:index], changed, *arguments[index + 1 :]))
    assert in_torch == [name]


def packed_layer(method, in_features, part_sizes, num_experts=1):
    layer = nn.Module()
    count = len(part_sizes) * num_experts
    shape = LinearShape(
        name="model.layers.3.mlp.fused",
        in_features=in_features,
        part_names=tuple(f"part_{number}" for number in range(count)),
        part_sizes=tuple(part_sizes) * num_experts,
        bias=False,
        dtype=torch.bfloat16,
        device=HOST,
        num_experts=num_experts,
    )
    method.create(layer, shape)
    with torch.no_grad():
        layer.weight.fill_(1.0)
    method.pack(layer)
    return layer


@torch.inference_mode()
@pytest.mark.parametrize("x_TI", [torch.ones(3, 64), torch.ones(3, 63).bfloat16()])
def test_linear_inputs_of_a_different_dtype_or_size_are_rejected(x_TI):
    from dovetail_cpu.native_linear import NativeLinearMethod

    method = NativeLinearMethod()
    layer = packed_layer(method, 64, (33,))
    assert method.apply(layer, torch.ones(3, 64).bfloat16()).tolist() == [[64.0] * 33] * 3
    with pytest.raises(ValueError, match=r"shape \[tokens, 64\], not (float32|bfloat16 \[3, 63)"):
        method.apply(layer, x_TI)


@torch.inference_mode()
@pytest.mark.parametrize("change", ["inputs", "int32", "bfloat16 weights", "one token", "layout"])
def test_expert_arguments_of_a_different_dtype_size_or_layout_are_rejected(change):
    from dovetail_cpu.native_linear import NativeLinearMethod

    method = NativeLinearMethod()
    layers = ExpertLayers(
        gate_up=packed_layer(method, 32, (16, 16), num_experts=3),
        down=packed_layer(method, 16, (32,), num_experts=3),
        ops=TorchOps(),
    )
    a = SimpleNamespace(x=torch.ones(4, 32).bfloat16(), weights=torch.ones(4, 2))
    a.experts = torch.arange(2).repeat(4, 1)
    assert method.apply_experts(layers, a.x, a.experts, a.weights).shape == (4, 32)
    if change == "inputs":
        a.x = a.x.float()
    elif change == "int32":
        a.experts = a.experts.int()
    elif change == "bfloat16 weights":
        a.weights = a.weights.bfloat16()
    elif change == "one token":
        a.experts, a.weights = a.experts[:1], a.weights[:1]
    else:
        a.experts = a.experts.T.contiguous().T
    with pytest.raises(ValueError, match=r"packed weights need|4 tokens must be contiguous"):
        method.apply_experts(layers, a.x, a.experts, a.weights)
