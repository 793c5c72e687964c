"""Decoders with a classification head in GGUF files are rejected, and the error names the key."""

from __future__ import annotations

import re

import numpy as np
import pytest
from gguf import GGUFWriter

from dovetail.errors import ModelError
from dovetail_gguf.model_config import read_pooling
from dovetail_gguf.reader import GGUFFile

HEAD = "cls.output.weight"


def write(path, *, pooling=None, labels=(), has_head=False):
    writer = GGUFWriter(path, "qwen3")
    if pooling is not None:
        writer.add_uint32("qwen3.pooling_type", pooling)
    if labels:
        writer.add_array("qwen3.classifier.output_labels", labels)
    writer.add_tensor(HEAD if has_head else "token_embd.weight", np.ones((2, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GGUFFile(path)


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({"pooling": 4}, "qwen3.pooling_type is 4 (rank)"),
        (
            {"pooling": 4, "labels": ["yes", "no"], "has_head": True},
            "qwen3.pooling_type is 4 (rank)",
        ),
        ({"labels": ["yes", "no"]}, "qwen3.classifier.output_labels is set"),
        ({"pooling": 3, "has_head": True}, f"the tensor {HEAD} exists"),
    ],
    ids=str,
)
def test_a_decoder_with_a_classification_head_is_rejected(fields, key, tmp_path):
    file = write(tmp_path / "reranker.gguf", **fields)
    with pytest.raises(ModelError, match=re.escape(key)) as caught:
        read_pooling(file)
    assert "reranker.gguf" in str(caught.value) and "original checkpoint" in str(caught.value)


@pytest.mark.parametrize(("pooling", "expected"), [(None, None), (0, None), (3, "last")])
def test_a_decoder_without_a_classification_head_has_the_pooling_of_the_file(
    pooling, expected, tmp_path
):
    assert read_pooling(write(tmp_path / "model.gguf", pooling=pooling)) == expected
