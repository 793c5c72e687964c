"""Tests of the training of the embedding model: the same seed gives the same files."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from dovetail_demo_model import embedding_dir

torch = pytest.importorskip("torch")
tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("transformers")

TRAINING = Path(__file__).parents[1] / "training"


@pytest.fixture
def training(monkeypatch):
    """Import the training script with small batches, for one thread."""
    names = {path.stem for path in TRAINING.glob("*.py")}
    monkeypatch.syspath_prepend(str(TRAINING))
    import train_embedding

    monkeypatch.setattr(train_embedding, "PAIRS", 4)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield train_embedding
    torch.set_num_threads(threads)
    for name in names:
        sys.modules.pop(name, None)


def test_the_training_script_builds_the_tokenizer_of_the_package(training):
    saved = tokenizers.Tokenizer.from_file(str(embedding_dir() / "tokenizer.json"))
    assert training.build_tokenizer().to_str() == saved.to_str()


@pytest.mark.costly
def test_two_runs_write_the_same_weights(training, tmp_path):
    tokenizer = training.build_tokenizer()
    for name in ("first", "second"):
        torch.manual_seed(training.SEED)
        network = training.build_network(tokenizer.get_vocab_size())
        start = network.embeddings.word_embeddings.weight.detach().clone()
        training.train(network, tokenizer, 2)
        assert not torch.equal(start, network.embeddings.word_embeddings.weight)
        training.export(network, tokenizer, tmp_path / name)
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("first", "second")]
    assert files[0] == files[1]


@pytest.mark.costly
def test_the_script_writes_the_configuration_of_the_package(training, tmp_path):
    tokenizer = training.build_tokenizer()
    training.export(training.build_network(tokenizer.get_vocab_size()), tokenizer, tmp_path)
    names = ("modules.json", "1_Pooling/config.json", "sentence_bert_config.json")
    for name in (*names, "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (embedding_dir() / name).read_bytes()
    own, saved = (json.loads((f / "config.json").read_text()) for f in (tmp_path, embedding_dir()))
    assert {**own, "transformers_version": ""} == {**saved, "transformers_version": ""}


def test_the_loss_is_small_only_if_pairs_are_the_most_similar(training):
    first_ND = torch.eye(4, training.HIDDEN_SIZE)
    assert training.contrastive_loss(first_ND, first_ND) < 1e-3
    assert training.contrastive_loss(first_ND, first_ND.flip(0)) > 10
