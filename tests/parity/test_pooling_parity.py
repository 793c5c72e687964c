"""Compares the results of pooling models with transformers and a direct pooling computation.

The models are small and have random weights. Prompts of different lengths are in one batch.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.nn.functional import normalize

from dovetail import LLM, PoolingParams
from dovetail.errors import ConfigError, ModelError
from parity.checkpoints import VOCAB_SIZE
from parity.rank_threads import TORCH_PARTS, RankThreads

SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 160,
    "pad_token_id": 1,
}
ENCODERS = (
    "BertModel",
    "DistilBertModel",
    "ModernBertModel",
    "NomicBertModel",
    "RobertaModel",
    "XLMRobertaModel",
)
CLASSIFIERS = (
    "BertForSequenceClassification",
    "DistilBertForSequenceClassification",
    "ModernBertForSequenceClassification",
    "RobertaForSequenceClassification",
    "XLMRobertaForSequenceClassification",
)
DECODER_CLASSIFIERS = (
    "Gemma2ForSequenceClassification",
    "LlamaForSequenceClassification",
    "MistralForSequenceClassification",
    "Phi3ForSequenceClassification",
    "Qwen2ForSequenceClassification",
    "Qwen3ForSequenceClassification",
)
_MODERN = {
    "bos_token_id": 0,
    "cls_token_id": 0,
    "eos_token_id": 2,
    "sep_token_id": 2,
    "local_attention": 24,
    "num_hidden_layers": 4,
}
_DISTIL = {"hidden_dim": 72}
_DECODER = {"num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 2}
FIELDS = {
    **{name: _DECODER for name in DECODER_CLASSIFIERS},
    "DistilBertModel": _DISTIL,
    "DistilBertForSequenceClassification": _DISTIL,
    "ModernBertModel": _MODERN,
    "ModernBertForSequenceClassification": _MODERN
    | {"attention_bias": True, "classifier_pooling": "mean", "mlp_bias": True, "norm_bias": True},
}
"""Fields of config.json besides `SIZES` and `_DECODER`."""
WITHOUT_NATIVE_NAME = {
    "BertForMaskedLM": {},
    "FalconModel": {},
    "Gemma3TextModel": _DECODER,
    "LlamaModel": _DECODER,
    "MistralModel": _DECODER,
    "ModernBertForMaskedLM": _MODERN,
    "Phi3Model": _DECODER,
    "XLMRobertaForMaskedLM": {},
}
"""Architectures that no plugin has, but a native model has their layers. Values: fields."""
PROMPT_LENS = (17, 1, 130, 17, 64, 3)
TOLERANCE = 1e-5
RAW = PoolingParams(task="embed", normalize=False)
POOLING_FOLDER = "1_Pooling"


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_oracle(name: str, folder: Path, **fields: Any) -> transformers.PreTrainedModel:
    """Create and save a transformers model. All its weights are random, norms and biases too."""
    cls = getattr(transformers, name)
    oracle = cls(cls.config_class(**SIZES | FIELDS.get(name, {}) | fields)).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in oracle.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            scale = 0.3 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5
            parameter.add_(noise * scale)
    oracle.save_pretrained(folder)
    return oracle


def make_prompts() -> list[list[int]]:
    source = random.Random(3)
    return [[source.randrange(2, VOCAB_SIZE) for _ in range(count)] for count in PROMPT_LENS]


def open_model(folder: Path, **options: Any) -> LLM:
    settings = {"dtype": "float32", "skip_tokenizer_init": True, "use_tqdm_on_load": False}
    return LLM(str(folder), num_threads=1, num_gpu_blocks_override=80, **settings | options)


@torch.no_grad()
def states_of(oracle: Any, prompt: list[int], **inputs: torch.Tensor) -> torch.Tensor:
    return oracle(input_ids=torch.tensor([prompt]), **inputs).last_hidden_state[0]


POOLING = {
    "cls": lambda states_TD: states_TD[0],
    "mean": lambda states_TD: states_TD.mean(0),
    "last": lambda states_TD: states_TD[-1],
}


def vectors(outputs: list[Any]) -> torch.Tensor:
    return torch.tensor([output.outputs.data for output in outputs])


@pytest.mark.costly
@pytest.mark.parametrize("pooling", POOLING)
@pytest.mark.parametrize("name", ENCODERS)
def test_embeddings_of_encoders_agree_with_transformers(tmp_path, name, pooling):
    oracle, prompts = make_oracle(name, tmp_path), make_prompts()
    expected = torch.stack([POOLING[pooling](states_of(oracle, prompt)) for prompt in prompts])
    with open_model(tmp_path, pooling_type=pooling) as llm:
        raw = vectors(llm.embed(prompts, RAW, use_tqdm=False))
        usual = vectors(llm.embed(prompts, use_tqdm=False))
        short = vectors(llm.embed(prompts, PoolingParams(dimensions=7), use_tqdm=False))
        each = llm.encode(prompts, pooling_task="token_embed", use_tqdm=False)
    torch.testing.assert_close(raw, expected, rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(usual, normalize(expected, dim=-1), rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(short, normalize(expected[:, :7], dim=-1), rtol=0, atol=TOLERANCE)
    for prompt, output in zip(prompts, each, strict=True):
        own = torch.tensor(output.outputs.data)
        states_TD = normalize(states_of(oracle, prompt), dim=-1)
        torch.testing.assert_close(own, states_TD, rtol=0, atol=TOLERANCE)


@pytest.mark.costly
@pytest.mark.parametrize("budget", [256, 24])
@pytest.mark.parametrize("pooling", POOLING)
def test_embeddings_of_a_decoder_agree_for_whole_and_chunked_prompts(tmp_path, pooling, budget):
    oracle = make_oracle("Qwen3Model", tmp_path, num_key_value_heads=2, head_dim=12)
    edit_json(tmp_path / "config.json", architectures=["Qwen3ForCausalLM"])
    prompts = make_prompts()
    prompts += [[*prompts[2], 5], prompts[2]]  # they share a prefix with another prompt
    expected = torch.stack([POOLING[pooling](states_of(oracle, prompt)) for prompt in prompts])
    options = {"runner": "pooling", "pooling_type": pooling, "max_num_batched_tokens": budget}
    with open_model(tmp_path, max_model_len=144, max_num_seqs=4, **options) as llm:
        raw = vectors(llm.embed(prompts, RAW, use_tqdm=False))
        again = llm.embed(prompts, RAW, use_tqdm=False)
        each = llm.encode(prompts[2], pooling_task="token_embed", use_tqdm=False)
    torch.testing.assert_close(raw, expected, rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(vectors(again), expected, rtol=0, atol=TOLERANCE)
    assert any(output.num_cached_tokens for output in again) == (pooling == "last")
    assert len(each[0].outputs.data) == len(prompts[2])


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", WITHOUT_NATIVE_NAME)
def test_checkpoints_of_a_decoder_or_encoder_with_another_head_are_embedded(tmp_path, name):
    oracle, prompts = make_oracle(name, tmp_path, **WITHOUT_NATIVE_NAME[name]), make_prompts()
    body = getattr(oracle, oracle.base_model_prefix, oracle)
    expected = torch.stack([states_of(body, prompt)[-1] for prompt in prompts])
    with open_model(tmp_path, pooling_type="last") as llm:
        raw = vectors(llm.embed(prompts, RAW, use_tqdm=False))
    torch.testing.assert_close(raw, expected, rtol=0, atol=TOLERANCE)


def test_a_nomic_bert_with_the_fields_of_published_checkpoints_is_embedded(tmp_path):
    oracle, prompts = make_oracle("NomicBertModel", tmp_path), make_prompts()
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    names = {
        "n_embd": "hidden_size",
        "n_inner": "intermediate_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_positions": "max_position_embeddings",
        "layer_norm_epsilon": "layer_norm_eps",
    }
    kept = ("architectures", "model_type", "vocab_size", "type_vocab_size")
    old = {name: config[name] for name in kept} | {new: config[own] for new, own in names.items()}
    old |= {"rotary_emb_base": config["rope_parameters"]["rope_theta"], "qkv_proj_bias": False}
    old |= {"activation_function": "swiglu", "causal": False, "prenorm": False}
    (tmp_path / "config.json").write_text(json.dumps(old), encoding="utf-8")
    expected = torch.stack([states_of(oracle, prompt).mean(0) for prompt in prompts])
    with open_model(tmp_path, pooling_type="mean") as llm:
        raw = vectors(llm.embed(prompts, RAW, use_tqdm=False))
        assert llm.llm_engine.max_model_len == 160
    torch.testing.assert_close(raw, expected, rtol=0, atol=TOLERANCE)
    for field, value in (("moe_every_n_layers", 2), ("causal", True), ("use_rms_norm", True)):
        edit_json(tmp_path / "config.json", **{field: value})
        with pytest.raises(ModelError, match=f"{field} is {value}"):
            open_model(tmp_path)
        edit_json(tmp_path / "config.json", **{field: None})


def test_the_error_for_an_architecture_that_does_not_pool_names_it(tmp_path):
    make_oracle("ElectraModel", tmp_path)
    with pytest.raises(ConfigError, match="'ElectraModel', and transformers' classes support"):
        open_model(tmp_path, runner="pooling")


@pytest.mark.costly
@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", CLASSIFIERS + DECODER_CLASSIFIERS)
@pytest.mark.parametrize("num_labels", [1, 3])
def test_classification_outputs_and_scores_agree_with_transformers(tmp_path, name, num_labels):
    oracle = make_oracle(name, tmp_path, num_labels=num_labels)
    prompts = make_prompts()
    with torch.no_grad():
        expected = torch.stack([oracle(torch.tensor([ids])).logits[0] for ids in prompts])
    options = {"max_num_batched_tokens": 24} if name in DECODER_CLASSIFIERS else {}
    with open_model(tmp_path, **options) as llm:
        raw = vectors(llm.reward(prompts, use_tqdm=False))
        probs = vectors(llm.classify(prompts, use_tqdm=False))
        tasks = llm.llm_engine.supported_tasks
    torch.testing.assert_close(raw, expected, rtol=0, atol=TOLERANCE)
    own = expected.sigmoid() if num_labels == 1 else expected.softmax(-1)
    torch.testing.assert_close(probs, own, rtol=0, atol=TOLERANCE)
    assert tasks == (("classify", "score", "reward") if num_labels == 1 else ("classify", "reward"))


@pytest.mark.costly
@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [*ENCODERS, *CLASSIFIERS, "Phi3ForSequenceClassification"])
def test_two_ranks_agree_with_transformers(tmp_path, name):
    oracle, prompts = make_oracle(name, tmp_path), make_prompts()
    has_classes = name not in ENCODERS
    with torch.no_grad():
        results = [oracle(torch.tensor([ids])) for ids in prompts]
    expected = torch.stack(
        [each.logits[0] if has_classes else each.last_hidden_state[0, 0] for each in results]
    )
    options = {"tensor_parallel_size": 2, "executor_backend": RankThreads, **TORCH_PARTS}
    with open_model(tmp_path, **options) as llm:
        outputs = llm.reward(prompts, use_tqdm=False) if has_classes else None
        outputs = outputs or llm.embed(prompts, RAW, use_tqdm=False)
    torch.testing.assert_close(vectors(outputs), expected, rtol=0, atol=TOLERANCE)


def test_the_second_text_of_a_pair_has_its_own_token_type(tmp_path):
    oracle = make_oracle("BertForSequenceClassification", tmp_path, num_labels=1)
    prompts, start = [ids for ids in make_prompts() if len(ids) > 3], 3
    expected = []
    for ids in prompts:
        types = torch.tensor([[0] * start + [1] * (len(ids) - start)])
        with torch.no_grad():
            expected.append(oracle(torch.tensor([ids]), token_type_ids=types).logits[0].sigmoid())
    params = PoolingParams(task="score", second_text_start=start)
    with open_model(tmp_path) as llm:
        scores = vectors(llm.encode(prompts, params, use_tqdm=False))
        plain = vectors(llm.encode(prompts, pooling_task="score", use_tqdm=False))
    torch.testing.assert_close(scores, torch.stack(expected), rtol=0, atol=TOLERANCE)
    assert (scores - plain).abs().max() > 100 * TOLERANCE, "the token types have no effect"


def test_the_modules_of_sentence_transformers_define_the_pooling(tmp_path):
    oracle, prompts = make_oracle("BertModel", tmp_path), make_prompts()
    generator = torch.Generator().manual_seed(5)
    weight_OI = torch.randn(20, 48, generator=generator) / 7
    bias_O = torch.randn(20, generator=generator)
    write_modules(tmp_path, "mean", dense={"linear.weight": weight_OI, "linear.bias": bias_O})
    expected = torch.stack(
        [torch.tanh(weight_OI @ states_of(oracle, ids).mean(0) + bias_O) for ids in prompts]
    )
    with open_model(tmp_path) as llm:
        pooled = vectors(llm.embed(prompts, use_tqdm=False))
        assert llm.llm_engine.max_model_len == 140
    torch.testing.assert_close(pooled, normalize(expected, dim=-1), rtol=0, atol=TOLERANCE)


def test_only_the_trained_embedding_dimensions_are_accepted(tmp_path):
    make_oracle("BertModel", tmp_path)
    edit_json(tmp_path / "config.json", matryoshka_dimensions=[8, 16])
    with open_model(tmp_path) as llm:
        output = llm.embed([[5, 6]], PoolingParams(dimensions=8), use_tqdm=False)
        assert len(output[0].outputs.embedding) == 8
        with pytest.raises(Exception, match="8, 16"):
            llm.embed([[5, 6]], PoolingParams(dimensions=9), use_tqdm=False)


def write_modules(folder: Path, mode: str, dense: dict[str, torch.Tensor]) -> None:
    from safetensors.torch import save_file

    name = "sentence_transformers.models"
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": f"{name}.Transformer"},
        {"idx": 1, "name": "1", "path": POOLING_FOLDER, "type": f"{name}.Pooling"},
        {"idx": 2, "name": "2", "path": "2_Dense", "type": f"{name}.Dense"},
        {"idx": 3, "name": "3", "path": "3_Normalize", "type": f"{name}.Normalize"},
    ]
    (folder / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
    for part in (POOLING_FOLDER, "2_Dense"):
        (folder / part).mkdir()
    pooling = {"word_embedding_dimension": 48, f"pooling_mode_{mode}_tokens": True}
    (folder / POOLING_FOLDER / "config.json").write_text(json.dumps(pooling), encoding="utf-8")
    out_features, in_features = dense["linear.weight"].shape
    config = {"in_features": in_features, "out_features": out_features, "bias": True}
    config["activation_function"] = "torch.nn.modules.activation.Tanh"
    (folder / "2_Dense" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(dense, folder / "2_Dense" / "model.safetensors")
    length = {"max_seq_length": 140, "do_lower_case": False}
    (folder / "sentence_bert_config.json").write_text(json.dumps(length), encoding="utf-8")


def edit_json(file: Path, **fields: Any) -> None:
    content = json.loads(file.read_text(encoding="utf-8")) | fields
    file.write_text(json.dumps(content), encoding="utf-8")
