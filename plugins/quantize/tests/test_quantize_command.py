"""`dovetail quantize`: checkpoints of the demo model, their accuracy, and rejected options."""

import re
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from dovetail import LLM, SamplingParams
from dovetail.cli import main
from dovetail.cli.frame import output_directory
from dovetail.errors import ConfigError, DovetailError, ModelError
from dovetail_gguf.reader import GGUFFile
from dovetail_quantize import checkpoint, opened_model
from dovetail_quantize.quantize_command import quantize as command
from dovetail_quantize.quantize_options import QuantizeOptions
from dovetail_quantize.texts import built_in_text

demo = pytest.importorskip("dovetail_demo_model")


def test_the_error_for_a_model_in_an_option_says_that_it_is_an_argument(capsys):
    assert main(["quantize", "--model", "demo"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert 'Command "quantize" takes MODEL as an argument' in captured.err


def quantize(model, **options):
    return command(model, options=QuantizeOptions(**options))


@pytest.fixture
def text(tmp_path):
    """Return the path of a calibration text of about 1,000 tokens."""
    path = tmp_path / "calibration.txt"
    path.write_text(built_in_text(), "utf-8")
    return path


@pytest.fixture
def short_text(tmp_path):
    """Return the path of an evaluation text of about 400 tokens."""
    path = tmp_path / "evaluation.txt"
    path.write_text(built_in_text()[:1800], "utf-8")
    return path


def answers(model, **options):
    params = SamplingParams(temperature=0.0, max_tokens=12)
    with LLM(str(model), use_tqdm_on_load=False, **options) as llm:
        outputs = llm.generate(["the sea is", "12 + 30 ="], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def measurements(output):
    """Return the perplexity and the KL divergence after quantization."""
    (row,) = re.findall(r"^after +(\S+) +(\S+)", output, re.MULTILINE)
    return tuple(map(float, row))


def check_report(model, kind, capsys):
    """Check the printed report and the block types of the file. Serve the file in an engine."""
    printed = capsys.readouterr().out
    perplexity, kl = measurements(printed)
    assert perplexity > 1 and 0 < kl < 0.05
    layers = re.findall(rf"^layers\.(\d+)\.\S+ +{kind} +(0\.\d+)", printed, re.MULTILINE)
    assert len(layers) == 7 * (1 + max(int(number) for number, _ in layers))
    assert all(0 < float(error) < 0.2 for _, error in layers)
    types = {info.type.name for info in GGUFFile(model / "model.gguf").tensors.values()}
    assert types == {"F32", "Q8_0", kind}
    assert all(answers(model))


@pytest.mark.costly
def test_a_checkpoint_is_served_and_the_error_of_each_layer_is_reported(
    tmp_path, short_text, capsys
):
    out = tmp_path / "out"
    options = {"calibrate": short_text, "evaluate": short_text, "out": out, "report": True}
    assert quantize(str(demo.model_dir()), format="int8", **options) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["evaluation.txt", "out"]
    check_report(out, "Q8_0", capsys)


@pytest.mark.slow
def test_gptq_writes_a_checkpoint_of_four_bits_that_is_served(tmp_path, text, capsys):
    out = tmp_path / "out"
    model = str(demo.model_dir())
    assert quantize(model, method="gptq", calibrate=text, out=out, report=True) == 0
    check_report(out, "Q4_K", capsys)


@pytest.mark.slow
def test_gptq_and_awq_are_more_accurate_than_rounding_to_nearest(tmp_path, text, capsys):
    model = str(demo.model_dir())
    by_name = {}
    for method in ("rtn", "gptq", "awq"):
        quantize(
            model,
            method=method,
            format="int4",
            calibrate=None if method == "rtn" else text,
            evaluate=text,
            out=tmp_path / method,
        )
        _, by_name[method] = measurements(capsys.readouterr().out)
    assert by_name["gptq"] < 0.9 * by_name["rtn"]
    assert by_name["awq"] < by_name["rtn"]
    assert all(answers(tmp_path / "awq"))


@pytest.mark.slow
def test_layers_above_the_error_limit_are_kept_at_8_bits(tmp_path, text, capsys):
    out = tmp_path / "out"
    model = str(demo.model_dir())
    quantize(model, calibrate=text, out=out, max_layer_error=0.0, max_tokens=256)
    assert "layers are kept at 8 bits" in capsys.readouterr().out
    types = {info.type.name for info in GGUFFile(out / "model.gguf").tensors.values()}
    assert types == {"F32", "Q8_0"}


@pytest.mark.slow
def test_a_checkpoint_that_is_quantized_again_gives_the_same_tokens(tmp_path, capsys):
    """Quantizing an int8 model to int8 again does not change any weight."""
    out = tmp_path / "out"
    quantize(str(demo.model_dir()), format="int8", out=out, head="bfloat16")
    first = answers(out, dtype="float32")
    out_again = tmp_path / "again"
    quantize(str(out), format="int8", out=out_again, head="bfloat16")
    capsys.readouterr()
    assert answers(out_again, dtype="float32") == first


def damaged(folder, value):
    """Return a copy of the demo model with one damaged weight."""
    folder.mkdir()
    source = Path(demo.model_dir())
    for path in source.iterdir():
        if path.is_file() and path.suffix != ".safetensors":
            (folder / path.name).write_bytes(path.read_bytes())
    weights = load_file(source / "model.safetensors")
    name = next(name for name in weights if "down_proj" in name)
    weights[name][1, 2] = value
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder, name


def test_a_model_with_nan_weights_is_rejected_and_no_file_is_left(tmp_path, text):
    model, name = damaged(tmp_path / "model", float("nan"))
    with pytest.raises(DovetailError, match=re.escape(name) + "|NaN"):
        quantize(str(model), calibrate=text, out=tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["calibration.txt", "model"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "gptqq"}, r"--method=gptqq is not known.*gptq"),
        ({"format": "q5"}, r"--format=q5 is not known"),
        ({"head": "q9"}, r"--head=q9 is not known"),
        ({"method": "awq"}, r"--method=awq needs --calibrate"),
        ({"report": True}, r"--report needs --calibrate"),
        ({"max_tokens": 1}, r"--max-tokens must be between 256"),
        ({"damping": 0.0}, r"--damping must be greater than 0"),
        ({"max_layer_error": float("nan")}, r"--max-layer-error must be at least 0"),
        ({"damping": 0.1}, r"--damping has no effect without --method=gptq"),
        ({"max_layer_error": 0.1}, r"--max-layer-error has no effect without --calibrate"),
        (
            {"format": "int8", "calibrate": Path("missing.txt"), "max_layer_error": 0.1},
            r"--max-layer-error has no effect with --format=int8",
        ),
        ({"max_tokens": 512}, r"--max-tokens has no effect without --calibrate"),
        ({"calibrate": Path("missing.txt")}, r"--calibrate=missing.txt is not a file"),
        ({"evaluate": Path("missing.txt")}, r"--evaluate=missing.txt is not a file"),
    ],
)
def test_the_error_for_an_invalid_option_names_it(tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        quantize(str(demo.model_dir()), **{"out": tmp_path / "out", **options})
    assert not list(tmp_path.iterdir())


def test_calibration_data_that_is_too_short_or_not_utf_8_is_rejected(tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("the sea is deep", "utf-8")
    model = str(demo.model_dir())
    with pytest.raises(ConfigError, match=r"--calibrate: the text has \d+ tokens; at least 256"):
        quantize(model, calibrate=path, out=tmp_path / "out")
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"--calibrate=.* is not UTF-8 text"):
        quantize(model, calibrate=path, out=tmp_path / "out")
    assert [item.name for item in tmp_path.iterdir()] == ["short.txt"]


def test_an_existing_output_directory_is_rejected_and_kept(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(ConfigError, match=r"--out=.*out already exists"):
        quantize(str(demo.model_dir()), out=out)
    assert not list(out.iterdir())


@pytest.mark.parametrize("option", ["--out", "--output"])
def test_the_output_directory_has_the_option_of_convert_and_a_longer_name(option, tmp_path, capsys):
    assert main(["quantize", "demo", option, str(tmp_path)]) == 2
    assert re.search(r"--out=\S+ already exists", capsys.readouterr().err)


@pytest.mark.costly
def test_a_disk_without_enough_space_is_rejected_before_quantization(tmp_path, monkeypatch):
    usage = output_directory.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(output_directory.shutil, "disk_usage", lambda _: usage._replace(free=100))
    with pytest.raises(ConfigError, match=r"--out=.*MB are needed.*of free space"):
        quantize(str(demo.model_dir()), out=tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_disk_that_fills_while_writing_leaves_no_files(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "write_checkpoint", fail)
    with (
        pytest.raises(ConfigError, match=r"--out=.* cannot be written: No space left"),
        output_directory.new_directory("--out", tmp_path / "out") as folder,
    ):
        checkpoint.write_checkpoint(folder)
    assert not list(tmp_path.iterdir())


def test_the_sampling_defaults_of_a_model_are_kept(tmp_path):
    model, out = tmp_path / "model", tmp_path / "out"
    model.mkdir()
    out.mkdir()
    for name in ("generation_config.json", "tokenizer.json", "config.json"):
        (model / name).write_text(f'{{"name": "{name}"}}', "utf-8")
    checkpoint.copy_files(out, model)
    assert sorted(path.name for path in out.iterdir()) == [
        "generation_config.json",
        "tokenizer.json",
    ]
    assert "generation" in (out / "generation_config.json").read_text("utf-8")


def test_the_model_is_loaded_on_the_cpu_even_if_another_platform_would_be_selected(monkeypatch):
    settings = {}

    def record(model, **options):
        settings.update(options)
        raise ModelError(f"{model} is not loaded")

    monkeypatch.setattr(opened_model, "LLM", record)
    with pytest.raises(ModelError, match="not loaded"), opened_model.open_model("demo"):
        pass
    assert settings["platform"] == "cpu"


def test_an_architecture_that_gguf_files_do_not_describe_is_rejected(tmp_path):
    model, _ = damaged(tmp_path / "model", 0.0)
    config = (model / "config.json").read_text("utf-8")
    (model / "config.json").write_text(
        re.sub(r'"model_type": *"\w+"', '"model_type": "other"', config), "utf-8"
    )
    with pytest.raises(ModelError, match=r"model_type 'other' cannot be quantized. Supported: "):
        quantize(str(model), out=tmp_path / "out")
