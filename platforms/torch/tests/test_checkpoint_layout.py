"""The layout of a checkpoint is restored exactly, and tensors are read in pieces."""

import itertools

import pytest
import torch
from safetensors.torch import save_file

from dovetail.errors import WeightError
from dovetail.interfaces import WeightLoaderContext, WeightMapping
from dovetail_torch.weights import Assignment, MappedAssignment, SafetensorsLoader
from dovetail_torch.weights import checkpoint_tensors as module
from dovetail_torch.weights.checkpoint_files import WeightEntry
from dovetail_torch.weights.checkpoint_layout import checkpoint_name, join_parts
from dovetail_torch.weights.checkpoint_tensors import MappedFiles
from dovetail_torch.weights.weight_names import StoredLayout, WeightNames

ROWS, COLUMNS, EXPERTS = 12, 5, 3
LAYOUTS = [
    StoredLayout(transposed=transposed, groups=groups, rotary_pairs=pairs, rotary_last=last)
    for transposed, groups, (pairs, last) in itertools.product(
        (False, True),
        (1, 2, 4),
        (((0, 0), False), ((6, 4), False), ((6, 4), True), ((12, 12), False)),
    )
]
STACKED = [
    StoredLayout(transposed=transposed, groups=groups, stacked=EXPERTS)
    for transposed, groups in itertools.product((False, True), (1, 2))
]


def assigned(layout, part_shapes):
    """Return an assignment to tensors of zeros."""
    parts = tuple(
        Assignment(name=str(index), target=torch.zeros(shape))
        for index, shape in enumerate(part_shapes)
    )
    return MappedAssignment(name="w", parts=parts, layout=layout)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("num_parts", [1, 3])
@pytest.mark.parametrize("rest", [(), (COLUMNS,)], ids=["bias", "matrix"])
def test_concatenating_the_shards_of_a_weight_restores_it(layout, num_parts, rest):
    whole = assigned(layout, [(ROWS, *rest)] * num_parts)
    weight = torch.randn(whole.shape)
    whole.fill(weight)
    parts = [part.target for part in whole.parts]
    assert torch.equal(join_parts(parts, layout), weight)
    assert any(part.any() for part in parts)


@pytest.mark.parametrize("layout", STACKED, ids=str)
@pytest.mark.parametrize("num_parts", [1, 2])
@pytest.mark.parametrize("rest", [(), (COLUMNS,)], ids=["bias", "matrix"])
def test_concatenating_the_shards_of_stacked_experts_restores_them(layout, num_parts, rest):
    whole = assigned(layout, [(ROWS, *rest)] * (num_parts * EXPERTS))
    weight = torch.randn(whole.shape)
    assert weight.shape[0] == EXPERTS
    whole.fill(weight)
    assert torch.equal(join_parts([part.target for part in whole.parts], layout), weight)


def test_rotary_pairs_of_the_last_dimension_are_restored():
    layout = StoredLayout(rotary_pairs=(6, 4))
    norm = Assignment(name="norm", target=torch.zeros(2, 6), feature_dim=1)
    whole = MappedAssignment(name="w", parts=(norm,), layout=layout)
    weight = torch.randn(2, 6)
    whole.fill(weight)
    assert not torch.equal(norm.target, weight)
    assert torch.equal(join_parts([norm.target], layout, norm.feature_dim), weight)


def test_saved_checkpoints_have_one_tensor_in_plain_layout_per_expert():
    experts = tuple(f"layers.{{}}.experts.{index}.down.weight" for index in range(2))
    names = WeightNames(
        [WeightMapping(source="layers.{}.experts.down", targets=experts, stacked=2)]
    )
    own = "layers.3.experts.1.down.weight"
    assert names.to_checkpoint(own) == "layers.3.experts.down"
    assert checkpoint_name(names, own) == own
    transposed = WeightMapping(
        source="layers.{}.experts.down", targets=experts, stacked=2, transposed=True
    )
    assert checkpoint_name(WeightNames([transposed]), own) == "layers.3.experts.down"


def test_a_file_is_mapped_again_after_a_limited_number_of_bytes(tmp_path, monkeypatch):
    """Without remapping, all pages of a file would be in the memory of the process."""
    path = tmp_path / "model.safetensors"
    tensors = {f"w{index}": torch.randn(1000) for index in range(4)}
    save_file(tensors, path)
    monkeypatch.setattr(module, "MAX_MAPPED_BYTES", 5000)
    opened = []
    open_weights = module.open_weights
    monkeypatch.setattr(module, "open_weights", lambda p: (opened.append(p), open_weights(p))[1])
    files = MappedFiles()
    for name, tensor in tensors.items():
        entry = WeightEntry(name=name, path=path, shape=(1000,), dtype="F32")
        assert torch.equal(files.read(entry), tensor)
    assert opened == [path, path]
    files.close()


def test_the_error_for_a_dtype_that_torch_lacks_names_the_tensor(tmp_path):
    header = b'{"odd":{"dtype":"U16","shape":[1],"data_offsets":[0,2]}}'.ljust(64)
    content = len(header).to_bytes(8, "little") + header + b"\0\0"
    (tmp_path / "model.safetensors").write_bytes(content)
    loader = SafetensorsLoader(WeightLoaderContext(model_dir=tmp_path))
    with (
        pytest.raises(WeightError, match=r"weight odd has the dtype U16, which is not supported"),
        loader.checkpoint_tensors(lambda: None),
    ):
        pass
