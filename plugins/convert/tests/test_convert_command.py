"""`dovetail convert` on model directories: shards, dtypes, files that are copied, options."""

import json
import os
import re
from pathlib import Path

import pytest
import torch
from conversions import UNUSUAL, convert, demo, load_all, make_model, same_bits
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from dovetail.cli import main
from dovetail.errors import WeightError
from dovetail_convert.convert_options import ConvertOptions

INDEX = "model.safetensors.index.json"


def test_every_tensor_is_bitwise_unchanged(tmp_path):
    model = make_model(tmp_path / "model")
    result = convert(model, tmp_path / "out", max_shard_size="300B")
    converted = load_all(tmp_path / "out")
    assert converted.keys() == UNUSUAL.keys()
    for name, value in UNUSUAL.items():
        assert same_bits(converted[name], value), name
    assert result.num_tensors == len(UNUSUAL)
    assert result.num_bytes == sum(value.nbytes for value in UNUSUAL.values())


def test_shards_are_numbered_limited_in_size_and_listed_in_the_index(tmp_path):
    model = make_model(tmp_path / "model")
    result = convert(model, tmp_path / "out", max_shard_size="300B")
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    count = len(files)
    assert count == result.num_files > 2
    names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    assert [file.name for file in files] == names
    index = json.loads((tmp_path / "out" / INDEX).read_text("utf-8"))
    placed = {name: file.name for file in files for name in load_file(file)}
    assert index == {"metadata": {"total_size": result.num_bytes}, "weight_map": placed}
    for file in files:
        tensors = load_file(file)
        assert sum(value.nbytes for value in tensors.values()) <= 300 or len(tensors) == 1
        with safe_open(file, "pt") as handle:
            assert handle.metadata() == {"format": "pt"}


def test_a_small_model_has_one_file_without_an_index(tmp_path):
    convert(make_model(tmp_path / "model"), tmp_path / "out")
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["config.json", "model.safetensors"]


@pytest.mark.costly
def test_the_demo_model_is_converted_and_gives_the_same_text(tmp_path):
    from dovetail import LLM, SamplingParams

    def answer(model):
        with LLM(str(model), dtype="float32", use_tqdm_on_load=False) as llm:
            params = SamplingParams(temperature=0, max_tokens=8, logprobs=3)
            (output,) = llm.generate("12 + 30 =", params, use_tqdm=False)
        item = output.outputs[0]
        rows = [{t: e.logprob for t, e in row.items()} for row in item.logprobs]
        return item.text, list(item.token_ids), rows

    convert("demo", tmp_path / "out", max_shard_size="1MB")
    source = Path(demo.model_dir())
    for name in ("config.json", "generation_config.json"):
        expected = json.loads((source / name).read_text("utf-8"))
        assert json.loads((tmp_path / "out" / name).read_text("utf-8")) == expected
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    converted = load_all(tmp_path / "out")
    for name, value in load_file(source / "model.safetensors").items():
        assert same_bits(converted[name], value)
    assert answer(tmp_path / "out") == answer("demo")


def test_the_dtype_option_casts_floating_point_tensors_and_changes_config_json(tmp_path):
    tensors = {k: v for k, v in UNUSUAL.items() if k not in ("eighth", "special")}
    model = make_model(tmp_path / "model", tensors, text_config={"dtype": "float64"})
    convert(model, tmp_path / "out", dtype="float16")
    converted = load_all(tmp_path / "out")
    for name, value in tensors.items():
        expected = value.half() if value.is_floating_point() else value
        assert same_bits(converted[name], expected), name
    config = json.loads((tmp_path / "out" / "config.json").read_text("utf-8"))
    assert (config["dtype"], config["text_config"]["dtype"]) == ("float16", "float16")


def test_the_old_name_of_the_dtype_is_kept(tmp_path):
    model = make_model(tmp_path / "model", {"x": torch.ones(2)})
    config = json.loads((model / "config.json").read_text("utf-8"))
    config["torch_dtype"] = config.pop("dtype")
    (model / "config.json").write_text(json.dumps(config), "utf-8")
    convert(model, tmp_path / "out", dtype="float32")
    config = json.loads((tmp_path / "out" / "config.json").read_text("utf-8"))
    assert config["torch_dtype"] == "float32" and "dtype" not in config


def test_infinite_values_in_a_checkpoint_are_kept_by_a_cast(tmp_path):
    model = make_model(tmp_path / "model", {"mask": torch.tensor([0.0, float("-inf")])})
    convert(model, tmp_path / "out", dtype="bfloat16")
    assert load_all(tmp_path / "out")["mask"].tolist() == [0.0, float("-inf")]


@pytest.mark.parametrize(
    ("tensor", "dtype", "message"),
    [
        (torch.tensor([1.0, 7e4]), "float16", r"weight bad has values outside of the range of fl"),
        (torch.ones(2).to(torch.float8_e5m2), "float32", r"weight bad has the dtype float8_e5m2"),
    ],
)
def test_values_that_a_dtype_cannot_represent_are_rejected(tmp_path, tensor, dtype, message):
    model = make_model(tmp_path / "model", {"good": torch.ones(3), "bad": tensor})
    with pytest.raises(WeightError, match=message):
        convert(model, tmp_path / "out", dtype=dtype)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_code_and_weights_of_other_formats_are_not_copied(tmp_path, capsys):
    model = make_model(tmp_path / "model", {"x": torch.ones(2)}, auto_map={"AutoModel": "code.A"})
    for name in ("code.py", "pytorch_model.bin", "notes.txt"):
        (model / name).write_text("text", "utf-8")
    convert(model, tmp_path / "out")
    assert "auto_map of config.json is not written" in capsys.readouterr().out
    assert not {"code.py", "pytorch_model.bin", "notes.txt"} & set(os.listdir(tmp_path / "out"))
    assert "auto_map" not in json.loads((tmp_path / "out" / "config.json").read_text("utf-8"))


def test_templates_and_modules_of_sentence_transformers_are_copied(tmp_path):
    model = make_model(tmp_path / "model", {"x": torch.ones(2)})
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}", "utf-8")
    modules = [
        {"type": "sentence_transformers.models.Transformer", "path": ""},
        {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"},
        {"type": "sentence_transformers.models.Dense", "path": "2_Dense"},
    ]
    (model / "modules.json").write_text(json.dumps(modules), "utf-8")
    dense = {"in_features": 8, "out_features": 4, "bias": False}
    configs = {"1_Pooling": {"pooling_mode_mean_tokens": True}, "2_Dense": dense}
    for name, config in configs.items():
        (model / name).mkdir()
        (model / name / "config.json").write_text(json.dumps(config), "utf-8")
    save_file({"linear.weight": torch.ones(4, 8)}, model / "2_Dense" / "model.safetensors")
    convert(model, tmp_path / "out")
    copied = [path for path in model.rglob("*") if path.is_file() and path.parent != model]
    assert len(copied) == 4
    for path in copied:
        assert (tmp_path / "out" / path.relative_to(model)).read_bytes() == path.read_bytes()


def test_tokenizer_files_are_omitted_with_skip_tokenizer_init(tmp_path):
    convert("demo", tmp_path / "out", skip_tokenizer_init=True)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"config.json", "generation_config.json", "model.safetensors"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dtype", "bfloat17"], r"--dtype=bfloat17 is not known. Did you mean 'bfloat16'\?"),
        (["--dtype", "int8"], r"--dtype=int8 is not known"),
        (["--max-shard-size", "5GG"], r"--max-shard-size=5GG must be a number of bytes"),
        (["--max-shard-size", "0"], r"--max-shard-size=0 must be"),
        (["--max-shard-size=-1GB"], r"--max-shard-size=-1GB must be"),
        (["--max-shard-size", "9" * 400], r"--max-shard-size=9{80} must be"),
        (["--max-shard-size", "5000TB"], r"--max-shard-size=5000TB must be"),
        (["--max-shard-size", "nan"], r"--max-shard-size=nan must be"),
        (["--revision", "main"], r"revision='main' is not valid for the local path"),
    ],
)
def test_the_error_for_an_invalid_option_names_it(tmp_path, capsys, options, message):
    out = tmp_path / "out"
    assert main(["convert", str(demo.model_dir()), "--out", str(out), *options]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("7", 7),
        ("7B", 7),
        ("2KB", 2000),
        ("1.5 MiB", 3 << 19),
        ("5gb", 5 * 10**9),
        ("1TiB", 1 << 40),
    ],
)
def test_sizes_have_decimal_and_binary_units(text, size):
    assert ConvertOptions(out=Path("out"), max_shard_size=text).max_shard_bytes == size


def test_the_command_states_what_it_saved(tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["convert", "demo", "--output", str(out), "--max-shard-size", "2MB"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"Saved to .*out: 47 tensors \(bfloat16\) in \d files, 7\.\d MB\.", printed)
