"""The routes of pooling models, with an encoder that has random weights."""

import base64
import json
import struct

import pytest

from dovetail import LLM
from dovetail_devkit.tiny_encoder import HIDDEN, NUM_POSITIONS, make_texts, write_tiny_encoder

pytestmark = pytest.mark.costly  # the tests share servers

LONG = "w1 " * NUM_POSITIONS
QUIET = {"dtype": "float32", "num_threads": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_encoder(tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="module")
def pooling(serving, folder):
    options = ("--dtype", "float32", "--num-threads", "1", "--served-model-name", "tiny")
    with serving("--model", str(folder), *options) as running:
        yield running.wait_until_ready()


@pytest.fixture(scope="module")
def expected(folder):
    """Return the embeddings of ten texts, by text."""
    texts = make_texts(10)
    with LLM(str(folder), use_tqdm_on_load=False, **QUIET) as llm:
        outputs = llm.embed(texts, use_tqdm=False)
        tokens = [llm.llm_engine.tokenizer.encode(text) for text in texts]
    vectors = [output.outputs.embedding for output in outputs]
    return dict(zip(texts, zip(tokens, vectors, strict=True), strict=True))


def near(vector):
    return pytest.approx(vector, abs=1e-5)


@pytest.mark.parametrize("form", ["texts", "tokens", "base64"])
def test_embeddings_equal_those_of_the_offline_engine(pooling, expected, form):
    texts = [tokens if form == "tokens" else text for text, (tokens, _) in expected.items()]
    encoding = "base64" if form == "base64" else "float"
    reply = pooling.post("/v1/embeddings", {"input": texts, "encoding_format": encoding}).json
    assert [item["index"] for item in reply["data"]] == list(range(len(texts)))
    for item, (_, vector) in zip(reply["data"], expected.values(), strict=True):
        own = item["embedding"]
        if form == "base64":
            own = struct.unpack(f"<{HIDDEN}f", base64.b64decode(own))
        assert own == near(vector) and item["object"] == "embedding"
    num_tokens = sum(len(tokens) for tokens, _ in expected.values())
    assert reply["usage"]["prompt_tokens"] == reply["usage"]["total_tokens"] == num_tokens
    assert reply["model"] == "tiny" and reply["object"] == "list"


def test_the_dimensions_field_keeps_the_first_features(pooling, expected):
    text, (tokens, vector) = next(iter(expected.items()))
    length = sum(value * value for value in vector[:4]) ** 0.5
    for prompt in (text, tokens):
        body = {"input": prompt, "dimensions": 4}
        (item,) = pooling.post("/v1/embeddings", body).json["data"]
        assert item["embedding"] == near([value / length for value in vector[:4]])
        (item,) = pooling.post("/pooling", body).json["data"]
        assert item["data"] == near([value / length for value in vector[:4]])
    body = {"input": LONG, "truncate_prompt_tokens": 3}
    assert pooling.post("/v1/embeddings", body).json["usage"]["prompt_tokens"] == 3


def test_scores_and_ranks_are_computed_from_cosine_similarities(pooling, expected):
    (query, (_, own)), *others = expected.items()
    documents = [text for text, _ in others]
    cosines = [sum(a * b for a, b in zip(own, vector, strict=True)) for _, (_, vector) in others]
    reply = pooling.post("/v1/score", {"text_1": query, "text_2": documents}).json
    assert [item["score"] for item in reply["data"]] == near(cosines)
    ranks = {"query": query, "documents": [documents[0], {"text": documents[1]}, documents[2]]}
    reply = pooling.post("/v1/rerank", {**ranks, "top_n": 2}).json
    for path in ("/v2/rerank", "/rerank"):
        same = pooling.post(path, {**ranks, "top_n": 2, "max_tokens_per_doc": 4096}).json
        assert same["results"] == reply["results"]
    order = sorted(range(3), key=lambda index: -cosines[index])[:2]
    assert [item["index"] for item in reply["results"]] == order
    assert [item["document"]["text"] for item in reply["results"]] == [
        documents[index] for index in order
    ]
    assert [item["relevance_score"] for item in reply["results"]] == near(
        [cosines[index] for index in order]
    )


def test_empty_texts_are_scored_by_their_special_tokens(pooling):
    vectors = pooling.post("/v1/embeddings", {"input": ["w1", [2, 3]]}).json["data"]
    cosine = sum(a * b for a, b in zip(*(item["embedding"] for item in vectors), strict=True))
    reply = pooling.post("/v1/score", {"text_1": "w1", "text_2": ["", "w1"]}).json
    assert [item["score"] for item in reply["data"]] == near([cosine, 1])
    reply = pooling.post("/v1/rerank", {"query": "", "documents": ["w1", ""]}).json
    assert [item["relevance_score"] for item in reply["results"]] == near([1, cosine])
    assert [item["index"] for item in reply["results"]] == [1, 0]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {}, "input"),
        ("/v1/embeddings", {"input": 1}, "input"),
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": [[]]}, "input"),
        ("/v1/embeddings", {"input": ["w1", 1]}, "input[1]"),
        ("/v1/embeddings", {"input": ["w1", LONG]}, "input[1]"),
        ("/v1/embeddings", {"input": [[1], [10**9]]}, "input[1]"),
        ("/v1/embeddings", {"input": ["w1"] * 2049}, "input"),
        ("/v1/embeddings", {"input": "w1", "dimensions": 0}, "dimensions"),
        ("/v1/embeddings", {"input": "w1", "dimensions": HIDDEN + 1}, "dimensions"),
        ("/v1/embeddings", {"input": "w1", "encoding_format": "hex"}, "encoding_format"),
        ("/v1/embeddings", {"input": "w1", "normalize": "yes"}, "normalize"),
        ("/v1/embeddings", {"input": "w1", "model": "another"}, "model"),
        ("/pooling", {"input": "w1", "task": "classify"}, "task"),
        ("/pooling", {"input": "w1", "use_activation": True}, "use_activation"),
        ("/v1/score", {"text_1": "w1"}, "text_2"),
        ("/v1/score", {"text_1": ["w1", "w2"], "text_2": ["w3"]}, "text_1"),
        ("/v1/score", {"text_1": "w1", "text_2": ["w3", 1]}, "text_2[1]"),
        ("/v1/score", {"text_1": "w1", "text_2": LONG}, "text_2"),
        ("/v1/score", {"text_1": "w1", "text_2": ["", LONG]}, "text_2[1]"),
        ("/v1/score", {"text_1": [LONG, ""], "text_2": ["w1", "w2"]}, "text_1[0]"),
        ("/v1/rerank", {"query": "w1", "documents": ["", {"text": LONG}]}, "documents[1]"),
        ("/v1/rerank", {"query": LONG, "documents": ["w1", "w2"]}, "query"),
        ("/v1/rerank", {"query": "w1", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "w1", "documents": "w1"}, "documents"),
        ("/v1/rerank", {"query": "w1", "documents": ["w1", 1]}, "documents[1]"),
        ("/v1/rerank", {"query": "w1", "documents": [{}]}, "documents[0]"),
        ("/v1/rerank", {"query": "w1", "documents": ["w1"], "top_n": 0}, "top_n"),
        ("/v1/rerank", {"query": ["w1"], "documents": ["w1"]}, "query"),
        ("/classify", {"input": "w1"}, "model"),
        ("/v1/completions", {"prompt": "w1"}, "model"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "w1"}]}, "model"),
    ],
    ids=str,
)
def test_the_error_of_a_pooling_route_names_the_invalid_field(pooling, path, body, param):
    reply = pooling.post(path, body)
    assert reply.status in (400, 404), reply.content
    assert reply.error["param"] == param and reply.error["code"]
    assert path not in ("/v1/score", "/v1/rerank") or param in reply.error["message"]
    if LONG in json.dumps(body):
        assert reply.error["code"] == "context_length_exceeded"
        assert "pass a list" not in reply.error["message"]
    assert pooling.post("/v1/embeddings", {"input": "w1"}).status == 200


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (
            "/v1/score",
            {"text_1": ["w1", "w2"], "text_2": "w3"},
            "text_1 has 2 strings, but text_2 has 1; text_1 must have 1 string, or as many as "
            "text_2.",
        ),
        (
            "/rerank",
            {"query": "w1", "documents": "w1"},
            "documents must be a list of 1 to 2048 documents, each a string or an object with a "
            'string "text".',
        ),
        (
            "/rerank",
            {"query": "w1", "documents": ["w1", 1]},
            'documents[1] must be a string, or an object with a string "text".',
        ),
    ],
    ids=["score", "a string as documents", "a number as a document"],
)
def test_the_error_of_a_pooling_route_says_what_is_accepted(pooling, path, body, message):
    assert pooling.post(path, body).error["message"] == message
