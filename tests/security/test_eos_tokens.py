"""End-of-sequence ids in model files: invalid ids are rejected, unused ids are ignored."""

from __future__ import annotations

import json

import pytest
from security.engines import engine_options, open_llm

from dovetail import SamplingParams
from dovetail.errors import ModelError


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("token", [2**31, 2**33, [5, 2**33]])
def test_an_eos_token_beyond_all_token_ids_is_reported_at_startup(tmp_path, file, token):
    options = engine_options(tmp_path)
    path = tmp_path / file
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(known | {"eos_token_id": token}))
    with pytest.raises(ModelError, match="eos_token_id"):
        open_llm("in process", options)


@pytest.mark.parametrize("token", [300, [5, 2**31 - 1]])
def test_requests_are_served_if_an_eos_token_is_beyond_the_vocabulary(tmp_path, token, caplog):
    options = engine_options(tmp_path)
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": token}))
    with open_llm("in process", options) as llm:
        (output,) = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=8), use_tqdm=False)
    assert output.finished
    assert "eos_token_id [" in caplog.text and "it is ignored" in caplog.text
