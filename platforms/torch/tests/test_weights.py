"""Weight loading: the weight table, valid checkpoints in all forms, and invalid checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from dovetail.errors import WeightError
from dovetail.interfaces.model import ModelContext
from dovetail.interfaces.weight_loader import WeightLoaderContext
from dovetail_torch.layers import (
    ColumnParallelLinear,
    HeadShape,
    MergedColumnParallelLinear,
    ParallelLMHead,
    QKVParallelLinear,
    RMSNorm,
    TorchLinearMethod,
    TorchOps,
    VocabParallelEmbedding,
)
from dovetail_torch.weights import DummyLoader, SafetensorsLoader, build_weight_table
from dovetail_torch.weights.checkpoint_files import find_weight_files

SHAPES = {
    "embed.weight": (9, 4),
    "attn.q_proj.weight": (8, 4),
    "attn.q_proj.bias": (8,),
    "attn.k_proj.weight": (4, 4),
    "attn.k_proj.bias": (4,),
    "attn.v_proj.weight": (4, 4),
    "attn.v_proj.bias": (4,),
    "mlp.gate_proj.weight": (5, 4),
    "mlp.up_proj.weight": (5, 4),
    "mlp.down_proj.weight": (4, 5),
    "norm.weight": (4,),
    "lm_head.weight": (9, 4),
}
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class SmallModel(nn.Module):
    """A model with one layer of each kind."""

    def __init__(self, *, tied: bool = False, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        context = ModelContext(
            hf_config={},
            dtype=dtype,
            device=torch.device("cpu"),
            linear_method=TorchLinearMethod(),
            ops=TorchOps(),
            max_model_len=8,
        )
        heads = HeadShape(num_heads=2, num_kv_heads=1, head_size=4)
        self.embed = VocabParallelEmbedding(context, 9, 4)
        self.attn = nn.Module()
        self.attn.qkv_proj = QKVParallelLinear(context, "attn.qkv_proj", 4, heads, bias=True)
        self.mlp = nn.Module()
        parts = {"gate_proj": 5, "up_proj": 5}
        self.mlp.gate_up_proj = MergedColumnParallelLinear(context, "mlp.gate_up_proj", 4, parts)
        self.mlp.down_proj = ColumnParallelLinear(context, "mlp.down_proj", 5, 4)
        self.norm = RMSNorm(context, 4, 1e-6)
        tied_to = self.embed if tied else None
        self.lm_head = ParallelLMHead(context, "lm_head", 9, 4, tied_to=tied_to)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.fill_(float("nan"))


def make_weights(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(8)
    return {n: torch.randn(s, generator=generator).to(dtype) for n, s in SHAPES.items()}


def save_shards(folder: Path, weights: dict[str, torch.Tensor], num_shards: int = 3) -> None:
    weight_map = {}
    for shard in range(num_shards):
        names = list(weights)[shard::num_shards]
        file_name = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        save_file({name: weights[name] for name in names}, folder / file_name)
        weight_map |= dict.fromkeys(names, file_name)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def load(folder: Path, model: nn.Module | None = None) -> int:
    return SafetensorsLoader(WeightLoaderContext(model_dir=folder)).load(model or SmallModel())


def check_loaded(model: SmallModel, weights: dict[str, torch.Tensor]) -> None:
    fused = {
        "attn.qkv_proj.weight": [f"attn.{x}_proj.weight" for x in "qkv"],
        "attn.qkv_proj.bias": [f"attn.{x}_proj.bias" for x in "qkv"],
        "mlp.gate_up_proj.weight": ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
    }
    for name, parameter in model.named_parameters():
        expected = torch.cat([weights[part] for part in fused.get(name, [name])])
        assert torch.equal(parameter, expected.to(parameter.dtype)), name


def test_a_single_file_fills_every_parameter(tmp_path: Path) -> None:
    weights, model = make_weights(), SmallModel()
    save_file(weights, tmp_path / SINGLE)
    num_bytes = load(tmp_path, model)
    check_loaded(model, weights)
    assert num_bytes == sum(w.nbytes for w in weights.values())


def test_shards_fill_every_parameter(tmp_path: Path) -> None:
    weights, model = make_weights(), SmallModel()
    save_shards(tmp_path, weights)
    num_bytes = load(tmp_path, model)
    check_loaded(model, weights)
    assert num_bytes == sum(w.nbytes for w in weights.values())


@pytest.mark.parametrize("stored", ["embed.weight", "lm_head.weight", "equal"])
def test_a_tied_weight_is_loaded_under_either_of_its_two_names(tmp_path: Path, stored: str) -> None:
    weights, model = make_weights(), SmallModel(tied=True)
    saved = dict(weights)
    if stored == "equal":
        saved["lm_head.weight"] = weights["embed.weight"].clone()
    else:
        del saved["lm_head.weight" if stored == "embed.weight" else "embed.weight"]
    save_file(saved, tmp_path / SINGLE)
    load(tmp_path, model)
    if stored == "lm_head.weight":
        weights["embed.weight"] = weights["lm_head.weight"]
    check_loaded(model, weights)
    assert model.lm_head.weight is model.embed.weight


def test_a_tied_lm_head_that_differs_in_the_files_is_untied(tmp_path: Path) -> None:
    weights, model = make_weights(), SmallModel(tied=True)
    save_shards(tmp_path, weights)
    load(tmp_path, model)
    check_loaded(model, weights)
    assert model.lm_head.weight is not model.embed.weight


@pytest.mark.parametrize("saved", [torch.float64, torch.bfloat16, torch.float16])
def test_weights_are_cast_to_the_dtype_of_the_parameter(tmp_path: Path, saved: torch.dtype) -> None:
    weights, model = make_weights(saved), SmallModel(dtype=torch.bfloat16)
    save_file(weights, tmp_path / SINGLE)
    load(tmp_path, model)
    check_loaded(model, weights)


def test_computed_frequencies_in_old_checkpoints_are_skipped(tmp_path: Path) -> None:
    weights, model = make_weights(), SmallModel()
    save_file(weights | {"attn.rotary_emb.inv_freq": torch.ones(2)}, tmp_path / SINGLE)
    load(tmp_path, model)
    check_loaded(model, weights)


def test_persistent_buffers_are_loaded_and_other_buffers_are_not(tmp_path: Path) -> None:
    weights, model = make_weights(), SmallModel()
    model.register_buffer("scale", torch.zeros(2))
    model.register_buffer("table", torch.zeros(2), persistent=False)
    save_file(weights | {"scale": torch.tensor([3.0, 4.0])}, tmp_path / SINGLE)
    load(tmp_path, model)
    assert model.scale.tolist() == [3.0, 4.0]


def test_the_weight_table_names_each_part_and_covers_each_parameter_once() -> None:
    model = SmallModel(tied=True)
    table = build_weight_table(model)
    assert set(table.assignments) == SHAPES.keys() - {"lm_head.weight"}
    assert table.aliases == {"lm_head.weight": "embed.weight"}
    for name, assignment in table.assignments.items():
        assert tuple(assignment.target.shape) == SHAPES[name]
        assignment.target.fill_(1) if assignment.target.isnan().all() else pytest.fail(name)
    assert all((parameter == 1).all() for parameter in model.parameters())


def rejected(folder: Path, *words: str, model: SmallModel | None = None) -> None:
    """Check that loading raises an error with these words and changes no parameter."""
    model = model or SmallModel()
    with pytest.raises(WeightError) as caught:
        load(folder, model)
    for word in words:
        assert word in str(caught.value), str(caught.value)
    assert all(parameter.isnan().all() for parameter in model.parameters())


def test_a_directory_without_weights_is_rejected(tmp_path: Path) -> None:
    rejected(tmp_path, str(tmp_path), "neither", "contains nothing", "dummy")
    rejected(tmp_path / "absent", "neither", "contains nothing")


def test_pickle_files_are_never_read(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02.")
    rejected(tmp_path, "pytorch_model.bin", "can run code", "convert to safetensors")


def test_weight_files_with_other_names_need_an_index(tmp_path: Path) -> None:
    save_file(make_weights(), tmp_path / "model-00001-of-00001.safetensors")
    rejected(tmp_path, "model-00001-of-00001.safetensors", "add the index")


def test_a_missing_shard_is_rejected(tmp_path: Path) -> None:
    save_shards(tmp_path, make_weights())
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    rejected(tmp_path, INDEX, "model-00002-of-00003.safetensors", "1 of them are missing")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"weight_map": {}}', '{"weight_map": [1]}'])
def test_an_invalid_index_is_rejected(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX).write_text(text)
    rejected(tmp_path, INDEX, "download")


@pytest.mark.parametrize("file_name", ["../model.safetensors", "/etc/passwd", 3])
def test_an_index_cannot_point_outside_of_the_directory(tmp_path: Path, file_name: object) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"embed.weight": file_name}}))
    rejected(tmp_path, INDEX, "embed.weight", "not in ")


@pytest.mark.parametrize(
    ("weight_map", "words"),
    [
        ({str(n): f"{n}.safetensors" for n in range(10_001)}, "lists 10001 shards; at most 10000"),
        ({"embed.weight": "a" * 100_000}, "1 of them are missing ('aaa"),
        ({"e" * 100_000: 3}, "not in "),
    ],
)
def test_the_error_for_an_invalid_index_is_short(
    tmp_path: Path, weight_map: dict, words: str
) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(WeightError) as rejection:
        find_weight_files(tmp_path)
    assert INDEX in str(rejection.value) and words in str(rejection.value)
    assert len(str(rejection.value)) < 1000


def test_a_weight_of_the_index_that_is_not_in_its_shard_is_rejected(tmp_path: Path) -> None:
    save_shards(tmp_path, make_weights())
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"]["norm.weight"] = "model-00001-of-00003.safetensors"
    (tmp_path / INDEX).write_text(json.dumps(index))
    rejected(tmp_path, "model-00001-of-00003.safetensors", "norm.weight", "does not contain it")


def test_a_weight_in_two_shards_is_rejected(tmp_path: Path) -> None:
    weights = make_weights()
    save_shards(tmp_path, weights)
    first = {name: weights[name] for name in [*list(weights)[::3], "norm.weight"]}
    save_file(first, tmp_path / "model-00001-of-00003.safetensors")
    rejected(tmp_path, "norm.weight is also in model-00001")


@pytest.mark.parametrize("kept_bytes", [0, 4, 100, -1])
def test_a_truncated_weight_file_is_rejected(tmp_path: Path, kept_bytes: int) -> None:
    path = tmp_path / SINGLE
    save_file(make_weights(), path)
    path.write_bytes(path.read_bytes()[:kept_bytes])
    rejected(tmp_path, str(path), "truncated")


def test_a_file_of_another_format_is_rejected(tmp_path: Path) -> None:
    (tmp_path / SINGLE).write_text("version https://git-lfs.github.com/spec/v1\n" * 3)
    rejected(tmp_path, SINGLE, "not a safetensors file")


@pytest.mark.parametrize("shape", [(4, 8), (8, 5), (9, 4), (32,)])
def test_the_error_for_a_wrong_shape_contains_both_shapes(
    tmp_path: Path, shape: tuple[int, ...]
) -> None:
    save_file(make_weights() | {"attn.q_proj.weight": torch.zeros(shape)}, tmp_path / SINGLE)
    rejected(tmp_path, SINGLE, "attn.q_proj.weight", str(list(shape)), "[8, 4]")


def test_missing_weights_are_counted_and_listed(tmp_path: Path) -> None:
    weights = make_weights()
    save_file({"norm.weight": weights["norm.weight"]}, tmp_path / SINGLE)
    rejected(tmp_path, str(tmp_path), "11 weights", "embed.weight", "and 6 more", "missing")


def test_the_error_for_one_missing_part_of_a_fused_weight_contains_its_name(tmp_path: Path) -> None:
    weights = make_weights()
    del weights["attn.k_proj.bias"]
    save_file(weights, tmp_path / SINGLE)
    rejected(tmp_path, "missing 1 weight (attn.k_proj.bias)")


def test_unexpected_weights_are_listed(tmp_path: Path) -> None:
    extra = {"attn.q_norm.weight": torch.ones(4), "score.weight": torch.ones(2, 4)}
    save_file(make_weights() | extra, tmp_path / SINGLE)
    rejected(tmp_path, "2 weights", "attn.q_norm.weight", "score.weight", "the model does not have")


def test_an_untied_model_needs_the_weight_of_its_lm_head(tmp_path: Path) -> None:
    weights = make_weights()
    del weights["lm_head.weight"]
    save_file(weights, tmp_path / SINGLE)
    rejected(tmp_path, "lm_head.weight", "missing")


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.float8_e4m3fn])
def test_dtypes_that_need_scales_are_rejected(tmp_path: Path, dtype: torch.dtype) -> None:
    quantized = torch.zeros(4, 5).to(dtype)
    save_file(make_weights() | {"mlp.down_proj.weight": quantized}, tmp_path / SINGLE)
    rejected(tmp_path, SINGLE, "mlp.down_proj.weight", "torch.float32", "quantized")


def test_integer_parameters_are_loaded_from_the_same_dtype_only(tmp_path: Path) -> None:
    model = nn.Module()
    model.codes = nn.Parameter(torch.zeros(3, dtype=torch.int8), requires_grad=False)
    save_file({"codes": torch.tensor([1, -2, 3], dtype=torch.int8)}, tmp_path / SINGLE)
    load(tmp_path, model)
    assert model.codes.tolist() == [1, -2, 3]
    save_file({"codes": torch.tensor([1, -2, 3], dtype=torch.int16)}, tmp_path / SINGLE)
    with pytest.raises(WeightError, match="I16"):
        load(tmp_path, model)


def dummy(seed: int, **options: object) -> SmallModel:
    model = SmallModel(**options)
    context = WeightLoaderContext(model_dir=Path("/nowhere"), seed=seed)
    assert DummyLoader(context).load(model) == 0
    return model


def test_dummy_weights_are_small_and_reproducible() -> None:
    first, again, other = dummy(1), dummy(1), dummy(2)
    for (name, weight), same, different in zip(
        first.named_parameters(), again.parameters(), other.parameters(), strict=True
    ):
        assert torch.equal(weight, same)
        assert not torch.equal(weight, different)
        center = 1.0 if name == "norm.weight" else 0.0
        assert 0 < (weight - center).abs().max() < 0.2


def test_dummy_weights_depend_on_the_weight_name_and_not_on_tying_or_dtype() -> None:
    untied, tied, rounded = dummy(1), dummy(1, tied=True), dummy(1, dtype=torch.bfloat16)
    assert torch.equal(untied.embed.weight, tied.embed.weight)
    assert torch.equal(untied.attn.qkv_proj.weight, tied.attn.qkv_proj.weight)
    assert not torch.equal(untied.embed.weight, untied.lm_head.weight)
    for exact, short in zip(untied.parameters(), rounded.parameters(), strict=True):
        assert torch.equal(exact.to(torch.bfloat16), short)


def test_large_dummy_weights_have_no_equal_rows() -> None:
    model = nn.Module()
    model.table = nn.Parameter(torch.empty(3000, 1024), requires_grad=False)
    DummyLoader(WeightLoaderContext(model_dir=Path("/nowhere"))).load(model)
    heads = {tuple(row) for row in model.table[:, :3].tolist()}
    assert len(heads) == 3000
    assert abs(model.table.std().item() - 0.02) < 1e-3


class Terminal:
    """A simulated stderr that claims to be a terminal."""

    def __init__(self, *, terminal: bool) -> None:
        self.text, self.terminal, self.encoding = "", terminal, "utf-8"

    def isatty(self) -> bool:
        return self.terminal

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        pass


@pytest.mark.parametrize(
    ("terminal", "requested", "shown"),
    [(True, True, True), (False, True, False), (True, False, False)],
)
def test_progress_is_shown_only_on_a_terminal_if_enabled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, terminal: bool, requested: bool, shown: bool
) -> None:
    stderr = Terminal(terminal=terminal)
    monkeypatch.setattr("sys.stderr", stderr)
    save_file(make_weights(), tmp_path / SINGLE)
    context = WeightLoaderContext(model_dir=tmp_path, progress=requested)
    SafetensorsLoader(context).load(SmallModel())
    assert bool(stderr.text) is shown
