"""GGUF files of encoders: pooling, damaged metadata and tensors, conversion and quantization."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from gguf import PoolingType
from gguf_files.encoder_vocabularies import add_encoder_vocabulary
from gguf_files.encoders import (
    BERT_CLASSIFIER,
    CLASSIFIER_CONVERSIONS,
    ENCODER_CONVERSIONS,
    write_encoder,
)
from gguf_files.families import CONVERSIONS, write_family
from torch.nn.functional import normalize

from dovetail import LLM
from dovetail.errors import ConfigError, ModelError, UserError, WeightError
from dovetail_convert.convert_options import ConvertOptions
from dovetail_convert.run import run
from dovetail_gguf.model_format import GGUFFormat
from parity.encoder_tokenizers import HOSTILE, save_tokenizer
from parity.family_checkpoints import make_model
from parity.test_gguf_encoders import embeddings, make_encoder, open_file
from parity.test_pooling_parity import make_prompts, states_of, vectors

MAX_SECONDS = 20.0
"""Much less time than a model of the size in the metadata would need."""
TOLERANCE = 1e-5


def write(folder, name="bert", model=None, **changes):
    conversion = ENCODER_CONVERSIONS[name]
    model = model or make_encoder(conversion)
    return write_encoder(conversion, model, folder / "model.gguf", **changes)


def rejected(path, message, error=ModelError):
    start = time.monotonic()
    with pytest.raises(error, match=re.escape(message)) as caught:
        open_file(path)
    assert time.monotonic() - start < MAX_SECONDS
    assert path.name in str(caught.value)


KEYS = [
    ("bert", {"block_count": None}, "bert.block_count is missing"),
    ("bert", {"block_count": 0}, "bert.block_count is 0; it must be"),
    ("bert", {"block_count": 2**31}, "no tensors of layer 3 (blk.3), but bert.block_count is"),
    ("bert", {"embedding_length": 0}, "bert.embedding_length is 0"),
    ("bert", {"embedding_length": 2**30}, "token_embd.weight has the shape"),
    ("bert", {"feed_forward_length": 2**31}, "blk.0.ffn_down.weight has the shape"),
    ("bert", {"feed_forward_length": None}, "bert.feed_forward_length is missing"),
    ("bert", {"attention.head_count": 0}, "bert.attention.head_count is 0"),
    ("bert", {"attention.head_count": 5}, "bert.attention.head_count is 5; it must be a divisor"),
    ("bert", {"attention.head_count": 2**31}, "bert.attention.head_count is 2147483648"),
    ("bert", {"attention.head_count_kv": 2}, "bert.attention.head_count_kv (2)"),
    ("bert", {"attention.causal": True}, "bert.attention.causal is true"),
    (
        "bert",
        {"attention.layer_norm_epsilon": None},
        "bert.attention.layer_norm_epsilon is missing",
    ),
    ("bert", {"attention.layer_norm_epsilon": float("nan")}, "layer_norm_epsilon is nan"),
    ("bert", {"context_length": 512}, "position_embd.weight has the shape [160, 64]"),
    ("bert", {"context_length": None}, "bert.context_length is missing"),
    ("bert", {"vocab_size": 10**6}, "bert.vocab_size is 1000000, but"),
    ("bert", {"tokenizer.ggml.token_type_count": 3}, "token_type_count is 3, but"),
    ("bert", {"pooling_type": 5}, "bert.pooling_type is 5; it must be 0 (none), 1 (mean)"),
    ("bert", {"pooling_type": "mean"}, "bert.pooling_type is 'mean'; it must be 0 (none)"),
    ("bert", {"pooling_type": True}, "bert.pooling_type is True"),
    ("bert", {"pooling_type": 4}, "bert.pooling_type is 4 (rank), but the file has no"),
    ("modern-bert", {"rope.freq_base": None}, "modern-bert.rope.freq_base is missing"),
    ("modern-bert", {"rope.scaling.type": "yarn"}, "modern-bert.rope.scaling.type is 'yarn'"),
    ("modern-bert", {"attention.sliding_window_pattern": 0}, "sliding_window_pattern is 0"),
    ("modern-bert", {"attention.sliding_window_pattern": [True]}, "or a list of 4 flags"),
    ("modern-bert", {"hidden_activation": "step"}, "modern-bert.hidden_activation is 'step'"),
    ("modern-bert", {"rope.dimension_count": 8}, "dimension_count is 8; it must be equal to"),
    ("nomic-bert", {"rope.freq_base": None}, "nomic-bert.rope.freq_base is missing"),
    ("nomic-bert", {"rope.dimension_count": 8}, "dimension_count is 8; it must be equal to"),
    ("nomic-bert", {"rope.scaling.factor": 4.0}, "nomic-bert.rope.scaling.type is 'linear'"),
    ("nomic-bert", {"rope.scaling.type": "yarn"}, "nomic-bert.rope.scaling.type is 'yarn'"),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "keys", "message"), KEYS)
def test_the_error_for_invalid_metadata_of_an_encoder_names_the_key(name, keys, message, tmp_path):
    rejected(write(tmp_path, name, keys=keys), message)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (["a", "b"], "bert.classifier.output_labels has 2 labels, but cls.output.weight has 3"),
        ([1, 2, 3], "bert.classifier.output_labels has 1, not a string"),
        ("abc", "bert.classifier.output_labels has no labels"),
    ],
)
def test_labels_that_contradict_the_classification_head_are_rejected(labels, message, tmp_path):
    conversion = CLASSIFIER_CONVERSIONS["roberta"]
    model = make_encoder(conversion, num_labels=3)
    keys = {"classifier.output_labels": labels}
    rejected(write_encoder(conversion, model, tmp_path / "model.gguf", keys=keys), message)


def without(*names):
    """Return a change of a file's tensors that removes those with these names."""

    def change(tensors):
        for name in names:
            del tensors[name]

    return change


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("token_embd.weight", ModelError),
        ("position_embd.weight", ModelError),
        ("blk.1.ffn_down.weight", ModelError),
        ("blk.1.attn_output.weight", ModelError),
        ("blk.2.attn_q.bias", WeightError),
        ("token_embd_norm.weight", WeightError),
    ],
)
def test_the_error_for_a_missing_tensor_of_an_encoder_names_it(name, error, tmp_path):
    rejected(write(tmp_path, change=without(name)), name.rpartition(".")[0], error)


SHAPES = [
    ("bert", "blk.0.attn_output.weight", (64,), "require 64 rows"),
    ("bert", "blk.0.ffn_down.weight", (1, 96), "require 64 rows"),
    ("bert", "token_types.weight", (2, 1), "require 64 columns"),
    ("bert", "token_types.weight", None, "token_type_count is 2, but token_types.weight has 0"),
    ("nomic-bert", "token_types.weight", None, "no tensor token_types.weight"),
    ("roberta", "cls.output.weight", (2, 1), "require 64 columns"),
]


@pytest.mark.parametrize(("name", "tensor", "shape", "message"), SHAPES)
def test_shapes_that_contradict_the_metadata_are_rejected_before_a_model_is_created(
    name, tensor, shape, message, tmp_path
):
    def change(tensors):
        del tensors[tensor]
        if shape is not None:
            tensors[tensor] = np.zeros(shape, np.float32)

    conversion = (CLASSIFIER_CONVERSIONS if name == "roberta" else ENCODER_CONVERSIONS)[name]
    model = make_encoder(conversion)
    path = write_encoder(conversion, model, tmp_path / "model.gguf", change=change)
    with pytest.raises(ModelError, match=re.escape(message)) as caught:
        GGUFFormat().describe(path)
    assert path.name in str(caught.value)


def test_an_unknown_tensor_of_an_encoder_is_rejected(tmp_path):
    def rename(tensors):
        tensors["blk.0.attn_norm.weight"] = tensors["blk.0.attn_output_norm.weight"]

    rejected(write(tmp_path, change=rename), "blk.0.attn_norm.weight", WeightError)


def test_a_classification_head_without_its_first_layer_is_rejected(tmp_path):
    """The converter omits the pooler of BERT, so the scores would be wrong."""
    model = make_encoder(BERT_CLASSIFIER, num_labels=1)
    path = write_encoder(BERT_CLASSIFIER, model, tmp_path / "model.gguf")
    rejected(path, "the classification head lacks cls.weight")


@pytest.mark.parametrize("name", ["jina-bert-v2", "nomic-bert-moe", "neo-bert"])
def test_the_error_for_an_unsupported_encoder_names_the_supported_ones(name, tmp_path):
    path = write(tmp_path)
    data = path.read_bytes()
    key = b"general.architecture" + (8).to_bytes(4, "little")
    start = data.index(key) + len(key)
    text = len(name).to_bytes(8, "little") + name.encode()
    path.write_bytes(data[:start] + text + data[start + 8 + len("bert") :])
    with pytest.raises(ModelError, match=f"'{name}', which is not supported") as caught:
        GGUFFormat().describe(path)
    assert "bert, modern-bert, nomic-bert" in str(caught.value)


def test_an_unstated_pooling_is_that_of_the_first_token_and_an_option_replaces_it(tmp_path):
    model, prompts = make_encoder(ENCODER_CONVERSIONS["bert"]), make_prompts()
    states = [states_of(model, ids) for ids in prompts]
    path = write(tmp_path, model=model)
    first = torch.stack([item[0] for item in states])
    torch.testing.assert_close(embeddings(path, prompts), first, rtol=0, atol=TOLERANCE)
    path = write(tmp_path, model=model, keys={"pooling_type": PoolingType.MEAN})
    last = torch.stack([item[-1] for item in states])
    actual = embeddings(path, prompts, pooling_type="last")
    torch.testing.assert_close(actual, last, rtol=0, atol=TOLERANCE)


def test_a_file_without_pooling_gives_a_vector_for_each_token(tmp_path):
    model, prompt = make_encoder(ENCODER_CONVERSIONS["bert"]), make_prompts()[0]
    path = write(tmp_path, model=model, keys={"pooling_type": PoolingType.NONE})
    with open_file(path) as llm:
        (output,) = llm.encode([prompt], pooling_task="token_embed", use_tqdm=False)
        with pytest.raises(UserError, match="embed"):
            llm.embed([prompt], use_tqdm=False)
    expected = normalize(states_of(model, prompt), dim=-1)
    torch.testing.assert_close(torch.tensor(output.outputs.data), expected, rtol=0, atol=TOLERANCE)


def test_a_stated_cls_pooling_replaces_the_mean_of_a_modern_bert_classifier(tmp_path):
    conversion, prompts = CLASSIFIER_CONVERSIONS["modern-bert"], make_prompts()
    model = make_encoder(conversion, classifier_pooling="cls")
    keys = {"pooling_type": PoolingType.CLS}
    path = write_encoder(conversion, model, tmp_path / "model.gguf", keys=keys)
    with torch.no_grad():
        expected = torch.stack([model(torch.tensor([ids])).logits[0] for ids in prompts])
    with open_file(path) as llm:
        actual = vectors(llm.reward(prompts, use_tqdm=False))
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE)


def test_the_head_of_a_masked_language_model_is_not_used(tmp_path):
    """The converter keeps a part of this head, under the names of a classification head."""
    model = make_encoder(ENCODER_CONVERSIONS["modern-bert"])
    extra = model.embeddings.tok_embeddings.weight.detach().numpy()[:64].copy()

    def add_head(tensors):
        tensors["cls.weight"], tensors["cls.norm.weight"] = extra, extra[0].copy()

    prompts = make_prompts()
    path = write(tmp_path, "modern-bert", model, change=add_head)
    expected = torch.stack([states_of(model, ids)[0] for ids in prompts])
    torch.testing.assert_close(embeddings(path, prompts), expected, rtol=0, atol=TOLERANCE)


def test_a_decoder_whose_file_states_its_pooling_is_an_embedding_model(tmp_path):
    conversion, prompts = CONVERSIONS["olmo2"], make_prompts()
    model = make_model(conversion.family, "olmo2", 0)
    path = tmp_path / "model.gguf"
    write_family(replace(conversion, keys={"pooling_type": 3}), model, path)
    expected = torch.stack([states_of(model.model, ids)[-1] for ids in prompts])
    actual = embeddings(path, prompts, dtype="float32")
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)
    write_family(replace(conversion, keys={"pooling_type": 4}), model, path)
    with pytest.raises(ModelError, match=r"olmo2\.pooling_type is 4 \(rank\)"):
        GGUFFormat().describe(path)


@pytest.mark.costly
@pytest.mark.parametrize(
    ("name", "cls", "tokenizer"),
    [
        ("bert", "BertModel", "bert, cased"),
        ("distilbert", "DistilBertModel", "bert, uncased"),
        ("xlm-roberta", "BertModel", "xlm-roberta"),
        ("modern-bert", "ModernBertModel", "modern-bert"),
        ("nomic-bert", "NomicBertModel", "bert, uncased"),
    ],
)
def test_a_converted_encoder_gives_the_same_states_in_transformers(name, cls, tokenizer, tmp_path):
    other = save_tokenizer(tokenizer, tmp_path)
    conversion = ENCODER_CONVERSIONS[name]
    model = make_encoder(conversion, vocab_size=len(other))
    path = write_encoder(
        conversion,
        model,
        tmp_path / "model.gguf",
        vocabulary=lambda writer: add_encoder_vocabulary(writer, tmp_path, pre="modern-bert"),
    )
    converted = tmp_path / "converted"
    run(str(path), ConvertOptions(out=converted, dtype="float32"), print)
    loaded, report = getattr(transformers, cls).from_pretrained(
        converted, output_loading_info=True, dtype="float32", **no_pooler(cls)
    )
    assert not any(report.values()), report
    own = transformers.PreTrainedTokenizerFast.from_pretrained(converted)
    for text in HOSTILE[:5]:
        ids = own.encode(text)
        assert ids == other.encode(text)
        expected, actual = states_of(model, ids[:100]), states_of(loaded, ids[:100])
        torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.costly
@pytest.mark.parametrize("name", ["MEAN", "LAST", "NONE"])
def test_a_converted_encoder_pools_as_its_file_states(name, tmp_path):
    prompts = make_prompts()
    path = write(tmp_path, keys={"pooling_type": PoolingType[name]})
    converted = tmp_path / "converted"
    options = ConvertOptions(out=converted, dtype="float32", skip_tokenizer_init=True)
    run(str(path), options, print)
    task = "token_embed" if name == "NONE" else "embed"
    results = []
    for model in (path, converted):
        with open_file(model) as llm:
            outputs = llm.encode(prompts, pooling_task=task, use_tqdm=False)
            results.append([torch.tensor(output.outputs.data) for output in outputs])
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=TOLERANCE)


def no_pooler(cls):
    return {"add_pooling_layer": False} if cls == "BertModel" else {}


@pytest.mark.parametrize(
    ("name", "family"), [("xlm-roberta", "Bert"), ("distilbert", "DistilBert")]
)
def test_a_converted_classifier_gives_the_same_classes_in_transformers(name, family, tmp_path):
    conversion, ids = CLASSIFIER_CONVERSIONS[name], make_prompts()[0]
    model = make_encoder(conversion, num_labels=2)
    keys = {"classifier.output_labels": ["no", "yes"]}
    path = write_encoder(conversion, model, tmp_path / "model.gguf", keys=keys)
    converted = tmp_path / "converted"
    options = ConvertOptions(out=converted, dtype="float32", skip_tokenizer_init=True)
    run(str(path), options, print)
    cls = getattr(transformers, f"{family}ForSequenceClassification")
    loaded, report = cls.from_pretrained(converted, output_loading_info=True, dtype="float32")
    assert not any(report.values()), report
    with torch.no_grad():
        actual, expected = (own(torch.tensor([ids])).logits for own in (loaded, model))
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE)
    assert json.loads((converted / "config.json").read_text("utf-8"))["id2label"]["1"] == "yes"


def test_the_quantize_command_rejects_an_encoder_by_name(tmp_path):
    from dovetail_quantize.quantize_options import QuantizeOptions
    from dovetail_quantize.run import run as quantize

    path = write(tmp_path)
    with pytest.raises((ModelError, ConfigError), match="BertModel"):
        quantize(str(path), QuantizeOptions(out=tmp_path / "out"), print)
    assert not (tmp_path / "out").exists()


def test_an_encoder_does_not_generate(tmp_path):
    with pytest.raises(ConfigError, match="supports only pooling"):
        LLM(str(write(tmp_path)), runner="generate", skip_tokenizer_init=True)
