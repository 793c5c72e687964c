"""Runs models of the transformers library in an engine. Code in a model directory is never run."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from transformers import (
    ArceeConfig,
    ArceeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
)
from transformers.models.arcee.modeling_arcee import ArceeMLP

from dovetail import LLM, SamplingParams
from dovetail.errors import (
    ConfigError,
    ModelError,
    PluginError,
    UnfitPluginError,
    WeightError,
)

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": 2,
}
PROMPT = [5, 9, 33, 8, 61, 12, 7]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return the path of a random model of an architecture without a native model."""
    return save(ArceeForCausalLM(ArceeConfig(**SIZES)), tmp_path_factory.mktemp("arcee"))


def save(model, path):
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(path)
    return path


@pytest.fixture
def changed(folder, tmp_path):
    """Return a function that returns a copy of the model with other fields in config.json."""

    def change(**fields):
        path = shutil.copytree(folder, tmp_path / "changed")
        file = path / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))
        return path

    return change


def generate(path, dtype="float32", **options):
    with LLM(
        str(path),
        dtype=dtype,
        skip_tokenizer_init=True,
        use_tqdm_on_load=False,
        max_model_len=64,
        num_gpu_blocks_override=20,
        num_threads=1,
        **options,
    ) as llm:
        model = llm.llm_engine.collective_rpc("get_model")[0]
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        (output,) = llm.generate([PROMPT], params, use_tqdm=False)
    return type(model).__name__, list(output.outputs[0].token_ids)


def expected(path, cls):
    ids = torch.tensor([PROMPT])
    model = cls.from_pretrained(path).eval()
    with torch.no_grad():
        done = model.generate(ids, max_new_tokens=6, min_new_tokens=6, do_sample=False)
    return done[0, len(PROMPT) :].tolist()


def test_an_architecture_without_a_native_model_is_served_by_transformers(folder):
    name, tokens = generate(folder)
    assert name == "TransformersForCausalLM"
    assert tokens == expected(folder, ArceeForCausalLM)


def test_model_impl_selects_the_implementation(tmp_path):
    path = save(LlamaForCausalLM(LlamaConfig(**SIZES)), tmp_path)
    name, tokens = generate(path, model_impl="transformers")
    assert name == "TransformersForCausalLM"
    assert tokens == expected(path, LlamaForCausalLM)
    assert generate(path) == ("LlamaForCausalLM", tokens)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"model_impl": "native"}, PluginError, "No installed plugin has a model"),
        ({"model_impl": "vllm"}, ConfigError, "must be one of auto, native, transformers"),
        ({"batch_invariant": True}, ConfigError, "batch_invariant"),
        ({"quantization": "int8"}, UnfitPluginError, "supports bfloat16"),
        ({"quantization": "int8", "dtype": "bfloat16"}, ModelError, "does not support quantized"),
    ],
)
def test_options_that_do_not_apply_are_rejected(folder, options, error, text):
    with pytest.raises(error, match=text):
        generate(folder, **options)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"model_type": "unheard_of"}, "no causal language model for model_type 'unheard_of'"),
        ({"architectures": ["OtherForCausalLM"]}, "is ArceeForCausalLM"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type is 'dynamic'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantiz"),
        ({"num_attention_heads": 5}, "transformers rejects it: .*attention heads"),
        (
            {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"},
            r"text_config: .*images.*its language model alone \(Gemma3ForCausalLM\)",
        ),
    ],
)
def test_errors_name_the_unsupported_feature(changed, fields, text):
    with pytest.raises((ModelError, ConfigError), match=text):
        generate(changed(**fields), model_impl="transformers")


@pytest.mark.parametrize(
    "fields", [{"model_type": "unheard_of"}, {"architectures": ["OtherForCausalLM"]}]
)
def test_a_model_that_neither_a_plugin_nor_transformers_supports_is_rejected(changed, fields):
    with pytest.raises(PluginError, match="No installed plugin has a model of the architecture"):
        generate(changed(**fields))


def test_a_model_that_combines_tokens_outside_of_attention_is_rejected(folder, monkeypatch):
    original = ArceeMLP.forward
    monkeypatch.setattr(ArceeMLP, "forward", lambda self, x: original(self, x + x.roll(1, dims=1)))
    with pytest.raises(ModelError, match="ArceeForCausalLM in transformers cannot be served"):
        generate(folder)


@pytest.mark.costly
@pytest.mark.parametrize("window", [None, 20, 100])
def test_a_sliding_window_that_exists_only_in_the_mask_is_rejected_if_effective(tmp_path, window):
    sizes = {**SIZES, "num_local_experts": 4, "sliding_window": window}
    path = save(PhimoeForCausalLM(PhimoeConfig(**sizes)), tmp_path)
    if window == 20:  # less than max_model_len
        with pytest.raises(ModelError, match="PhimoeForCausalLM in transformers cannot be served"):
            generate(path)
    else:
        assert generate(path)[0] == "TransformersForCausalLM"


def test_code_in_the_model_directory_is_never_run(changed):
    path = changed(auto_map={"AutoModelForCausalLM": "modeling.Model"})
    (path / "modeling.py").write_text("raise SystemExit('the code of a model was run')")
    assert generate(path)[0] == "TransformersForCausalLM"


def test_the_error_for_a_missing_weight_names_it(changed):
    with pytest.raises(WeightError, match=r"missing weights: model\.layers\.2"):
        generate(changed(num_hidden_layers=3))


def test_the_error_for_a_damaged_weight_file_names_it(changed):
    path = changed()
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(WeightError, match="cannot read the weights"):
        generate(path)
