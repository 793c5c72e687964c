"""Compares encoders in GGUF files with transformers, and their tokenizers with those of the family.

The models are small and have random weights.
"""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
import transformers
from gguf import GGMLQuantizationType, PoolingType
from gguf_files.encoder_vocabularies import add_encoder_vocabulary, write_encoder_vocabulary
from gguf_files.encoders import (
    CLASSIFIER_CONVERSIONS,
    ENCODER_CONVERSIONS,
    EncoderConversion,
    write_encoder,
)
from torch.nn.functional import normalize

from dovetail import LLM
from dovetail_gguf.tokenizer import GGUFTokenizer
from parity.checkpoints import VOCAB_SIZE
from parity.encoder_tokenizers import HOSTILE, TOKENIZERS, hostile_texts, save_tokenizer
from parity.test_pooling_parity import POOLING, RAW, make_prompts, states_of, vectors

TOLERANCE = 1e-5
BLOCK_TOLERANCE = 0.05
"""The tolerance for blocks, because the kernels round the inputs of linear layers to 8 bits."""
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 160,
    "pad_token_id": 1,
}
LARGE = {"hidden_size": 256, "intermediate_size": 512}
"""Sizes of whole blocks of Q4_K."""
POOLING_TYPES = {"mean": PoolingType.MEAN, "cls": PoolingType.CLS, "last": PoolingType.LAST}
Q8_0, Q4_K, F16 = (
    GGMLQuantizationType.Q8_0,
    GGMLQuantizationType.Q4_K,
    GGMLQuantizationType.F16,
)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_encoder(conversion: EncoderConversion, **fields: object) -> torch.nn.Module:
    """Return a model with random weights, norms and biases too."""
    cls = getattr(transformers, conversion.model)
    model = cls(cls.config_class(**SIZES | dict(conversion.fields) | fields)).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise * (0.3 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5))
    return model


def open_file(path: Path, **options: object) -> LLM:
    settings = {"skip_tokenizer_init": True, "use_tqdm_on_load": False, "num_threads": 1}
    return LLM(str(path), platform="cpu", **settings | options)


def embeddings(path: Path, prompts: list[list[int]], **options: object) -> torch.Tensor:
    with open_file(path, **options) as llm:
        return vectors(llm.embed(prompts, RAW, use_tqdm=False))


@pytest.mark.sampled(9)
@pytest.mark.parametrize("pooling", POOLING_TYPES)
@pytest.mark.parametrize("name", ENCODER_CONVERSIONS)
def test_an_encoder_in_a_gguf_file_agrees_with_transformers(name, pooling, tmp_path):
    conversion, prompts = ENCODER_CONVERSIONS[name], make_prompts()
    model = make_encoder(conversion)
    path = tmp_path / "model.gguf"
    write_encoder(conversion, model, path, keys={"pooling_type": POOLING_TYPES[pooling]})
    expected = torch.stack([POOLING[pooling](states_of(model, ids)) for ids in prompts])
    torch.testing.assert_close(embeddings(path, prompts), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.costly
@pytest.mark.parametrize("name", CLASSIFIER_CONVERSIONS)
@pytest.mark.parametrize("num_labels", [1, 3])
def test_a_classifier_in_a_gguf_file_agrees_with_transformers(name, num_labels, tmp_path):
    conversion, prompts = CLASSIFIER_CONVERSIONS[name], make_prompts()
    model = make_encoder(conversion, num_labels=num_labels)
    labels = [f"label {number}" for number in range(num_labels)]
    path = write_encoder(
        conversion, model, tmp_path / "model.gguf", keys={"classifier.output_labels": labels}
    )
    with torch.no_grad():
        expected = torch.stack([model(torch.tensor([ids])).logits[0] for ids in prompts])
    with open_file(path) as llm:
        actual = vectors(llm.reward(prompts, use_tqdm=False))
        assert llm.llm_engine.config.model.hf_config["id2label"]["0"] == "label 0"
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["modern-bert", "roberta"])
def test_a_classifier_with_blocks_computes_the_mean_in_the_dtype_of_its_head(name, tmp_path):
    conversion, prompts = CLASSIFIER_CONVERSIONS[name], make_prompts()
    model = make_encoder(conversion, num_labels=3)
    path = write_encoder(conversion, model, tmp_path / "model.gguf", Q8_0)
    results = []
    for options in ({}, {"dtype": "float32"}):
        with open_file(path, pooling_type="mean", **options) as llm:
            results.append(vectors(llm.reward(prompts, use_tqdm=False)))
    difference = (results[0] - results[1]).norm() / results[1].norm()
    assert difference <= 2 * BLOCK_TOLERANCE


@pytest.mark.costly
@pytest.mark.sampled(3)
@pytest.mark.parametrize("type_", [Q8_0, Q4_K, F16], ids=lambda item: item.name)
@pytest.mark.parametrize("name", ["bert", "modern-bert"])
def test_an_encoder_computes_with_the_stored_values_of_its_file(name, type_, tmp_path, caplog):
    conversion, prompts = ENCODER_CONVERSIONS[name], make_prompts()
    model = make_encoder(conversion, **LARGE)
    path = tmp_path / "model.gguf"
    write_encoder(conversion, model, path, type_, keys={"pooling_type": PoolingType.MEAN})
    expected = torch.stack([states_of(model, ids).mean(0) for ids in prompts])
    exact = embeddings(path, prompts, dtype="float32")
    torch.testing.assert_close(exact, expected, rtol=0, atol=TOLERANCE)
    with caplog.at_level(logging.INFO):
        caplog.clear()
        actual = embeddings(path, prompts)
    if type_ != F16:
        assert f"dequantized tensors: 1 of type {type_.name}" in caplog.text, "only the embedding"
    difference = (actual - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert difference.max() <= BLOCK_TOLERANCE


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_tokenizer_of_an_encoder_equals_that_of_transformers(name, tmp_path):
    _, architecture, pre = TOKENIZERS[name]
    other = save_tokenizer(name, tmp_path)
    path = tmp_path / "model.gguf"
    write_encoder_vocabulary(tmp_path, path, architecture=architecture, pre=pre)
    own = GGUFTokenizer.from_directory(path)
    texts = hostile_texts()
    assert len(texts) >= 300
    num_types = set()
    for text in texts:
        ids = other.encode(text)
        assert own.encode(text) == ids, text
        assert own.encode(text, add_special_tokens=False) == other.encode(
            text, add_special_tokens=False
        )
        num_types.update(ids)
    assert len(num_types) > len(other) // 3, "the texts use a part of the vocabulary only"
    for first, second in zip(HOSTILE, reversed(HOSTILE), strict=True):
        pair = other(first, second)
        types = pair.get("token_type_ids", [0])
        ids, start = own.encode_pair(first, second)
        assert ids == pair["input_ids"]
        if "token_type_ids" in pair:
            assert start == (types.index(1) if 1 in types else 0)
    assert own.vocab_size == len(other)
    for key in ("cls_token", "sep_token", "pad_token", "mask_token"):
        assert own.special_tokens[key] == getattr(other, key)


def test_texts_are_embedded_and_scored_from_a_single_file(tmp_path):
    tokenizer = save_tokenizer("bert, uncased", tmp_path)
    conversion = ENCODER_CONVERSIONS["bert"]
    model = make_encoder(conversion, vocab_size=len(tokenizer), max_position_embeddings=512)
    path = write_encoder(
        conversion,
        model,
        tmp_path / "model.gguf",
        keys={"pooling_type": PoolingType.MEAN},
        vocabulary=lambda writer: add_encoder_vocabulary(writer, tmp_path, pre="jina-v2-en"),
    )
    texts = [text for text in hostile_texts()[:60] if len(tokenizer.encode(text)) <= 512]
    with torch.no_grad():
        states = [model(**tokenizer(text, return_tensors="pt"))[0][0].mean(0) for text in texts]
    expected = normalize(torch.stack(states), dim=-1)
    with open_file(path, skip_tokenizer_init=False) as llm:
        actual = vectors(llm.embed(texts, use_tqdm=False))
        scores = llm.score(texts[0], texts[1:4], use_tqdm=False)
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE)
    products = expected[1:4] @ expected[0]
    assert [item.outputs.score for item in scores] == pytest.approx(products.tolist(), abs=1e-5)


def test_a_cross_encoder_in_a_file_scores_pairs_of_texts(tmp_path):
    tokenizer = save_tokenizer("xlm-roberta", tmp_path)
    conversion = CLASSIFIER_CONVERSIONS["xlm-roberta"]
    model = make_encoder(
        conversion, vocab_size=len(tokenizer), max_position_embeddings=514, num_labels=1
    )
    path = write_encoder(
        conversion,
        model,
        tmp_path / "model.gguf",
        keys={"pooling_type": PoolingType.RANK},
        vocabulary=lambda writer: add_encoder_vocabulary(writer, tmp_path),
    )
    query, documents = (
        "Where is the library?",
        ["It is here. \t 東京", "no", "Nobody knows <mask>!"],
    )
    with torch.no_grad():
        expected = [
            model(**tokenizer(query, text, return_tensors="pt")).logits[0].sigmoid().item()
            for text in documents
        ]
    with open_file(path, skip_tokenizer_init=False) as llm:
        scores = llm.score(query, documents, use_tqdm=False)
    assert [item.outputs.score for item in scores] == pytest.approx(expected, abs=1e-5)
