"""RecordedWeights records what a weight loader writes to a model, as checkpoint tensors."""

import pytest
import torch
from torch import nn

from dovetail.errors import WeightError
from dovetail.interfaces import ModelContext, WeightLoader, WeightMapping
from dovetail_convert.recorded_weights import RecordedWeights
from dovetail_torch.layers import (
    MergedColumnParallelLinear,
    ParallelLMHead,
    RMSNorm,
    TorchLinearMethod,
    TorchOps,
    VocabParallelEmbedding,
)
from dovetail_torch.weights import build_weight_table

HIDDEN, VOCAB = 4, 9
SHAPES = {
    "wte.weight": (VOCAB, HIDDEN),
    "norm.weight": (HIDDEN,),
    "fused.weight": (HIDDEN, 8),
    "fused.bias": (8,),
    "lm_head.weight": (VOCAB, HIDDEN),
}
"""The checkpoint of the model; `fused` is stored transposed."""


class Model(nn.Module):
    weight_mappings = (
        WeightMapping(source="fused", targets=("gate_proj", "up_proj"), transposed=True),
        WeightMapping(source="wte", targets=("embed",)),
    )

    def __init__(self, device="meta", *, tied=False):
        super().__init__()
        context = ModelContext(
            hf_config={},
            dtype=torch.float32,
            device=torch.device(device),
            linear_method=TorchLinearMethod(),
            ops=TorchOps(),
            max_model_len=8,
        )
        self.embed = VocabParallelEmbedding(context, VOCAB, HIDDEN)
        self.mlp = MergedColumnParallelLinear(
            context, "mlp", HIDDEN, {"gate_proj": 5, "up_proj": 3}, bias=True
        )
        self.norm = RMSNorm(context, HIDDEN, 1e-6)
        self.lm_head = ParallelLMHead(
            context, "lm_head", VOCAB, HIDDEN, tied_to=self.embed if tied else None
        )


class Loader(WeightLoader):
    """A weight loader that copies a loaded model. write: called with (name, target, values)."""

    def __init__(self, source, write=lambda name, target, values: target.copy_(values)):
        self._source, self._write = source, write

    @torch.no_grad()
    def load(self, model):
        values = dict(self._source.state_dict())
        for name, target in model.state_dict(keep_vars=True).items():
            self._write(name, target, values[name])
        return 1


def by_row(name, target, values):
    for index in reversed(range(len(target))):
        target[index].copy_(values[index])


def filled(**options):
    model = Model("cpu", **options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model


def recorded(loader, **options):
    tensors = {}

    def receive(name, tensor):
        assert name not in tensors
        tensors[name] = tensor.clone()

    weights = RecordedWeights(Model(**options))
    plan = {tensor.name: tensor for tensor in weights.plan()}
    weights.read(loader, receive)
    for name, tensor in tensors.items():
        assert (tensor.shape, tensor.dtype) == (plan[name].shape, plan[name].dtype)
    return plan, tensors


@pytest.mark.parametrize("write", [Loader(None)._write, by_row], ids=["whole", "rows, reversed"])
def test_fused_and_transposed_weights_have_the_layout_of_the_checkpoint(write):
    source = filled()
    plan, tensors = recorded(Loader(source, write))
    assert {name: tensor.shape for name, tensor in plan.items()} == SHAPES
    assert tensors.keys() == SHAPES.keys()
    assert torch.equal(tensors["fused.weight"], source.mlp.weight.T)
    assert torch.equal(tensors["fused.bias"], source.mlp.bias)
    assert torch.equal(tensors["wte.weight"], source.embed.weight)
    assert torch.equal(tensors["lm_head.weight"], source.lm_head.weight)


def test_parts_that_arrive_separately_are_concatenated_when_the_last_part_arrives():
    source = filled()
    own = build_weight_table(source).assignments

    class PartLoader(Loader):
        @torch.no_grad()
        def load(self, model):
            for name, part in reversed(build_weight_table(model).assignments.items()):
                part.fill(own[name].target, is_mapped=True)
            return 1

    _, tensors = recorded(PartLoader(source))
    assert torch.equal(tensors["fused.weight"], source.mlp.weight.T)
    assert tensors.keys() == SHAPES.keys()


def test_a_tied_weight_is_recorded_once_with_its_first_name():
    source = filled(tied=True)

    class TiedLoader(Loader):
        @torch.no_grad()
        def load(self, model):
            for name, part in build_weight_table(model).assignments.items():
                part.fill(build_weight_table(source).assignments[name].target)
            return 1

    plan, tensors = recorded(TiedLoader(source), tied=True)
    assert plan.keys() == tensors.keys() == SHAPES.keys() - {"lm_head.weight"}


def test_recorded_values_are_cast_and_broadcast_as_copy_does():
    def write(name, target, values):
        target.copy_(torch.ones(1, dtype=torch.float64))

    _, tensors = recorded(Loader(filled(), write))
    assert all(bool((tensor == 1).all()) for tensor in tensors.values())


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_the_error_for_a_weight_that_is_not_finite_names_it(value):
    source = filled()
    source.norm.weight.data[2] = value
    with pytest.raises(WeightError, match=r"weight norm\.weight has values that are NaN or inf"):
        recorded(Loader(source))


def test_a_weight_that_the_loader_does_not_write_is_not_recorded():
    def write(name, target, values):
        if not name.startswith("norm"):
            target.copy_(values)

    _, tensors = recorded(Loader(filled(), write))
    assert tensors.keys() == SHAPES.keys() - {"norm.weight"}


def test_the_error_for_a_loader_that_writes_columns_names_the_weight():
    def write(name, target, values):
        target[..., :2].copy_(values[..., :2])

    with pytest.raises(WeightError, match=r"weight embed\.weight is written in a way"):
        recorded(Loader(filled(), write))


def test_the_error_for_a_loader_that_unties_weights_names_the_weight():
    class SeparateHeadLoader(Loader):
        def load(self, model):
            weight = torch.empty_like(model.lm_head.weight)
            model.lm_head.weight = nn.Parameter(weight, requires_grad=False)
            return super().load(model)

    with pytest.raises(WeightError, match=r"weight lm_head\.weight is tied to another weight"):
        recorded(SeparateHeadLoader(filled()), tied=True)


def test_mappings_that_cannot_be_inverted_are_rejected():
    class Wrong(Model):
        weight_mappings = (WeightMapping(source="x", targets=("embed", "absent")),)

    with pytest.raises(WeightError, match=r"weight x\.weight: .* contains absent\.weight"):
        RecordedWeights(Wrong())
