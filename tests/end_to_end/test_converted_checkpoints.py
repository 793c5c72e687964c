"""`dovetail convert` on GGUF files and quantized checkpoints: weights, tokens, logits, outputs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize
from gguf_files.models import write_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from dovetail.errors import WeightError
from dovetail_convert.convert_options import ConvertOptions
from dovetail_convert.run import run
from dovetail_gguf.tensor_names import to_model_name
from dovetail_gguf.weight_loader import restore_rows
from end_to_end.checkpoints import SIZES, make_checkpoint
from end_to_end.quantized_checkpoints import make_plain, outputs
from end_to_end.quantized_writers import FORMATS, gptq, write
from end_to_end.test_mxfp4_experts import plain as gpt_oss  # noqa: F401  # a fixture
from end_to_end.test_mxfp4_experts import write as write_mxfp4

TEXTS = ("the quick brown fox", " two  spaces\n", "Zürich 😀 <|user|>", "")
SHARD = "20KB"


def convert(model: Path, folder: Path, **options: object) -> Path:
    """Convert a model with small shards. Return the new directory."""
    settings = {"out": folder / "converted", "dtype": "float32", "max_shard_size": SHARD} | options
    run(str(model), ConvertOptions(**settings), print)
    return settings["out"]


def load_all(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a checkpoint. Check its index."""
    files = sorted(folder.glob("*.safetensors"))
    tensors = {
        name: (file.name, value) for file in files for name, value in load_file(file).items()
    }
    index = json.loads((folder / "model.safetensors.index.json").read_text("utf-8"))
    assert len(files) > 1
    assert index["weight_map"] == {name: file for name, (file, _) in tensors.items()}
    assert index["metadata"]["total_size"] == sum(value.nbytes for _, value in tensors.values())
    return {name: value for name, (_, value) in tensors.items()}


def expect_equal(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert value.dtype == actual[name].dtype, name
        assert torch.equal(value, actual[name]), name


def logits(model: Path, ids: torch.Tensor) -> torch.Tensor:
    loaded, report = AutoModelForCausalLM.from_pretrained(
        model, dtype="float32", output_loading_info=True
    )
    assert not any(report.values()), report
    with torch.no_grad():
        return loaded(ids).logits


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(
        tmp_path_factory.mktemp("original"),
        head_dim=8,
        rope_theta=10000.0,
        tie_word_embeddings=True,
    )


def gguf_of(original: Path, folder: Path, kind: GGMLQuantizationType) -> Path:
    config = json.loads((original / "config.json").read_text("utf-8"))
    theta = {"rope_theta": config["rope_parameters"]["rope_theta"]}
    copy = folder / "source"
    copy.mkdir()
    for path in original.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    (copy / "config.json").write_text(json.dumps(config | theta), "utf-8")
    return write_model(copy, folder / "model.gguf", type_=kind, pre="gpt-2")


def test_converting_a_gguf_file_restores_the_original_checkpoint_and_tokenizer(original, tmp_path):
    file = gguf_of(original, tmp_path, GGMLQuantizationType.F32)
    converted = convert(file, tmp_path)
    expect_equal(load_all(converted), load_file(original / "model.safetensors"))
    ids = torch.arange(100)[None]
    assert torch.equal(logits(converted, ids), logits(original, ids))
    own, other = map(AutoTokenizer.from_pretrained, (converted, original))
    for text in TEXTS:
        assert own(text).input_ids == other(text).input_ids
        assert own.decode(own(text).input_ids) == other.decode(other(text).input_ids)
    chat = [{"role": "user", "content": "hello"}]
    assert own.apply_chat_template(chat, tokenize=False) == "<|user|>hello\n"
    assert (own.bos_token, own.eos_token) == (other.bos_token, other.eos_token)
    config = json.loads((converted / "config.json").read_text("utf-8"))
    assert config["dtype"] == "float32"
    assert [config[f"{name}_token_id"] for name in ("bos", "eos", "pad")] == [0, 1, None]


def test_the_engine_gives_equal_outputs_for_a_gguf_file_and_its_conversion(original, tmp_path):
    file = gguf_of(original, tmp_path, GGMLQuantizationType.F32)
    tokens, rows, _ = outputs(str(file))
    assert outputs(str(convert(file, tmp_path)))[:2] == (tokens, rows)


@pytest.mark.parametrize(
    "kind",
    [
        GGMLQuantizationType.Q8_0,
        pytest.param(GGMLQuantizationType.Q4_0, marks=pytest.mark.soak),
        pytest.param(GGMLQuantizationType.F16, marks=pytest.mark.soak),
    ],
)
def test_the_weights_of_a_gguf_file_are_its_dequantized_values(original, tmp_path, kind):
    file = gguf_of(original, tmp_path, kind)
    heads = {"q_proj": SIZES["num_attention_heads"], "k_proj": SIZES["num_key_value_heads"]}
    expected = {}
    for tensor in GGUFReader(file).tensors:
        name = to_model_name(tensor.name)
        values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        values = values.view([int(size) for size in reversed(tensor.shape)])
        count = heads.get(name.split(".")[-2])
        expected[name] = restore_rows(values, count) if count else values
    expect_equal(load_all(convert(file, tmp_path)), expected)


def test_a_gguf_file_is_converted_to_bfloat16_by_default(original, tmp_path):
    file = gguf_of(original, tmp_path, GGMLQuantizationType.Q8_0)
    exact = load_all(convert(file, tmp_path))
    rounded = load_all(convert(file, tmp_path, dtype="auto", out=tmp_path / "rounded"))
    expect_equal(rounded, {name: value.bfloat16() for name, value in exact.items()})


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return make_plain(tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.sampled(8)
def test_a_quantized_checkpoint_is_converted_to_its_dequantized_weights(name, plain, tmp_path):
    quantized, values = write(plain, tmp_path, FORMATS[name])
    converted = convert(quantized, tmp_path)
    expect_equal(load_all(converted), load_file(values / "model.safetensors"))
    config = json.loads((converted / "config.json").read_text("utf-8"))
    assert "quantization_config" not in config
    assert config == json.loads((values / "config.json").read_text("utf-8"))


def test_a_converted_checkpoint_gives_the_same_outputs_as_the_quantized_one(plain, tmp_path):
    quantized, values = write(plain, tmp_path, gptq(act_order=True))
    converted = convert(quantized, tmp_path)
    tokens, rows, loader = outputs(str(converted))
    assert "quantized" not in str(loader)
    assert (tokens, rows) == outputs(quantized)[:2]
    ids = torch.arange(50)[None]
    assert torch.equal(logits(converted, ids), logits(values, ids))


def test_the_architecture_of_a_quantized_checkpoint_need_not_be_installed(plain, tmp_path):
    quantized, values = write(plain, tmp_path, gptq())
    file = quantized / "config.json"
    config = json.loads(file.read_text("utf-8")) | {"architectures": ["AbsentForCausalLM"]}
    file.write_text(json.dumps(config), "utf-8")
    converted = convert(quantized, tmp_path)
    expect_equal(load_all(converted), load_file(values / "model.safetensors"))


def test_all_zero_biases_that_the_model_does_not_have_are_skipped(plain, tmp_path):
    def change(folder, value):
        tensors = load_file(folder / "model.safetensors")
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.full((64,), value)
        save_file(tensors, folder / "model.safetensors")

    quantized, _ = write(plain, tmp_path, gptq())
    change(quantized, 0.0)
    converted = convert(quantized, tmp_path)
    assert not any(name.endswith("bias") for name in load_all(converted))
    change(quantized, 1.0)
    other = load_all(convert(quantized, tmp_path, out=tmp_path / "other"))
    assert [name for name in other if name.endswith("bias")] == [
        "model.layers.0.self_attn.q_proj.bias"
    ]


def test_mxfp4_experts_are_dequantized_as_in_transformers(
    gpt_oss,  # noqa: F811  # the fixture
    tmp_path,
):
    quantized = write_mxfp4(gpt_oss, tmp_path, lambda _: None)
    converted = convert(quantized, tmp_path, max_shard_size="200KB")
    tensors = load_all(converted)
    assert tensors.keys() == load_file(gpt_oss / "model.safetensors").keys()
    assert (
        outputs(str(converted), skip_tokenizer_init=True)[:2]
        == (outputs(quantized, skip_tokenizer_init=True)[:2])
    )
    ids = torch.arange(40)[None]
    assert logits(converted, ids).isfinite().all()


@pytest.mark.parametrize(
    ("leaf", "value", "message"),
    [
        ("scales", None, r"q_proj\.scales is missing"),
        ("qzeros", torch.zeros(1, 1, dtype=torch.int32), r"q_proj\.qzeros has the shape \[1, 1\]"),
        ("g_idx", torch.full((64,), 99, dtype=torch.int32), r"q_proj\.g_idx names a group"),
    ],
)
def test_the_error_for_a_weight_that_cannot_be_dequantized_names_it(
    plain, tmp_path, leaf, value, message
):
    quantized, _ = write(plain, tmp_path, gptq())
    tensors = load_file(quantized / "model.safetensors")
    name = f"model.layers.0.self_attn.q_proj.{leaf}"
    tensors.pop(name, None)
    if value is not None:
        tensors[name] = value
    save_file(tensors, quantized / "model.safetensors")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(WeightError, match=message):
        convert(quantized, tmp_path)
    assert sorted(tmp_path.iterdir()) == before
