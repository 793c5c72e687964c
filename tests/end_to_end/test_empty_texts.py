"""Scores of empty texts, and the errors of texts without tokens, for each way to score pairs."""

from __future__ import annotations

import json

import pytest

from dovetail import LLM
from dovetail.errors import RequestError
from dovetail_devkit.tiny_encoder import NUM_POSITIONS, write_tiny_encoder

QUIET = {"dtype": "float32", "use_tqdm_on_load": False, "num_threads": 1}
KINDS = ("cross-encoder", "embedding", "late interaction")
CLS, SEP = 2, 3


def open_model(folder, kind, *, has_special_tokens=True):
    """Open a small model that scores pairs in one of `KINDS`."""
    write_tiny_encoder(folder, **{"num_labels": 1} if kind == "cross-encoder" else {})
    if kind == "late interaction":
        modules = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.Transformer"}]
        (folder / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
    if not has_special_tokens:
        file = folder / "tokenizer.json"
        content = json.loads(file.read_text("utf-8"))
        file.write_text(json.dumps({**content, "post_processor": None}), encoding="utf-8")
    options = {"pooling_type": "mean"} if kind == "embedding" else {}
    return LLM(str(folder), **options, **QUIET)


def scores(llm, queries, documents, **options):
    outputs = llm.score(queries, documents, use_tqdm=False, **options)
    return [None if output.outputs is None else output.outputs.score for output in outputs]


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_text_is_scored_by_its_special_tokens(kind, tmp_path):
    with open_model(tmp_path, kind) as llm:
        outputs = llm.score(["w1", "", ""], ["", "w1", ""], use_tqdm=False)
        (word,) = llm.llm_engine.tokenizer.encode("w1", add_special_tokens=False)
        alone = scores(llm, "w1", "w2")
        assert scores(llm, "w1", ["", "w2"])[1] == pytest.approx(alone[0], abs=1e-6)
    expected = {
        "cross-encoder": [[CLS, word, SEP, SEP], [CLS, SEP, word, SEP], [CLS, SEP, SEP]],
    }.get(kind, [[CLS, word, SEP, CLS, SEP], [CLS, SEP, CLS, word, SEP], [CLS, SEP, CLS, SEP]])
    assert [output.prompt_token_ids for output in outputs] == expected
    assert all(isinstance(output.outputs.score, float) for output in outputs)


@pytest.mark.parametrize("kind", KINDS)
def test_the_error_for_a_text_without_tokens_names_it_and_affects_no_other_request(kind, tmp_path):
    cases = {
        "documents[1]": (["w1", ""], ["w2", ""]) if kind == "cross-encoder" else ("w1", ["w2", ""]),
        "documents": ("", "") if kind == "cross-encoder" else ("w1", ""),
    }
    if kind != "cross-encoder":
        cases |= {"queries[0]": (["", "w1"], ["w2", "w3"]), "queries": ("", ["w1", "w2"])}
    with open_model(tmp_path, kind, has_special_tokens=False) as llm:
        for name, (queries, documents) in cases.items():
            with pytest.raises(RequestError, match="the prompt is empty") as caught:
                llm.score(queries, documents, use_tqdm=False)
            assert caught.value.parameter == name
            assert str(caught.value).startswith(f"{name}: ")
        (alone,) = scores(llm, "w1", "w2")
        first, second = llm.score(*cases["documents[1]"], use_tqdm=False, on_error="return")
        assert first.outputs.score == pytest.approx(alone, abs=1e-6)
        assert second.outputs is None and second.error.startswith("documents[1]: ")


@pytest.mark.parametrize("kind", KINDS[:2])
def test_the_error_for_a_text_that_is_too_long_or_cannot_be_tokenized_names_it(kind, tmp_path):
    with open_model(tmp_path, kind) as llm:
        for text in ("w1 " * NUM_POSITIONS, "w1" * 10**6, "\ud800", 5):
            with pytest.raises(RequestError) as caught:
                llm.score("w1", ["w2", text], use_tqdm=False)
            assert caught.value.parameter == "documents[1]"
            assert str(caught.value).startswith("documents[1]")
        outputs = llm.score("w1", ["\ud800", "w2"], use_tqdm=False, on_error="return")
        assert outputs[0].error.startswith("documents[0]")
        assert [outputs[1].outputs.score] == pytest.approx(scores(llm, "w1", "w2"), abs=1e-6)
        for options in ({"on_error": "ignore"}, {"use_tqdm": 1}):
            with pytest.raises(RequestError, match=next(iter(options))):
                llm.score("w1", "w2", **options)


def test_the_number_of_documents_is_limited(tmp_path):
    with open_model(tmp_path, "embedding") as llm:
        maximum = llm.llm_engine.config.limits.max_prompts
        with pytest.raises(RequestError, match="max_prompts") as caught:
            llm.score("w1", [""] * (maximum + 1), use_tqdm=False)
        assert caught.value.parameter == "documents"


class Unhashable(str):
    """A string whose own methods fail."""

    __slots__ = ()

    def __hash__(self):
        raise RuntimeError("the caller's method was called")

    __eq__ = __len__ = __hash__


def test_methods_of_subclasses_of_str_are_not_called(tmp_path):
    with open_model(tmp_path, "embedding") as llm:
        assert scores(llm, "w1", [Unhashable("w2")]) == scores(llm, "w1", "w2")
