"""`bench/quality`: conversions of weights, errors of layers, and speeds for the plot."""

from pathlib import Path

import pytest
import torch
from quality import conversion, layers
from quality.conversion import model_path
from quality.formats import EVERY
from quality.job import JobError
from quality.texts import Text, TextError
from quality_plots import speeds

FORMATS = {item.name: item for item in EVERY}


@pytest.fixture
def commands(monkeypatch):
    """Replace conversion commands by a stub that creates their output file. Return the commands."""
    called = []

    def run_tool(command, deadline_s):
        called.append(command)
        words = [word for word in command if word.endswith(("int4", "q4_k", "q4_1"))]
        for path in filter(Path.is_absolute, map(Path, words)):
            path.parent.mkdir(exist_ok=True)
            path.touch()

    monkeypatch.setattr(conversion, "run_tool", run_tool)
    return called


def made_text(content):
    return Text(domain="d", sources="s", read=lambda: content, sha256="")


def test_formats_without_a_conversion_read_the_directory_or_the_file(commands, tmp_path):
    source, directory = tmp_path / "m.gguf", tmp_path / "off-grid"
    assert model_path(FORMATS["int8"], source, directory, "p") == directory
    assert model_path(FORMATS["GGUF file"], source, directory, "p") == source
    assert commands == []


def test_a_calibrated_format_is_converted_once_with_the_calibration_data(
    commands, monkeypatch, tmp_path
):
    monkeypatch.setattr(conversion, "CALIBRATION", [made_text("a" * 20_000), made_text("b" * 5)])
    monkeypatch.setattr(Text, "excerpt", Text.unchecked)
    source, directory = tmp_path / "m.gguf", tmp_path / "off-grid"
    path = tmp_path / "off-grid-dovetail" / "gptq-q4_k"
    for _ in range(2):
        assert model_path(FORMATS["q4_k, gptq"], source, directory, "/bin/python") == path
    text = path.with_name("calibration.txt")
    command = ["/bin/dovetail", "quantize", str(directory), "--method", "gptq"]
    command += ["--format", "q4_k", "--out", str(path), "--calibrate", str(text)]
    assert commands == [command]
    assert text.read_text() == "a" * conversion.CALIBRATION_CHARACTERS + "\nbbbbb"


def test_rounding_to_nearest_requires_no_calibration_data(commands, tmp_path):
    model_path(FORMATS["q4_1, rtn"], tmp_path, tmp_path / "off-grid", "/bin/python")
    assert "--calibrate" not in commands[0]


def test_the_error_for_missing_calibration_data_gives_the_reason(monkeypatch, tmp_path):
    def read():
        raise TextError("jinja2 is not installed")

    missing = Text(domain="d", sources="s", read=read, sha256="")
    monkeypatch.setattr(conversion, "CALIBRATION", [missing])
    with pytest.raises(JobError, match="jinja2 is not installed"):
        model_path(FORMATS["q4_k, gptq"], tmp_path, tmp_path / "off-grid", "/bin/python")


def test_only_openvino_int4_has_a_group_size(commands, tmp_path):
    for name in ("OpenVINO int4", "OpenVINO int8"):
        model_path(FORMATS[name], tmp_path, tmp_path / "off-grid", "/bin/python")
    four, eight = commands
    assert four[0] == "/bin/optimum-cli" and "--group-size" in four and "--group-size" not in eight


def test_layer_errors_of_eight_bits_are_smaller_than_those_of_four_bits():
    generator = torch.Generator().manual_seed(1)
    x_TI = torch.randn(16, 64, generator=generator)
    weight_OI = torch.randn(48, 64, generator=generator)
    by_name = {
        name: layers.layer_error(compute, x_TI, weight_OI)
        for name, compute in layers.formats().items()
    }
    assert list(by_name) == layers.format_names(has_llamacpp=False)
    assert 0 < by_name["int8"] < 0.02 < by_name["int4"] < 0.2
    assert 0 < by_name["Q8_0 rounding"] < by_name["Q4_0 rounding"] < 0.2
    assert layers.format_names(has_llamacpp=True)[: len(by_name)] == list(by_name)


def test_the_speed_of_a_format_is_the_median_for_one_request():
    def turn(engine, weights, value, case="decode1"):
        info = {"engine": engine, "weights": weights, "case": case, "value": value}
        return {**info, "round": value, "disturbed": False}

    turns = [turn("dovetail", "int4", value) for value in (10.0, 30.0, 20.0)]
    turns += [turn("llamacpp", "int4", 5.0), turn("openvino", "int8", 7.0, "conc16")]
    turns.append(turn("unknown", "int4", 9.0))
    assert speeds({"turns": turns}) == {"int4": 20.0, "llama.cpp Q4_0": 5.0}
