"""A quantized checkpoint is rejected if no linear method declares its format."""

import json

import pytest

from dovetail import LLM, SamplingParams
from dovetail.config import EngineArgs
from dovetail.engine.choice import explain_choice
from dovetail.errors import ModelError
from dovetail_torch.layers import TorchLinearMethod
from end_to_end.checkpoints import OPTIONS, SIZES

PLAIN = {"architectures": ["LlamaForCausalLM"], "vocab_size": 320, **SIZES}
DUMMY = OPTIONS | {"load_format": "dummy", "skip_tokenizer_init": True, "dtype": "float32"}
GPTQ = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
STATED = {
    "gptq": GPTQ,
    "awq": {"quantization_config": {"quant_method": "AWQ"}},
    "fp8": {"text_config": {"quantization_config": {"quant_method": "fp8"}}},
    "compressed-tensors": {"compression_config": {"format": "pack-quantized"}},
    "bitsandbytes": {"quantization_config": {"load_in_4bit": True}},
    "modelopt": {"quantization_config": {"quant_algo": "FP8", "producer": {"name": "modelopt"}}},
    "mlx": {"quantization": {"group_size": 64, "bits": 4}},
    "somebodys_own.v2": {"quantization_config": {"quant_method": "Somebodys_own.v2"}},
}
CONFIG_FILES = {
    "modelopt": ("hf_quant_config.json", {"quantization": {"quant_algo": "NVFP4"}}),
    "gptq": ("quantize_config.json", {"bits": 4, "group_size": 128}),
    "awq": ("quant_config.json", {"w_bit": 4, "q_group_size": 128}),
}
NOT_QUANTIZED = (
    {"quantization_config": None},
    {"quantization_config": {}},
    {"quantization_config": {"load_in_4bit": False, "load_in_8bit": False}},
    {"quantization": "none"},
)
HOSTILE = (
    "gptq",
    ["gptq"],
    7,
    True,
    {"quant_method": 7},
    {"quant_method": None, "bits": 4},
    {"quant_method": ""},
    {"quant_method": "a" * 10_000},
    {"quant_method": ["gptq"]},
    {"quant_method": "../../etc/passwd"},
)


class ReadsGPTQ(TorchLinearMethod):
    """A linear method that declares the format. Its dummy weights are not quantized."""

    provides = frozenset({"quantization.gptq"})


@pytest.fixture
def folder(tmp_path):
    def write(config=(), config_file=None):
        (tmp_path / "config.json").write_text(json.dumps(PLAIN | dict(config)))
        if config_file is not None:
            (tmp_path / config_file[0]).write_text(json.dumps(config_file[1]))
        return tmp_path

    return write


def rejected(path, method, **options):
    with pytest.raises(ModelError) as caught:
        LLM(path, **DUMMY, **options)
    text = str(caught.value)
    assert f"quantized with '{method}'" in text and "Installed methods and loaders: " in text
    return text


@pytest.mark.costly
@pytest.mark.parametrize("method", STATED)
def test_the_error_for_an_unsupported_quantization_format_names_it(folder, method):
    text = rejected(folder(STATED[method]), method)
    assert "config.json" in text and "torch" in text and '"quantization.' in text


@pytest.mark.parametrize("method", CONFIG_FILES)
def test_checkpoints_written_by_quantization_tools_are_read(folder, method):
    text = rejected(folder(config_file=CONFIG_FILES[method]), method)
    assert CONFIG_FILES[method][0] in text
    # An explicit null of the user means that the checkpoint is not quantized.
    LLM(folder(), **DUMMY, hf_overrides={"quantization_config": None}).llm_engine.shutdown()


def test_a_quantized_checkpoint_is_rejected_before_weights_are_opened(folder):
    options = {"load_format": "safetensors", "quantization": "torch"}
    with pytest.raises(ModelError, match=r"'gptq'.*'torch' does not read.*Installed methods"):
        LLM(folder(GPTQ), **{**DUMMY, **options})


@pytest.mark.parametrize("config", NOT_QUANTIZED)
def test_an_unquantized_checkpoint_is_accepted(folder, config):
    config = EngineArgs(model=folder(config)).create_engine_config()
    assert not config.model.quantization


@pytest.mark.parametrize("value", HOSTILE)
def test_the_error_for_an_invalid_quantization_field_names_it(folder, value):
    with pytest.raises(ModelError, match=r"config\.json: quantization_config(\.quant_method)? is"):
        EngineArgs(model=folder({"quantization_config": value})).create_engine_config()
    if isinstance(value, dict) and "bits" not in value:
        with pytest.raises(ModelError, match=r"quantize_config\.json: quant_method is"):
            path = folder(config_file=("quantize_config.json", value))
            EngineArgs(model=path).create_engine_config()


def test_a_linear_method_that_declares_the_format_runs_the_checkpoint(folder):
    with LLM(folder(GPTQ), **DUMMY, quantization=ReadsGPTQ) as llm:
        params = SamplingParams(max_tokens=2, ignore_eos=True)
        (output,) = llm.generate([[1, 2]], params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 2
    rejected(folder(STATED["awq"]), "awq", quantization=ReadsGPTQ)


def test_an_installed_linear_method_that_declares_the_format_is_selected_automatically(
    folder, monkeypatch
):
    monkeypatch.setattr(TorchLinearMethod, "provides", ReadsGPTQ.provides, raising=False)
    args = EngineArgs(model=folder(GPTQ), platform="cpu", dtype="float32")
    (chosen,) = explain_choice("linear_method", args).chosen
    assert chosen.name in ("onednn", "torch") and "quantized with gptq" in chosen.standing
    LLM(folder(GPTQ), **DUMMY).llm_engine.shutdown()


def test_explain_and_the_engine_give_the_same_reason_for_a_rejected_checkpoint(folder):
    with pytest.raises(ModelError, match="quantized with 'gptq'"):
        args = EngineArgs(model=folder(GPTQ), platform="cpu", load_format="dummy")
        explain_choice("linear_method", args)
