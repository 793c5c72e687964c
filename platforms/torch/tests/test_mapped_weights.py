"""Mapped weights, packed weights, weights with NaN, and fingerprints of weights."""

import os

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from dovetail.errors import WeightError
from dovetail.interfaces import LinearShape, ModelContext, WeightLoaderContext
from dovetail_torch.layers import (
    MergedColumnParallelLinear,
    ParallelLMHead,
    RMSNorm,
    TorchLinearMethod,
    TorchOps,
    VocabParallelEmbedding,
)
from dovetail_torch.weights import SafetensorsLoader, assignment, build_weight_table
from dovetail_torch.weights.fingerprint import FINGERPRINT, fingerprint_files
from dovetail_torch.weights.finiteness import check_finite

SHAPES = {
    "embed.weight": (9, 4),
    "gate_proj.weight": (5, 4),
    "up_proj.weight": (3, 4),
    "gate_proj.bias": (5,),
    "up_proj.bias": (3,),
    "norm.weight": (4,),
    "lm_head.weight": (9, 4),
}


class MappedLinearMethod(TorchLinearMethod):
    """A linear method that accepts mapped weights."""

    def create(self, layer: nn.Module, shape: LinearShape) -> None:
        super().create(layer, shape)
        layer.borrows = frozenset({"weight"})


class Model(nn.Module):
    def __init__(self, method=None, *, tied=False):
        super().__init__()
        context = ModelContext(
            hf_config={},
            dtype=torch.float32,
            device=torch.device("cpu"),
            linear_method=method or TorchLinearMethod(),
            ops=TorchOps(),
            max_model_len=8,
        )
        self.embed = VocabParallelEmbedding(context, 9, 4)
        self.mlp = MergedColumnParallelLinear(
            context, "mlp", 4, {"gate_proj": 5, "up_proj": 3}, bias=True
        )
        self.norm = RMSNorm(context, 4, 1e-6)
        self.lm_head = ParallelLMHead(
            context, "lm_head", 9, 4, tied_to=self.embed if tied else None
        )
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.fill_(float("nan"))


class HeadFirst(nn.Module):
    """A model whose LM head comes before the tied embedding. Any order of modules is valid."""

    def __init__(self):
        super().__init__()
        model = Model(tied=True)
        self.lm_head, self.embed, self.mlp, self.norm = (
            model.lm_head,
            model.embed,
            model.mlp,
            model.norm,
        )


@pytest.fixture(autouse=True)
def lend_small_weights(monkeypatch):
    monkeypatch.setattr(assignment, "BORROWED_BYTES", 0)


def make_weights(*, tied=False, dtype=torch.float32):
    names = [name for name in SHAPES if not (tied and name.startswith("lm_head"))]
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(SHAPES[name], generator=generator).to(dtype) for name in names}


def load(path, model, weights):
    save_file(weights, path / "model.safetensors")
    with torch.inference_mode():
        SafetensorsLoader(WeightLoaderContext(model_dir=path, progress=False)).load(model)
    return model


def test_layers_that_use_file_mappings_get_each_part_as_a_mapping(tmp_path):
    weights = make_weights()
    model = load(tmp_path, Model(MappedLinearMethod()), weights)
    assert torch.equal(model.mlp.borrowed[0], weights["gate_proj.weight"])
    assert torch.equal(model.mlp.borrowed[1], weights["up_proj.weight"])
    assert torch.equal(model.lm_head.borrowed[0], weights["lm_head.weight"])
    assert model.mlp.weight.isnan().all()
    assert torch.equal(
        model.mlp.bias, torch.cat([weights["gate_proj.bias"], weights["up_proj.bias"]])
    )
    assert model.embed.is_mapped and torch.equal(model.embed.weight, weights["embed.weight"])


def test_layers_without_mappings_and_weights_that_are_cast_get_copies(tmp_path):
    weights = make_weights()
    model = load(tmp_path, Model(), weights)
    assert not model.mlp.borrowed and torch.equal(model.lm_head.weight, weights["lm_head.weight"])
    cast = load(tmp_path, Model(MappedLinearMethod()), make_weights(dtype=torch.float16))
    assert not cast.mlp.borrowed and not cast.embed.is_mapped
    assert not cast.mlp.weight.isnan().any()


def test_a_mapped_embedding_is_also_the_weight_of_a_tied_lm_head(tmp_path):
    weights = make_weights(tied=True)
    model = load(tmp_path, Model(MappedLinearMethod(), tied=True), weights)
    assert model.lm_head.weight is model.embed.weight
    assert torch.equal(model.lm_head.weight, weights["embed.weight"])


def test_a_mapped_weight_outlives_its_file(tmp_path):
    weights = make_weights()
    model = load(tmp_path, Model(MappedLinearMethod()), weights)
    (tmp_path / "model.safetensors").unlink()
    with torch.inference_mode():
        model.embed.weight[0, 0] = 7  # a private mapping: the file does not change
    assert float(model.embed.weight[0, 0]) == 7
    assert torch.equal(model.embed.weight[1:], weights["embed.weight"][1:])


@pytest.mark.parametrize("model_cls", [Model, HeadFirst])
def test_weights_that_are_already_packed_are_not_read_from_the_checkpoint(tmp_path, model_cls):
    model = model_cls()
    model.mlp.settled = model.lm_head.settled = frozenset({"weight"})
    table = build_weight_table(model)
    assert {"gate_proj.weight", "up_proj.weight"} <= table.settled
    assert {"gate_proj.bias", "up_proj.bias", "embed.weight"} <= table.assignments.keys()
    tied = model_cls is HeadFirst
    assert ("lm_head.weight" in table.settled) != tied
    weights = make_weights(tied=tied)
    load(tmp_path, model, weights)
    assert model.mlp.weight.isnan().all()
    assert torch.equal(model.embed.weight, weights["embed.weight"])
    del weights["gate_proj.weight"]
    load(tmp_path, model, weights)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_the_error_for_weights_with_nan_or_infinity_contains_their_names(tmp_path, name, value):
    weights = make_weights()
    weights[name].view(-1)[2] = value
    model = load(tmp_path, Model(), weights)
    with pytest.raises(WeightError, match=name.replace(".", r"\.")):
        check_finite(model)


def test_weights_that_the_linear_method_checks_are_not_checked_twice(tmp_path):
    weights = make_weights()
    weights["up_proj.weight"][0, 0] = float("nan")
    check_finite(load(tmp_path, Model(MappedLinearMethod()), weights))
    weights["norm.weight"][0] = float("nan")
    with pytest.raises(WeightError, match=r"norm\.weight"):
        check_finite(load(tmp_path, Model(MappedLinearMethod()), weights))


def test_the_loader_returns_a_fingerprint_of_its_weights(tmp_path):
    load(tmp_path, Model(), make_weights())
    loader = SafetensorsLoader(WeightLoaderContext(model_dir=tmp_path))
    assert FINGERPRINT in loader.provides
    assert loader.fingerprint() == fingerprint_files([tmp_path / "model.safetensors"])


def test_a_fingerprint_covers_the_header_and_samples_of_a_file(tmp_path):
    file = tmp_path / "model.gguf"
    content = bytearray(b"GGUF\x03\0\0\0" + bytes(1 << 20))  # its first bytes are huge as a length

    def fingerprint(header_bytes):
        file.write_bytes(content)
        os.utime(file, ns=(5, 5))
        return fingerprint_files([file], {file: header_bytes})

    first = {size: fingerprint(size) for size in (6000, 7000)}
    content[6500] = 1  # between the samples
    assert fingerprint(6000) == first[6000]
    assert fingerprint(7000) != first[7000]


def test_a_fingerprint_depends_on_file_contents_size_and_time_but_not_on_the_path(tmp_path):
    file, other = tmp_path / "a", tmp_path / "b"
    file.write_bytes(bytes(range(256)) * 400)
    os.utime(file, ns=(5, 5))
    first = fingerprint_files([file])
    assert len(first) == 32 and first == fingerprint_files([file])
    other.write_bytes(file.read_bytes())
    os.utime(other, ns=(5, 5))
    assert fingerprint_files([other]) == first
    os.utime(other, ns=(5, 6))
    assert fingerprint_files([other]) != first
    other.write_bytes(file.read_bytes() + b"x")
    os.utime(other, ns=(5, 5))
    assert fingerprint_files([other]) != first
    changed = bytearray(file.read_bytes())
    changed[-1] ^= 1
    other.write_bytes(changed)
    os.utime(other, ns=(5, 5))
    assert fingerprint_files([other]) != first
    assert fingerprint_files([file, file]) != first
    with pytest.raises(WeightError, match="absent"):
        fingerprint_files([tmp_path / "absent"])
