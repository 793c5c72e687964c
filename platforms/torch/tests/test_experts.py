"""Layers with experts: stacked and separate weights, checkpoint names, ranks, routing."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from dovetail.errors import ConfigError, WeightError
from dovetail.interfaces import ModelContext, OneRank, WeightLoaderContext, WeightMapping
from dovetail.interfaces.ops import ExpertWeights
from dovetail_devkit.fakes.linear_method import FakeLinearMethod
from dovetail_devkit.ops.experts import expert_sums
from dovetail_torch.layers import (
    ExpertShape,
    FusedExperts,
    SeparateExperts,
    TorchLinearMethod,
    TorchOps,
    expert_groups,
    make_experts,
)
from dovetail_torch.weights import SafetensorsLoader

E, D, INNER, TOKENS, TOP_K = 5, 12, 6, 23, 2
SHAPE = ExpertShape(num_experts=E, hidden_size=D, intermediate_size=INNER)
STACKED = {
    "experts.gate_up_proj": ("gate_proj", "up_proj"),
    "experts.down_proj": ("down_proj",),
}


class Layer(nn.Module):
    """A model with the experts of one layer; checkpoints may have stacked weights."""

    weight_mappings = tuple(
        WeightMapping(
            source=source,
            targets=tuple(f"experts.{e}.{part}.weight" for e in range(E) for part in parts),
            stacked=E,
        )
        for source, parts in STACKED.items()
    )

    def __init__(self, method=TorchLinearMethod, shape=SHAPE, ranks=None):
        super().__init__()
        context = ModelContext(
            hf_config={},
            dtype=torch.float32,
            device=torch.device("cpu"),
            linear_method=method(),
            ops=TorchOps(),
            max_model_len=16,
            ranks=ranks or OneRank(),
        )
        self.experts = make_experts(context, "experts", shape)


@pytest.fixture(scope="module")
def weights() -> ExpertWeights:
    generator = torch.Generator().manual_seed(1)
    return ExpertWeights(
        gate_up_EGD=torch.randn(E, 2 * INNER, D, generator=generator),
        down_EDI=torch.randn(E, D, INNER, generator=generator),
    )


@pytest.fixture
def tokens():
    generator = torch.Generator().manual_seed(2)
    x_TD = torch.randn(TOKENS, D, generator=generator)
    experts_TK = torch.rand(TOKENS, E, generator=generator).argsort(-1)[:, :TOP_K]
    return x_TD, experts_TK, torch.rand(TOKENS, TOP_K, generator=generator)


def save(folder, weights, *, stacked):
    if stacked:
        tensors = {
            "experts.gate_up_proj": weights.gate_up_EGD,
            "experts.down_proj": weights.down_EDI,
        }
    else:
        tensors = {}
        for e in range(E):
            gate, up = weights.gate_up_EGD[e].chunk(2)
            tensors[f"experts.{e}.gate_proj.weight"] = gate.contiguous()
            tensors[f"experts.{e}.up_proj.weight"] = up.contiguous()
            tensors[f"experts.{e}.down_proj.weight"] = weights.down_EDI[e].contiguous()
    save_file(tensors, folder / "model.safetensors")


def load(model, folder):
    SafetensorsLoader(WeightLoaderContext(model_dir=folder)).load(model)
    return model


@pytest.mark.parametrize("stacked", [False, True], ids=["one tensor per expert", "stacked"])
@pytest.mark.parametrize("method", [TorchLinearMethod, FakeLinearMethod])
def test_both_layouts_of_checkpoints_give_the_sums_of_the_experts(
    method, stacked, tmp_path, weights, tokens
):
    save(tmp_path, weights, stacked=stacked)
    model = load(Layer(method), tmp_path)
    kind = FusedExperts if method is TorchLinearMethod else SeparateExperts
    assert type(model.experts) is kind
    want_TD = expert_sums(*tokens, weights)
    assert torch.allclose(model.experts(*tokens).double(), want_TD, atol=1e-4)


@pytest.mark.parametrize("method", [TorchLinearMethod, FakeLinearMethod])
def test_two_ranks_compute_the_same_sums_as_one_rank(method, tmp_path, weights, tokens):
    save(tmp_path, weights, stacked=True)

    class Rank(OneRank):
        def all_reduce(self, x):
            return x

    parts = [load(Layer(method, ranks=Rank(rank=r, size=2)), tmp_path) for r in range(2)]
    total_TD = sum(part.experts(*tokens) for part in parts)
    assert torch.allclose(total_TD.double(), expert_sums(*tokens, weights), atol=1e-4)


def test_only_rank_0_has_the_bias_of_the_last_projection(tmp_path, tokens):
    shape = ExpertShape(num_experts=E, hidden_size=D, intermediate_size=INNER, bias=True)
    for method in (TorchLinearMethod, FakeLinearMethod):
        own, other = (
            dict(Layer(method, shape, OneRank(rank=r, size=2)).named_parameters()) for r in (0, 1)
        )
        assert (
            {name for name in own if name not in other}
            == {name for name in own if "down_proj" in name and name.endswith("bias")}
            != set()
        )


def test_features_that_cannot_be_sharded_evenly_are_rejected():
    with pytest.raises(ConfigError, match="the 6 intermediate features of experts"):
        Layer(ranks=OneRank(rank=0, size=4))


def test_stacked_weights_with_a_wrong_number_of_experts_are_rejected(tmp_path, weights):
    save_file(
        {
            "experts.gate_up_proj": weights.gate_up_EGD[1:].contiguous(),
            "experts.down_proj": weights.down_EDI,
        },
        tmp_path / "model.safetensors",
    )
    with pytest.raises(WeightError, match=r"gate_up_proj .*\[4, 12, 12\].*\[5, 12, 12\]"):
        load(Layer(), tmp_path)


def test_every_expert_may_compute_all_tokens_without_waiting_for_a_device(
    monkeypatch, weights, tokens
):
    want_TD = TorchOps().fused_experts(*tokens, weights)
    monkeypatch.setattr(expert_groups.torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr(torch, "bincount", None)
    got_TD = TorchOps().fused_experts(*tokens, weights)
    assert torch.allclose(got_TD, want_TD, atol=1e-5)
