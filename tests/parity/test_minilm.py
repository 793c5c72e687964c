"""Compares all-MiniLM-L6-v2, from its checkpoint and from GGUF files, with transformers."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import transformers
from assets import fetch
from gguf import GGMLQuantizationType, PoolingType
from gguf_files.encoder_vocabularies import add_encoder_vocabulary
from gguf_files.encoders import ENCODER_CONVERSIONS, write_encoder
from torch.nn.functional import normalize

from dovetail import LLM
from dovetail_gguf.tokenizer import GGUFTokenizer
from parity.encoder_tokenizers import HOSTILE, hostile_texts

TEXTS = (
    "A man is eating food.",
    "A man is eating a piece of bread.",
    "The girl is carrying a baby.",
    "Two men pushed carts through the woods.",
    "A cheetah is running behind its prey.",
    "Ünïcode — 東京 🙂 " * 12,
    "long " * 250,
)
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "minilm"
    shutil.copytree(fetch("minilm"), path, copy_function=shutil.copyfile)
    (path / "1_Pooling").mkdir()  # the asset has no directories
    pooling = {"word_embedding_dimension": 384, "pooling_mode_mean_tokens": True}
    (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling), encoding="utf-8")
    return path


@pytest.mark.soak
def test_all_minilm_embeddings_equal_those_of_transformers(folder):
    oracle = transformers.AutoModel.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        states = [oracle(**tokenizer(text, return_tensors="pt"))[0][0] for text in TEXTS]
    expected = normalize(torch.stack([states_TD.mean(0) for states_TD in states]), dim=-1)
    with LLM(str(folder), use_tqdm_on_load=False) as llm:
        assert llm.llm_engine.max_model_len == 256
        outputs = llm.embed(TEXTS, use_tqdm=False)
        scores = llm.score(TEXTS[0], TEXTS[1:5], use_tqdm=False)
    own = torch.tensor([output.outputs.embedding for output in outputs])
    torch.testing.assert_close(own, expected, rtol=0, atol=TOLERANCE)
    values = [output.outputs.score for output in scores]
    assert max(values) == values[0] > 0.7, "the sentence about bread is the nearest one"


def write_file(folder, path, type_):
    """Write the model to a GGUF file. Return the model with the values of the file."""
    model = transformers.AutoModel.from_pretrained(folder).eval()
    write_encoder(
        ENCODER_CONVERSIONS["bert"],
        model,
        path,
        type_,
        keys={"pooling_type": PoolingType.MEAN},
        vocabulary=lambda writer: add_encoder_vocabulary(writer, folder, pre="jina-v2-en"),
    )
    return model


def embed(path, **options):
    with LLM(str(path), use_tqdm_on_load=False, **options) as llm:
        outputs = llm.embed([*TEXTS, *HOSTILE], use_tqdm=False)
    return torch.tensor([output.outputs.embedding for output in outputs])


@pytest.mark.soak
@pytest.mark.parametrize("type_", ["F32", "F16", "Q8_0"])
def test_a_gguf_file_of_all_minilm_gives_the_embeddings_of_transformers(type_, folder, tmp_path):
    path = tmp_path / "model.gguf"
    model = write_file(folder, path, GGMLQuantizationType[type_])
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, model_max_length=512)
    with torch.no_grad():
        states = [
            model(**tokenizer(text, return_tensors="pt", truncation=True))[0][0].mean(0)
            for text in (*TEXTS, *HOSTILE)
        ]
    expected = normalize(torch.stack(states), dim=-1)
    torch.testing.assert_close(embed(path, dtype="float32"), expected, rtol=0, atol=TOLERANCE)
    if type_ == "F32":
        torch.testing.assert_close(embed(path), expected, rtol=0, atol=TOLERANCE)
    if type_ == "Q8_0":
        cosines = (embed(path) * expected).sum(-1)
        assert cosines.min() > 0.998, "the blocks are computed in bfloat16"


@pytest.mark.soak
def test_a_gguf_file_of_all_minilm_gives_the_embeddings_of_its_checkpoint(folder, tmp_path):
    write_file(folder, tmp_path / "model.gguf", GGMLQuantizationType.F32)
    actual = embed(tmp_path / "model.gguf", max_model_len=256)
    expected = embed(folder, max_model_len=256)
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.soak
def test_the_vocabulary_of_all_minilm_in_a_gguf_file_gives_the_same_tokens(folder, tmp_path):
    write_file(folder, tmp_path / "model.gguf", GGMLQuantizationType.F32)
    own = GGUFTokenizer.from_directory(tmp_path / "model.gguf")
    other = transformers.AutoTokenizer.from_pretrained(folder)
    for text in hostile_texts():
        assert own.encode(text) == other(text, truncation=False).input_ids, text
    for first, second in zip(HOSTILE, reversed(HOSTILE), strict=True):
        pair = other(first, second, truncation=False)
        types = pair.token_type_ids
        assert own.encode_pair(first, second) == (pair.input_ids, types.index(1))
