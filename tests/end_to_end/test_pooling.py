"""Embeddings, classes and scores through all interfaces of the engine, and invalid requests."""

import asyncio
import json
import math

import pytest

from dovetail import LLM, AsyncLLM, PoolingParams
from dovetail.errors import ConfigError, ModelError, RequestError, UserError
from dovetail_devkit.tiny_encoder import HIDDEN, NUM_POSITIONS, make_texts, write_tiny_encoder

LONG = "w1 " * NUM_POSITIONS
QUIET = {"dtype": "float32", "use_tqdm_on_load": False, "num_threads": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_encoder(tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="module")
def cross_folder(tmp_path_factory):
    return write_tiny_encoder(tmp_path_factory.mktemp("cross"), num_labels=1)


@pytest.fixture(scope="module")
def encoder(folder):
    with LLM(str(folder), pooling_type="mean", **QUIET) as llm:
        yield llm


@pytest.fixture(scope="module")
def cross_encoder(cross_folder):
    with LLM(str(cross_folder), **QUIET) as llm:
        yield llm


def embed(llm, prompts, *arguments, **options):
    outputs = llm.embed(prompts, *arguments, use_tqdm=False, **options)
    return [output.outputs.embedding for output in outputs]


def test_an_embedding_does_not_depend_on_the_batch(encoder):
    texts = make_texts(40)
    together = embed(encoder, texts)
    for text, vector in list(zip(texts, together, strict=True))[::7]:
        assert embed(encoder, text)[0] == pytest.approx(vector, abs=1e-6)
        assert math.hypot(*vector) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(
    ("prompt", "params", "parameter"),
    [
        (LONG, None, "prompt"),
        ({"prompt_token_ids": []}, None, "prompt"),
        ({"prompt_token_ids": [10**6]}, None, "prompt"),
        ({"prompt_token_ids": ["w1"]}, None, "prompt"),
        (5, None, "prompt"),
        ("w1", PoolingParams(dimensions=HIDDEN + 1), "dimensions"),
        ("w1", PoolingParams(task="embed", second_text_start=3), "second_text_start"),
        ("w1", PoolingParams(task="score"), "task"),
        ("w1", "embed", "pooling_params"),
    ],
    ids=str,
)
def test_an_invalid_pooling_request_affects_only_itself(encoder, prompt, params, parameter):
    prompts = ["w1 w2", prompt, "w3"]
    each = [PoolingParams(), PoolingParams() if params is None else params, PoolingParams()]
    with pytest.raises(RequestError) as caught:
        embed(encoder, prompts, each)
    assert caught.value.parameter == parameter
    assert embed(encoder, ["w1 w2", "w3"])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("task", "generate"),
        ("task", 1),
        ("dimensions", 0),
        ("dimensions", True),
        ("normalize", "yes"),
        ("use_activation", 1),
        ("truncate_prompt_tokens", 0),
        ("truncate_prompt_tokens", -2),
        ("second_text_start", -1),
    ],
)
def test_the_error_for_an_invalid_pooling_parameter_names_it(field, value):
    with pytest.raises(RequestError) as caught:
        PoolingParams(**{field: value})
    assert caught.value.parameter == field


def test_a_truncated_text_keeps_its_first_tokens_and_the_last_special_token(encoder):
    whole = encoder.llm_engine.tokenizer.encode(LONG)
    (output,) = encoder.embed(LONG, PoolingParams(truncate_prompt_tokens=5), use_tqdm=False)
    assert output.prompt_token_ids == [*whole[:4], whole[-1]]
    (output,) = encoder.embed(LONG, PoolingParams(truncate_prompt_tokens=-1), use_tqdm=False)
    assert len(output.prompt_token_ids) == NUM_POSITIONS


def test_a_pooling_model_rejects_text_generation(encoder):
    message = "does not support text generation; it supports: embed, token_embed"
    with pytest.raises(UserError, match=message):
        encoder.generate("w1", use_tqdm=False)
    with pytest.raises(UserError, match=message):
        encoder.chat([{"role": "user", "content": "w1"}], use_tqdm=False)


@pytest.mark.costly
def test_a_generative_model_rejects_pooling_requests():
    with LLM("demo", use_tqdm_on_load=False) as llm:
        with pytest.raises(RequestError, match="it supports: generate"):
            llm.embed("a", use_tqdm=False)
        with pytest.raises(UserError, match="cannot score"):
            llm.score("a", "b", use_tqdm=False)
        assert llm.generate("a", use_tqdm=False)[0].outputs[0].token_ids


def test_an_embedding_model_scores_by_cosine_similarity(encoder):
    texts = make_texts(4)
    vectors = dict(zip(texts, embed(encoder, texts), strict=True))
    outputs = encoder.score(texts[0], texts[1:], use_tqdm=False)
    for text, output in zip(texts[1:], outputs, strict=True):
        cosine = sum(a * b for a, b in zip(vectors[texts[0]], vectors[text], strict=True))
        assert output.outputs.score == pytest.approx(cosine, abs=1e-6)
    for queries, documents in ((["a", "b"], ["c"]), ("a", [1]), (1, "a")):
        with pytest.raises(RequestError):
            encoder.score(queries, documents, use_tqdm=False)


@pytest.mark.parametrize("kind", ["encoder", "cross_encoder"])
def test_an_entry_that_is_not_a_string_does_not_affect_other_pairs(request, kind):
    llm = request.getfixturevalue(kind)
    query, first, second = make_texts(3)
    expected = [each.outputs.score for each in llm.score(query, [first, second], use_tqdm=False)]
    options = {"use_tqdm": False, "on_error": "return"}
    for queries, documents, error in (
        (query, [first, 5, second], "documents[1] must be a string."),
        ([query, None, query], [first, first, second], "queries[1] must be a string."),
    ):
        outputs = llm.score(queries, documents, **options)
        assert [each.outputs.score for each in outputs[::2]] == pytest.approx(expected, abs=1e-6)
        assert outputs[1].outputs is None and outputs[1].error == error
        with pytest.raises(RequestError) as caught:
            llm.score(queries, documents, use_tqdm=False)
        assert str(caught.value) == error
    for output in llm.score([5], [first, second], **options):
        assert output.error == "queries[0] must be a string."


def test_late_interaction_sums_the_maximum_similarity_of_each_query_token(folder, tmp_path):
    late = write_tiny_encoder(tmp_path / "late")
    modules = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.Transformer"}]
    (late / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
    query, document = make_texts(2)
    with LLM(str(late), **QUIET) as llm:
        assert llm.llm_engine.supported_tasks == ("token_embed",)
        outputs = llm.encode([query, document], use_tqdm=False)
        (output,) = llm.score(query, document, use_tqdm=False)
    first, second = (item.outputs.data for item in outputs)
    best = [max(sum(map(float.__mul__, a, b)) for b in second) for a in first]
    assert output.outputs.score == pytest.approx(sum(best), abs=1e-5)


def test_a_cross_encoder_scores_text_pairs(cross_encoder):
    query, *documents = make_texts(3)
    outputs = cross_encoder.score(query, documents, use_tqdm=False)
    for document, output in zip(documents, outputs, strict=True):
        ids = cross_encoder.llm_engine.tokenizer.encode(f"{query} [SEP] {document}")
        start = ids.index(3) + 1  # after the first [SEP]
        params = PoolingParams(task="score", second_text_start=start)
        (same,) = cross_encoder.encode({"prompt_token_ids": ids}, params, use_tqdm=False)
        assert output.prompt_token_ids == ids
        assert output.outputs.score == pytest.approx(same.outputs.score, abs=1e-6)
        assert 0 < output.outputs.score < 1


@pytest.mark.costly
def test_async_pooling_with_a_worker_process_gives_the_same_results(cross_folder, cross_encoder):
    texts = make_texts(6)

    async def run():
        options = {"executor_backend": "multiproc", **QUIET}
        async with AsyncLLM(model=str(cross_folder), **options) as llm:
            with pytest.raises(RequestError) as caught:
                await llm.score(LONG, texts)
            assert caught.value.parameter == "documents[0]"
            pooled = await asyncio.gather(*(llm.encode(text) for text in texts))
            return pooled, await llm.score(texts[0], texts[1:])

    pooled, scores = asyncio.run(run())
    classes = cross_encoder.classify(texts, use_tqdm=False)
    assert [output.outputs.data for output in pooled] == [
        pytest.approx(output.outputs.probs, abs=1e-6) for output in classes
    ]
    same = cross_encoder.score(texts[0], texts[1:], use_tqdm=False)
    assert [item.outputs.score for item in scores] == pytest.approx(
        [item.outputs.score for item in same], abs=1e-6
    )


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"runner": "generate"}, "runner"),
        ({"runner": "embedding"}, "runner"),
        ({"pooling_type": "max"}, "pooling_type"),
        ({"num_lookahead_tokens": 2}, "num_lookahead_tokens"),
        ({"max_model_len": NUM_POSITIONS + 1}, "max_model_len"),
    ],
    ids=str,
)
def test_the_error_for_an_option_that_conflicts_with_the_model_names_it(folder, options, word):
    with pytest.raises(ConfigError, match=word):
        LLM(str(folder), **QUIET, **options)


@pytest.mark.parametrize(
    "modules",
    [
        {},
        [],
        [1],
        [{"type": "os.system", "path": ""}],
        [{"type": "x.Transformer", "path": "../.."}],
        [{"type": "x.Pooling", "path": "missing"}],
        [{"type": "x.Normalize", "path": ""}, {"type": "x.Normalize", "path": ""}],
        [{"type": "x.Normalize", "path": ""}] * 17,
    ],
    ids=lambda modules: str(modules)[:60],
)
def test_the_error_for_invalid_modules_names_the_file(tmp_path, modules):
    folder = write_tiny_encoder(tmp_path)
    (folder / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
    with pytest.raises(ModelError, match=r"\.json"):
        LLM(str(folder), **QUIET)
