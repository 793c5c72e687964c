"""Embeddings are bitwise equal in every batch: encoders in bfloat16 on native kernels."""

from __future__ import annotations

import pytest

from dovetail import LLM
from dovetail_cpu.native_library import probe_fast
from dovetail_devkit.tiny_encoder import make_texts, write_tiny_encoder

pytest.importorskip("dovetail_attn_cpu")
pytest.importorskip("dovetail_models")
pytestmark = pytest.mark.skipif(not probe_fast().usable, reason="native kernels are not usable")


def embed(llm, texts):
    return [output.outputs.embedding for output in llm.embed(texts, use_tqdm=False)]


@pytest.mark.parametrize("num_threads", [1, 2])
def test_embeddings_do_not_depend_on_the_batch(tmp_path, num_threads):
    llm = LLM(
        str(write_tiny_encoder(tmp_path)),
        dtype="bfloat16",
        pooling_type="mean",
        batch_invariant=True,
        num_threads=num_threads,
    )
    texts = make_texts(20)
    alone = [embed(llm, [text])[0] for text in texts]
    assert embed(llm, texts) == alone
    assert embed(llm, texts[::-1]) == alone[::-1]
