"""Tests of GGUF files: the container, the description of the model, and its weights."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize as reference_dequantize
from gguf.quants import quantize

from dovetail.config import EngineArgs
from dovetail.config.model_directory import ModelDirectory
from dovetail.errors import ModelError
from dovetail_devkit import load_suite
from dovetail_gguf import GGUFFile, weight_loader
from dovetail_gguf.dequantize import dequantize
from dovetail_gguf.model_format import GGUFFormat
from dovetail_gguf.open_files import open_file
from dovetail_gguf.tensor_types import TENSOR_TYPES
from dovetail_gguf.weight_loader import restore_rows
from dovetail_torch.weights import Assignment

SIZES = {"block_count": 1, "context_length": 64, "embedding_length": 32}
HEADS, KV_HEADS, HEAD_DIM, FEED_FORWARD, VOCAB = 4, 2, 8, 64, 96


def write_file(
    path, *, architecture="llama", changes=None, type_=GGMLQuantizationType.Q4_1, split=0
):
    """Write a small model with random weights. split: tensors per part, or 0 for one file."""
    writer = GGUFWriter(path, architecture, split_max_tensors=split)
    values = SIZES | {
        "feed_forward_length": FEED_FORWARD,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "rope.dimension_count": HEAD_DIM,
    }
    for key, value in (values | (changes or {})).items():
        writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_uint32("tokenizer.ggml.eos_token_id", 2)
    generator = np.random.default_rng(0)
    hidden = SIZES["embedding_length"]
    shapes = {
        "token_embd.weight": (VOCAB, hidden),
        "output_norm.weight": (hidden,),
        "blk.0.attn_norm.weight": (hidden,),
        "blk.0.ffn_norm.weight": (hidden,),
        "blk.0.attn_q.weight": (HEADS * HEAD_DIM, hidden),
        "blk.0.attn_k.weight": (KV_HEADS * HEAD_DIM, hidden),
        "blk.0.attn_v.weight": (KV_HEADS * HEAD_DIM, hidden),
        "blk.0.attn_output.weight": (hidden, HEADS * HEAD_DIM),
        "blk.0.ffn_gate.weight": (FEED_FORWARD, hidden),
        "blk.0.ffn_up.weight": (FEED_FORWARD, hidden),
        "blk.0.ffn_down.weight": (hidden, FEED_FORWARD),
    }
    for name, shape in shapes.items():
        weight = generator.standard_normal(shape).astype(np.float32)
        if len(shape) == 1:
            writer.add_tensor(name, weight)
        else:
            writer.add_tensor(name, quantize(weight, type_), raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def small_file(tmp_path_factory):
    return write_file(tmp_path_factory.mktemp("gguf") / "small.gguf")


def test_the_format_meets_its_contract(small_file):
    load_suite("model_format")(GGUFFormat, files={"small.gguf": small_file.read_bytes()})


def test_the_configuration_comes_from_the_metadata(small_file):
    config = EngineArgs(small_file, skip_tokenizer_init=True).create_engine_config().model
    assert config.architecture == "LlamaForCausalLM"
    assert config.hf_config["num_key_value_heads"] == KV_HEADS
    assert config.hf_config["tie_word_embeddings"] is True
    assert config.generation_config["eos_token_id"] == (2,)
    assert config.quantization["config"]["types"] == {"Q4_1": 8}


@pytest.mark.costly
def test_the_front_end_reads_a_gguf_file_without_a_tensor_library(small_file):
    """torch and gguf take long to import, and the front end of a server does not need them."""
    program = (
        "import sys\n"
        "for name in ('torch', 'gguf'):\n"
        "    sys.modules[name] = None\n"
        "import dovetail_gguf.tokenizer\n"
        "from dovetail.config import EngineArgs\n"
        "EngineArgs(sys.argv[1], skip_tokenizer_init=True).create_engine_config()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, small_file], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_values_of_q8_0_are_computed_without_the_package_gguf(monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    row = np.array([2.0], np.float16).tobytes() + bytes([*range(31), 255])
    blocks = torch.frombuffer(bytearray(row), dtype=torch.uint8).view(1, 34)
    values = dequantize(blocks, TENSOR_TYPES[8], torch.bfloat16)
    assert values.tolist() == [[*(2 * number for number in range(31)), -2]]


def test_values_are_dequantized_into_the_memory_of_the_weight(small_file, monkeypatch):
    """Otherwise a large table is stored twice for a moment, and copied."""
    file, outputs = open_file(small_file), []
    info = file.tensors["token_embd.weight"]
    blocks_OB = torch.frombuffer(file.data(info.name), dtype=torch.uint8).view(VOCAB, -1)

    def recording(*arguments, **keywords):
        outputs.append(dequantize(*arguments, **keywords))
        return outputs[-1]

    monkeypatch.setattr(weight_loader, "dequantize", recording)
    target = Assignment(name="table", target=torch.empty(VOCAB, 32, dtype=torch.bfloat16))
    assert weight_loader._fill_part(info, target, blocks_OB, is_mapped=True)
    assert outputs[0].data_ptr() == target.target.data_ptr()
    assert torch.equal(target.target, dequantize(blocks_OB, info.type, torch.bfloat16))


def test_the_model_type_matches_the_gguf_architecture_of_files_with_a_sliding_window(tmp_path):
    """transformers selects the model class by model_type, not by the architecture."""
    expected = {0: ("LlamaForCausalLM", "llama"), 16: ("MistralForCausalLM", "mistral")}
    for window, (architecture, model_type) in expected.items():
        changes = {"attention.sliding_window": window}
        file = write_file(tmp_path / f"{window}.gguf", changes=changes)
        config = GGUFFormat().describe(file).config
        assert (config["architectures"], config["model_type"]) == ([architecture], model_type)


@pytest.mark.parametrize("window", [0, 16])
def test_a_mistral_file_without_a_sliding_window_has_full_attention(window, tmp_path):
    changes = {"attention.sliding_window": window} if window else {}
    file = write_file(tmp_path / "model.gguf", architecture="mistral", changes=changes)
    config = GGUFFormat().describe(file).config
    assert config["architectures"] == ["MistralForCausalLM"]
    assert config["sliding_window"] == (window or None)


def test_a_generation_config_next_to_the_file_has_the_sampling_defaults(tmp_path):
    file = write_file(tmp_path / "model.gguf")
    beside = tmp_path / "generation_config.json"
    beside.write_text('{"temperature": 0.6, "eos_token_id": 5}', "utf-8")
    directory = ModelDirectory.open(file)
    assert directory.generation_config == {"temperature": 0.6, "eos_token_id": (2,)}
    assert directory.notes == (f"{beside} has the sampling defaults of model.gguf.",)
    beside.write_text("[]", "utf-8")
    with pytest.raises(ModelError, match=re.escape(str(beside))):
        GGUFFormat().describe(file)


def test_the_error_for_an_unknown_gguf_architecture_names_it(tmp_path):
    file = write_file(tmp_path / "other.gguf", architecture="mamba")
    with pytest.raises(ModelError, match=r"'mamba', which is not supported"):
        GGUFFormat().describe(file)


def test_the_error_for_a_gguf_field_of_a_wrong_type_names_it(tmp_path):
    file = write_file(tmp_path / "wrong.gguf", changes={"context_length": 1 << 31})
    GGUFFormat().describe(file)
    data = bytearray(file.read_bytes())
    index = data.index(b"llama.context_length") + len(b"llama.context_length")
    data[index : index + 4] = (5).to_bytes(4, "little")  # read as int32, so the value is negative
    file.write_bytes(data)
    with pytest.raises(ModelError, match=r"llama\.context_length"):
        GGUFFormat().describe(file)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("block_count", 2, r"no tensors of layer 1 \(blk\.1\), but llama\.block_count is 2"),
        (
            "embedding_length",
            (1 << 31) - 1,
            r"token_embd\.weight.*llama\.embedding_length.*columns",
        ),
        ("feed_forward_length", 1 << 31, r"ffn_down\.weight.*llama\.feed_forward_length"),
        ("attention.head_count", 3, r"llama\.attention\.head_count is 3.*multiple of"),
        ("attention.head_count", 1 << 20, r"attn_output\.weight.*llama\.attention\.head_count"),
        ("attention.head_count_kv", 0, r"llama\.attention\.head_count_kv \(0\)"),
        ("attention.head_count_kv", 1, r"attn_k\.weight.*llama\.attention\.head_count_kv"),
        ("rope.dimension_count", 3, r"attn_k\.weight.*head size 3\)"),
        ("attention.key_length", 16, r"rope\.dimension_count is 8.*the head size 16"),
    ],
)
def test_metadata_that_contradicts_the_tensors_is_rejected(key, value, message, tmp_path):
    file = write_file(tmp_path / "contradiction.gguf", changes={key: value})
    with pytest.raises(ModelError, match=rf"(?s)contradiction\.gguf.*{message}"):
        GGUFFormat().describe(file)


@pytest.mark.parametrize(
    ("changes", "factor"),
    [
        ({"rope.scaling.factor": 4}, 4.0),
        ({"rope.scale_linear": 2}, 2.0),
        ({"rope.scaling.factor": 1}, None),
        ({}, None),
    ],
)
def test_a_rope_factor_without_a_type_is_linear_scaling(changes, factor, tmp_path):
    file = write_file(tmp_path / "model.gguf", changes=changes)
    scaling = GGUFFormat().describe(file).config.get("rope_scaling")
    assert scaling == (None if factor is None else {"rope_type": "linear", "factor": factor})


@pytest.mark.parametrize(
    "kind",
    [item for item in TENSOR_TYPES.values() if not item.is_plain],
    ids=lambda item: item.name,
)
def test_dequantized_values_equal_those_of_the_gguf_package(kind):
    generator = np.random.default_rng(1)
    rows = generator.integers(0, 256, (3, 2 * kind.num_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):  # random bytes contain infinite scales
        expected = reference_dequantize(rows, GGMLQuantizationType(kind.number))
    actual = dequantize(torch.from_numpy(rows), kind).numpy()
    assert np.array_equal(actual, expected.astype(np.float32), equal_nan=True)


def test_the_original_row_order_of_rotary_weights_is_restored():
    weight = torch.arange(HEADS * HEAD_DIM * 3).view(HEADS * HEAD_DIM, 3)
    halves = weight.reshape(HEADS, 2, HEAD_DIM // 2, 3)
    converted = halves.swapaxes(1, 2).reshape(weight.shape)
    assert torch.equal(restore_rows(converted, HEADS), weight)


def test_the_error_for_a_missing_gguf_tensor_names_it(small_file, tmp_path):
    data = small_file.read_bytes().replace(b"blk.0.attn_q.weight", b"blk.0.attn_x.weight")
    path = tmp_path / "renamed.gguf"
    path.write_bytes(data)
    assert "blk.0.attn_x.weight" in GGUFFile(path).tensors


def test_the_error_for_a_truncated_gguf_file_has_positions_in_the_file(small_file, tmp_path):
    data = small_file.read_bytes()
    last = max(GGUFFile(small_file).tensors.values(), key=lambda tensor: tensor.offset)
    end = last.offset + last.num_bytes
    path = tmp_path / "truncated.gguf"
    path.write_bytes(data[: end - 1])
    with pytest.raises(ModelError, match=f"ends at byte {end} of a file of {end - 1} bytes"):
        GGUFFile(path)


def test_an_unchanged_file_is_read_only_once(tmp_path):
    path = tmp_path / "model.gguf"
    write_file(path)
    os.utime(path, (1e9, 1e9))
    assert open_file(path) is open_file(path)


def test_a_changed_file_is_read_again(tmp_path):
    path = tmp_path / "model.gguf"
    write_file(path)
    os.utime(path, (1e9, 1e9))
    assert open_file(path).metadata["llama.context_length"] == 64
    write_file(path, changes={"context_length": 32})  # the same size
    assert open_file(path).metadata["llama.context_length"] == 32
    write_file(path, changes={"context_length": 16})  # within the resolution of the time stamp
    assert open_file(path).metadata["llama.context_length"] == 16


def test_a_removed_gguf_file_raises_a_model_error(tmp_path):
    path = tmp_path / "model.gguf"
    write_file(path)
    os.utime(path, (1e9, 1e9))
    open_file(path)
    path.unlink()
    with pytest.raises(ModelError, match=r"model\.gguf"):
        open_file(path)


def test_the_error_for_a_removed_part_names_the_part(tmp_path):
    write_file(tmp_path / "model.gguf", split=4)
    first, *others = sorted(tmp_path.glob("*.gguf"))
    for path in (first, *others):
        os.utime(path, (1e9, 1e9))
    open_file(first)
    others[-1].unlink()
    with pytest.raises(ModelError, match=re.escape(others[-1].name)):
        open_file(first)


def exchange(first, second):
    other = first.with_name("other")
    first.rename(other)
    second.rename(first)
    other.rename(second)


def test_parts_with_exchanged_names_are_rejected(tmp_path):
    write_file(tmp_path / "model.gguf", split=4)
    first, *others = sorted(tmp_path.glob("*.gguf"))
    exchange(*others[:2])
    with pytest.raises(ModelError, match=rf"{re.escape(others[0].name)} is not part 2.*split\.no"):
        open_file(first)


def test_the_error_for_an_exchanged_first_part_states_its_number(tmp_path):
    write_file(tmp_path / "model.gguf", split=4)
    first, second, *_ = sorted(tmp_path.glob("*.gguf"))
    exchange(first, second)
    message = r"{} has the name of part {}, but its split\.no is {}, not {}\. .*exchanged"
    for path, values in ((first, (1, 1, 0)), (second, (2, 0, 1))):
        with pytest.raises(ModelError, match=message.format(re.escape(path.name), *values)):
            open_file(path)


def test_the_error_for_another_part_names_the_first_part(tmp_path):
    write_file(tmp_path / "model.gguf", split=4)
    first, second, *_ = sorted(tmp_path.glob("*.gguf"))
    with pytest.raises(ModelError, match=rf"not the first part .*Pass {re.escape(first.name)}\."):
        open_file(second)
    first.unlink()
    with pytest.raises(ModelError, match=rf"first part {re.escape(first.name)} is missing\."):
        open_file(second)


def test_the_error_for_a_wrong_count_in_a_name_states_the_count(tmp_path):
    write_file(tmp_path / "model.gguf", split=4)
    first, *others = sorted(tmp_path.glob("*.gguf"))
    count = 1 + len(others)
    path = first.rename(tmp_path / "model-00001-of-00009.gguf")
    with pytest.raises(ModelError, match=rf"does not end in -NNNNN-of-{count:05}\.gguf"):
        open_file(path)


@pytest.mark.parametrize("name", ["mamba2", "qwen3next"])
def test_a_missing_recurrent_layer_is_rejected_before_layers_are_listed(name, tmp_path):
    """The types of the layers are a list, which is made only if all layers exist."""
    count = 300_000
    writer = GGUFWriter(tmp_path / "model.gguf", name)
    numbers = {"block_count": count, "attention.head_count": 4, "expert_used_count": 2}
    numbers |= {"expert_count": 4} if name == "qwen3next" else {}
    for key in ("embedding_length", "feed_forward_length", "context_length"):
        numbers[key] = 32
    for key, value in numbers.items():
        writer.add_uint32(f"{name}.{key}", value)
    writer.add_float32(f"{name}.attention.layer_norm_rms_epsilon", 1e-5)
    for tensor in ("token_embd.weight", f"blk.{count - 1}.attn_norm.weight"):
        writer.add_tensor(tensor, np.zeros((32, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"no tensor blk\.0\.attn_norm\.weight, but .*block_count"):
        GGUFFormat().describe(tmp_path / "model.gguf")


def refusal_of(directory):
    with pytest.raises(ModelError) as caught:
        EngineArgs(directory, skip_tokenizer_init=True).create_engine_config()
    assert len(str(caught.value).splitlines()) <= 2
    return str(caught.value)


def test_the_error_for_a_directory_with_several_models_says_to_specify_one(tmp_path):
    write_file(tmp_path / "model.gguf")
    write_file(tmp_path / "mmproj-model.gguf")
    message = refusal_of(tmp_path)
    assert f"{tmp_path} has no config.json, but it contains 2 files *.gguf." in message
    (tmp_path / "mmproj-model.gguf").unlink()
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    message = refusal_of(tmp_path)
    assert "has config.json, but no *.safetensors files; it contains 1 file *.gguf." in message
    assert repr(str(tmp_path / "model.gguf")) in message


def test_the_error_for_a_directory_without_the_first_part_says_that_it_is_missing(tmp_path):
    write_file(tmp_path / "model.gguf", split=4)
    first, *others = sorted(tmp_path.glob("*.gguf"))
    first.unlink()
    assert f"contains {len(others)} files *.gguf" in refusal_of(tmp_path)
    for path in others[1:]:
        path.unlink()
    assert f"The first part {first.name} is missing." in refusal_of(tmp_path)
