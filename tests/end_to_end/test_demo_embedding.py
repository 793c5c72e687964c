"""The embedding model of the demo package: nearest neighbors, dimensions, equality."""

from __future__ import annotations

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from dovetail import LLM, PoolingParams
from dovetail.cli import main
from dovetail.errors import RequestError

sentences = pytest.importorskip("dovetail_demo_model.sentences")

NUM_PAIRS, SEED = 100, 71
QUIET = {"use_tqdm_on_load": False, "num_threads": 1}
DIMENSIONS = (16, 32, 64)


@pytest.fixture(scope="module")
def texts():
    return [text for pair in sentences.held_out_pairs(NUM_PAIRS, SEED) for text in pair]


@pytest.fixture(scope="module")
def model():
    with LLM("demo-embedding", **QUIET) as llm:
        yield llm


def embed(llm, texts, **params):
    outputs = llm.embed(texts, PoolingParams(**params), use_tqdm=False)
    return [output.outputs.embedding for output in outputs]


def test_a_chat_with_an_embedding_model_is_rejected_before_the_engine_starts(capsys):
    assert main(["chat", "--model", "demo-embedding"]) == 2
    message = " ".join(capsys.readouterr().err.split())
    assert "demo-embedding is a pooling model, which cannot generate text." in message


@pytest.mark.costly
@pytest.mark.parametrize("dimensions", DIMENSIONS)
def test_the_nearest_neighbor_of_a_held_out_sentence_has_the_same_meaning(model, texts, dimensions):
    vectors = embed(model, texts, dimensions=dimensions)
    assert {len(vector) for vector in vectors} == {dimensions}
    assert sentences.pair_accuracy(vectors) >= 0.9


@pytest.mark.costly
def test_random_weights_do_not_find_the_sentence_of_the_same_meaning(tmp_path, texts):
    from dovetail_demo_model import embedding_dir

    folder = tmp_path / "random"
    shutil.copytree(embedding_dir(), folder)
    generator = torch.Generator().manual_seed(3)
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        if weight.dim() == 2:
            weights[name] = torch.randn(weight.shape, generator=generator) * weight.std()
    save_file(weights, folder / "model.safetensors")
    with LLM(str(folder), **QUIET) as llm:
        assert sentences.pair_accuracy(embed(llm, texts)) < 0.1


def test_only_the_trained_sizes_are_accepted(model):
    with pytest.raises(RequestError, match="16, 32, 64") as caught:
        embed(model, ["a"], dimensions=24)
    assert caught.value.parameter == "dimensions"


def test_the_embeddings_equal_those_of_transformers(model, texts):
    transformers = pytest.importorskip("transformers")
    from dovetail_demo_model import embedding_dir

    tokenizer = transformers.AutoTokenizer.from_pretrained(embedding_dir())
    network = transformers.BertModel.from_pretrained(
        embedding_dir(), add_pooling_layer=False, dtype=torch.float32
    ).eval()
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    with torch.inference_mode():
        hidden_NLD = network(batch.input_ids, batch.attention_mask).last_hidden_state
    mask_NL1 = batch.attention_mask[..., None]
    expected = torch.nn.functional.normalize((hidden_NLD * mask_NL1).sum(1) / mask_NL1.sum(1))
    vectors = torch.tensor(embed(model, texts))
    torch.testing.assert_close(vectors, expected, rtol=0, atol=1e-5)
