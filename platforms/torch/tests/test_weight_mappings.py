"""Models that declare how a checkpoint names and stores their weights."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from dovetail.errors import ModelError, WeightError
from dovetail.interfaces import ModelContext, OneRank, WeightLoaderContext, WeightMapping
from dovetail_torch.layers import (
    ColumnParallelLinear,
    HeadShape,
    QKVParallelLinear,
    RowParallelLinear,
    TorchLinearMethod,
    TorchOps,
)
from dovetail_torch.weights import DummyLoader, SafetensorsLoader, build_weight_table
from dovetail_torch.weights.finiteness import check_finite
from dovetail_torch.weights.weight_names import PLAIN, StoredLayout, WeightNames

SIZE = 8
MAPPINGS = (
    WeightMapping(
        source="h.{}.c_attn",
        targets=("h.{}.q_proj", "h.{}.k_proj", "h.{}.v_proj"),
        transposed=True,
    ),
    WeightMapping(source="h.{}.c_proj.weight", targets=("h.{}.out.weight",), transposed=True),
    WeightMapping(source="h.{}.c_proj", targets=("h.{}.out",)),
    WeightMapping(source="h.{}.mask"),
    WeightMapping(source="h.{}.fc", targets=("h.{}.up",)),
)


class Block(nn.Module):
    def __init__(self, context, index):
        super().__init__()
        heads = HeadShape(num_heads=4, num_kv_heads=2, head_size=2)
        self.qkv = QKVParallelLinear(context, f"h.{index}.qkv", SIZE, heads, bias=True)
        self.out = RowParallelLinear(context, f"h.{index}.out", SIZE, SIZE, bias=True)
        self.up = ColumnParallelLinear(context, f"h.{index}.up", SIZE, 2 * SIZE)


class Mapped(nn.Module):
    weight_mappings = MAPPINGS

    def __init__(self, ranks=None):
        super().__init__()
        context = ModelContext(
            hf_config={},
            dtype=torch.float32,
            device=torch.device("cpu"),
            linear_method=TorchLinearMethod(),
            ops=TorchOps(),
            max_model_len=16,
            ranks=ranks or OneRank(),
        )
        self.h = nn.ModuleList(Block(context, index) for index in range(2))


@pytest.fixture
def weights():
    """Return a checkpoint of the model.

    The matrices of c_attn and c_proj are stored as [in, out].
    """
    tensors = {}
    for index in range(2):
        tensors |= {
            f"h.{index}.c_attn.weight": torch.randn(SIZE, 2 * SIZE),
            f"h.{index}.c_attn.bias": torch.randn(2 * SIZE),
            f"h.{index}.c_proj.weight": torch.randn(SIZE, SIZE),
            f"h.{index}.c_proj.bias": torch.randn(SIZE),
            f"h.{index}.mask": torch.ones(4, 4),
            f"h.{index}.fc.weight": torch.randn(2 * SIZE, SIZE),
        }
    return tensors


@pytest.fixture
def load(tmp_path, weights):
    def filled(model):
        save_file(weights, tmp_path / "model.safetensors")
        num_bytes = SafetensorsLoader(WeightLoaderContext(model_dir=tmp_path)).load(model)
        return model, num_bytes

    return filled


def test_every_weight_is_loaded_in_the_layout_of_linear_layers(load, weights):
    model, num_bytes = load(Mapped())
    for index, block in enumerate(model.h):
        assert torch.equal(block.qkv.weight, weights[f"h.{index}.c_attn.weight"].T)
        assert torch.equal(block.qkv.bias, weights[f"h.{index}.c_attn.bias"])
        assert torch.equal(block.out.weight, weights[f"h.{index}.c_proj.weight"].T)
        assert torch.equal(block.out.bias, weights[f"h.{index}.c_proj.bias"])
        assert torch.equal(block.up.weight, weights[f"h.{index}.fc.weight"])
    unused = sum(weights[f"h.{index}.mask"].nbytes for index in range(2))
    assert num_bytes == sum(weight.nbytes for weight in weights.values()) - unused


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_reads_its_part_of_a_transposed_weight(load, weights, rank):
    model, _ = load(Mapped(OneRank(rank=rank, size=2)))
    q_k_v = weights["h.1.c_attn.weight"].T.split([8, 4, 4])
    assert torch.equal(model.h[1].qkv.weight, torch.cat([x.chunk(2)[rank] for x in q_k_v]))
    columns = weights["h.1.c_proj.weight"].T.chunk(2, dim=1)[rank]
    assert torch.equal(model.h[1].out.weight, columns)


def test_dummy_weights_fill_a_model_with_weight_mappings(tmp_path):
    model = Mapped()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    DummyLoader(WeightLoaderContext(model_dir=tmp_path)).load(model)
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("change", "report"),
    [
        ({"h.0.c_attn.weight": None}, r"missing 1 weight \(h\.0\.c_attn\.weight\)"),
        ({"h.0.odd": torch.ones(1)}, r"does not have 1 weight \(h\.0\.odd\)"),
        (
            {"h.0.c_attn.weight": torch.ones(2 * SIZE, SIZE)},
            r"h\.0\.c_attn\.weight has the shape \[16, 8\], .* requires \[8, 16\]",
        ),
        ({"h.0.up.weight": torch.ones(2 * SIZE, SIZE)}, r"does not have .*\(h\.0\.\w+\.weight\)"),
    ],
)
def test_errors_contain_the_names_of_weights_in_the_checkpoint(load, weights, change, report):
    for name, weight in change.items():
        weights.pop(name, None)
        if weight is not None:
            weights[name] = weight
    with pytest.raises(WeightError, match=report):
        load(Mapped())


def test_infinite_values_are_reported_with_the_name_of_the_checkpoint(load, weights):
    weights["h.1.c_attn.bias"][3] = torch.inf
    model, _ = load(Mapped())
    with pytest.raises(WeightError, match=r"in h\.1\.c_attn\.bias:"):
        check_finite(model)


@pytest.mark.parametrize(
    ("mapping", "report"),
    [
        (WeightMapping(source="h.{}.a", targets=("b",)), "must contain the same number of {}"),
        (WeightMapping(source="a", targets=("b.{}",)), "'b.{}' and the source 'a' must contain"),
        (("a", "b"), "expected WeightMapping objects, got"),
    ],
)
def test_the_error_for_an_invalid_mapping_names_the_model(mapping, report):
    model = Mapped()
    model.weight_mappings = (mapping,)
    with pytest.raises(ModelError) as caught:
        build_weight_table(model)
    assert report in str(caught.value) and "Mapped" in str(caught.value)


def test_weight_names_map_in_both_directions_and_the_first_matching_mapping_applies():
    names = WeightNames(MAPPINGS)
    assert names.to_model("h.3.c_proj.weight") == (
        ("h.3.out.weight",),
        StoredLayout(transposed=True),
    )
    assert names.to_model("h.3.c_proj.bias") == (("h.3.out.bias",), PLAIN)
    assert names.to_model("h.3.mask") == ((), PLAIN)
    assert names.to_model("h.3.c_projection.bias") == (("h.3.c_projection.bias",), PLAIN)
    assert names.to_checkpoint("h.3.k_proj.bias") == "h.3.c_attn.bias"
    assert names.to_checkpoint("h.3.up.weight") == "h.3.fc.weight"
    assert names.to_checkpoint("other") == "other"


def test_the_checkpoint_name_is_found_among_thousands_of_similar_mappings():
    targets = tuple(f"layers.{{}}.experts.{expert}.up.weight" for expert in range(5000))
    names = WeightNames(
        [
            WeightMapping(source="stacked.{}", targets=targets, stacked=5000),
            WeightMapping(source="block{}.norm", targets=("layers.{}.norm",)),
            WeightMapping(source="h{}.out", targets=("h_{}.out",)),
            WeightMapping(source="later.{}", targets=("layers.{}.norm",)),
        ]
    )
    assert names.to_checkpoint("layers.7.experts.4321.up.weight") == "stacked.7"
    assert names.to_checkpoint("layers.7.experts.5001.up.weight").startswith("layers.7")
    assert names.to_checkpoint("layers.7.norm.bias") == "block7.norm.bias"
    assert names.to_checkpoint("h_3.out.weight") == "h3.out.weight"
    assert names.to_checkpoint("h3.out.weight") == "h3.out.weight"
