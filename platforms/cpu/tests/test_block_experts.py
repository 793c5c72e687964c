"""The `gguf` linear method with the experts of a layer in quantized blocks."""

import pytest
import torch
from torch import nn

from dovetail.interfaces import LinearShape
from dovetail.interfaces.linear_method import ExpertLayers
from dovetail_cpu.native_library import probe_any
from dovetail_torch.layers import BlockWeight, TorchOps
from dovetail_torch.layers.expert_groups import activate

pytestmark = pytest.mark.skipif(not probe_any().usable, reason="native kernels are not available")


def q8_blocks(weight_OI):
    """Return the bytes of Q8_0 blocks, and their values."""
    groups = weight_OI.float().unflatten(1, (-1, 32))
    scales = (groups.abs().amax(-1, keepdim=True) / 127).half()
    codes = (groups / scales.float()).round().clamp(-127, 127).to(torch.int8)
    rows_OB = torch.cat((scales.view(torch.uint8), codes.view(torch.uint8)), -1).flatten(1)
    return rows_OB, (codes * scales.float()).flatten(1)


def q8_experts(method, in_features, parts, seed, is_block):
    """Return the packed layer of three experts, and its values [E, O, I].

    is_block(n): whether part n is provided as blocks; other parts are bfloat16.
    """
    names = tuple(f"{expert}.{part}_proj" for expert in range(3) for part in parts)
    layer = nn.Module()
    layer.shape = LinearShape(
        name="model.layers.3.mlp.experts.fused",
        in_features=in_features,
        part_names=names,
        part_sizes=(64,) * len(names),
        bias=True,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        num_experts=3,
    )
    method.create(layer, layer.shape)
    generator = torch.Generator().manual_seed(seed)
    shape = (64 * len(names), in_features)
    rows_OB, values_OI = q8_blocks(torch.randn(shape, generator=generator) * in_features**-0.5)
    layer.expected_blocks = {n: "Q8_0" for n in range(len(names)) if is_block(n)}
    layer.blocks = {
        n: BlockWeight(type_name="Q8_0", rows_OB=rows_OB.split(64)[n], is_mapped=False)
        for n in layer.expected_blocks
    }
    with torch.no_grad():
        layer.weight.copy_(values_OI)
        layer.bias.copy_(torch.randn(layer.bias.shape, generator=generator))
    bias_EO = layer.bias.detach().double().unflatten(0, (3, -1))
    method.pack(layer)
    return layer, values_OI.double().unflatten(0, (3, -1)), bias_EO


@torch.inference_mode()
@pytest.mark.parametrize("limit", [0.0, 0.9])
@pytest.mark.parametrize(
    "is_block",
    [lambda _: True, lambda _: False, lambda n: n != 3, lambda n: n in (2, 3)],
    ids=["blocks", "bfloat16", "one part in bfloat16", "one expert in blocks"],
)
def test_experts_of_one_block_type_run_in_one_call_and_mixed_types_run_separately(is_block, limit):
    from dovetail_cpu.linear_kernel import ExpertKernel
    from dovetail_cpu.quantized_linear import GGUFLinearMethod

    method = GGUFLinearMethod()
    gate_up, first_EOI, first_EO = q8_experts(method, 64, ("gate", "up"), 1, is_block)
    down, second_EOI, second_EO = q8_experts(method, 64, ("down",), 2, is_block)
    x_TD = torch.randn(9, 64, generator=torch.Generator().manual_seed(3)).bfloat16()
    experts_TK = torch.tensor([[0, 2], [1, 0], [2, 1]] * 3)
    weights_TK = torch.rand(9, 2, generator=torch.Generator().manual_seed(4))
    layers = ExpertLayers(gate_up=gate_up, down=down, ops=TorchOps(), limit=limit)
    got_TD = method.apply_experts(layers, x_TD, experts_TK, weights_TK)
    is_one_kind = len({is_block(n) for n in range(6)}) == 1
    assert isinstance(down.expert_kernel, ExpertKernel) == is_one_kind
    want_TD = torch.zeros(9, 64, dtype=torch.float64)
    for token, experts in enumerate(experts_TK.tolist()):
        for place, expert in enumerate(experts):
            inner = activate(
                first_EOI[expert] @ x_TD[token].double() + first_EO[expert], limit, 1.702
            )
            output = second_EOI[expert] @ inner + second_EO[expert]
            want_TD[token] += float(weights_TK[token, place]) * output
    assert (got_TD.double() - want_TD).norm() < 0.02 * want_TD.norm()


@torch.inference_mode()
@pytest.mark.parametrize(
    "is_block", [lambda _: True, lambda n: n in (2, 3)], ids=["one call", "separate experts"]
)
def test_experts_have_no_refined_groups(is_block):
    from dovetail_cpu.quantized_linear import GGUFLinearMethod

    x_TD = torch.randn(9, 64, generator=torch.Generator().manual_seed(3)).bfloat16()
    experts_TK = torch.tensor([[0, 2], [1, 0], [2, 1]] * 3)
    weights_TK = torch.rand(9, 2, generator=torch.Generator().manual_seed(4))
    outputs = []
    for groups in ("none", "most"):
        method = GGUFLinearMethod({"refined_groups": groups})
        gate_up, _, _ = q8_experts(method, 64, ("gate", "up"), 1, is_block)
        down, _, _ = q8_experts(method, 64, ("down",), 2, is_block)
        layers = ExpertLayers(gate_up=gate_up, down=down, ops=TorchOps())
        outputs.append(method.apply_experts(layers, x_TD, experts_TK, weights_TK))
    assert torch.equal(*outputs)
