"""Compares embeddings of all-MiniLM-L6-v2 with transformers and the pooling of its model card."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import transformers
from assets import fetch
from torch.nn.functional import normalize

from dovetail import LLM

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


@pytest.mark.soak
def test_all_minilm_embeddings_equal_those_of_transformers(tmp_path):
    folder = tmp_path / "minilm"
    shutil.copytree(fetch("minilm"), folder, copy_function=shutil.copyfile)
    (folder / "1_Pooling").mkdir()  # the asset has no directories
    pooling = {"word_embedding_dimension": 384, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling), encoding="utf-8")
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
