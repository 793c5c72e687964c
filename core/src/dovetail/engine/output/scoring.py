"""Scores of pairs of texts, from the results that a model supports.

A cross-encoder computes the score of a pair. With an embedding model the score is the cosine
similarity of two embeddings. With a late-interaction model (Khattab and Zaharia 2020,
arXiv:2004.12832) the score is the sum, over the query's tokens, of the largest similarity with a
document token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from operator import mul
from typing import Any

from dovetail.errors import RequestError, UserError
from dovetail.outputs import PoolingOutput, PoolingRequestOutput
from dovetail.pooling_params import EMBED, SCORE, TOKEN_EMBED
from dovetail.value_checks import plain_text, take_items

Vector = Sequence[float]
_sumprod: Callable[[Iterable[float], Iterable[float]], float] = getattr(
    math, "sumprod", lambda first, second: sum(map(mul, first, second))
)

MAX_PRODUCTS = 1 << 28
"""Maximum number of multiplications for the score of a pair; they take up to 10 s."""


class ScoringKind(StrEnum):
    """How a model scores pairs. The value is the pooling task of the requests."""

    CROSS_ENCODER = SCORE
    EMBEDDING = EMBED
    LATE_INTERACTION = TOKEN_EMBED


def scoring_kind(supported_tasks: Sequence[str]) -> ScoringKind:
    """Return how a model scores pairs. Raise UserError if the model cannot score pairs."""
    for kind in ScoringKind:
        if kind.value in supported_tasks:
            return kind
    raise UserError(
        f"The model cannot score pairs of texts; it supports: {', '.join(supported_tasks)}."
    )


@dataclass(frozen=True, kw_only=True)
class TextPairs:
    """The pairs of strings of a call. queries, documents: one string for each pair.

    num_queries: number of strings that the caller passed as queries: 1 or the number of pairs.
    errors: by index of a pair, why it has no score; its strings are not used.
    """

    queries: Sequence[str]
    documents: Sequence[str]
    num_queries: int
    errors: Mapping[int, RequestError] = field(default_factory=dict)

    @property
    def valid(self) -> list[int]:
        """The indexes of the pairs without an error."""
        return [index for index in range(len(self.documents)) if index not in self.errors]

    def query_name(self, index: int) -> str:
        """Return the name of a pair's query in errors: "queries", or with an index if several."""
        return _entry("queries", index, self.num_queries)

    def document_name(self, index: int) -> str:
        """Return the name of a pair's document in errors."""
        return _entry("documents", index, len(self.documents))

    def texts(self) -> dict[str, str]:
        """Return each different string with the name of its first occurrence, queries first.

        Pairs with an error are omitted.
        """
        names: dict[str, str] = {}
        for strings, name_of in (
            (self.queries, self.query_name),
            (self.documents, self.document_name),
        ):
            for index in self.valid:
                names.setdefault(strings[index], name_of(index))
        return names


def read_pairs(
    queries: object, documents: object, *, max_texts: int, is_strict: bool = True
) -> TextPairs:
    """Return the pairs of strings. Raise RequestError, naming the argument, for other types.

    queries: one text for all documents, or one for each. max_texts: the maximum number of either,
    `LimitsConfig.max_prompts`; no more entries are read. is_strict: whether an entry that is not a
    string is an error of the whole call, or only of its pairs.
    """
    firsts, first_errors = _texts("queries", queries, max_texts)
    seconds, second_errors = _texts("documents", documents, max_texts)
    num_queries = len(firsts)
    check_counts(num_queries, len(seconds))
    if num_queries == 1:
        firsts *= len(seconds)
        first_errors = dict.fromkeys(range(len(seconds)), first_errors[0]) if first_errors else {}
    errors = {**second_errors, **first_errors}
    if is_strict and errors:
        raise next(iter((first_errors or second_errors).values()))
    return TextPairs(queries=firsts, documents=seconds, num_queries=num_queries, errors=errors)


def check_counts(
    num_queries: int,
    num_documents: int,
    *,
    queries: str = "queries",
    documents: str = "documents",
) -> None:
    """Raise RequestError unless there is one query, or one for each document.

    queries, documents: the names of both lists in the message.
    """
    if num_queries in (1, num_documents):
        return
    raise RequestError(
        f"{queries} has {num_queries} strings, but {documents} has {num_documents}; {queries} must "
        f"have 1 string, or as many as {documents}.",
        parameter=queries,
    )


def _texts(name: str, value: object, max_texts: int) -> tuple[list[str], dict[int, RequestError]]:
    """Return the strings of an argument, and errors by index. Other entries become ""."""
    if isinstance(value, str):
        return [plain_text(value)], {}
    if not isinstance(value, (list, tuple)):
        raise RequestError(f"{name} must be a string or a list of strings.", parameter=name)
    items = take_items(name, value, max_texts, what="strings", limit="max_prompts")
    texts, errors = [], {}
    for index, item in enumerate(items):
        if not isinstance(item, str):
            entry = f"{name}[{index}]"
            errors[index] = RequestError(f"{entry} must be a string.", parameter=entry)
        texts.append(plain_text(item) if isinstance(item, str) else "")
    return texts, errors


def _entry(name: str, index: int, count: int) -> str:
    return name if count == 1 else f"{name}[{index}]"


def compare(
    kind: ScoringKind, query: PoolingRequestOutput, document: PoolingRequestOutput
) -> PoolingRequestOutput:
    """Return the score of two pooled strings, or the output of the one that failed.

    Pairs of long texts with a vector for each token get an output with `error` set.
    """
    for output in (query, document):
        if output.outputs is None:
            return output
    assert query.outputs is not None and document.outputs is not None, "checked above"
    measure: Callable[[Any, Any], float] = cosine
    if kind is ScoringKind.LATE_INTERACTION:
        measure, data = max_similarity, query.outputs.data
        if len(data) * len(document.outputs.data) * len(data[0]) > MAX_PRODUCTS:
            problem = _too_long(query, document)
            return replace(document, outputs=None, error=problem, finish_reason="error")
    return replace(
        document,
        request_id=f"{query.request_id}-{document.request_id}",
        prompt=None,
        prompt_token_ids=[*query.prompt_token_ids, *document.prompt_token_ids],
        outputs=PoolingOutput([measure(query.outputs.data, document.outputs.data)]),
        num_cached_tokens=query.num_cached_tokens + document.num_cached_tokens,
    )


def _too_long(query: PoolingRequestOutput, document: PoolingRequestOutput) -> str:
    lengths = len(query.prompt_token_ids), len(document.prompt_token_ids)
    return (
        f"prompt: comparing a query of {lengths[0]} tokens with a document of {lengths[1]} tokens "
        "takes too long; shorten one of the texts, or set truncate_prompt_tokens."
    )


def compare_all(
    kind: ScoringKind,
    pairs: TextPairs,
    pooled: Mapping[str, PoolingRequestOutput],
    indexes: Iterable[int] | None = None,
) -> list[PoolingRequestOutput]:
    """Return the score of each valid pair of strings, or of the pairs with these indexes.

    pooled: the output of each string.
    """
    return [
        compare(kind, pooled[pairs.queries[index]], pooled[pairs.documents[index]])
        for index in (pairs.valid if indexes is None else indexes)
    ]


def cosine(first: Vector, second: Vector) -> float:
    """Return the cosine similarity of two vectors, or 0 if one of them is the zero vector."""
    length = math.sqrt(_sumprod(first, first)) * math.sqrt(_sumprod(second, second))
    return _sumprod(first, second) / length if length else 0.0


def max_similarity(query: Sequence[Vector], document: Sequence[Vector]) -> float:
    """Return the sum, over the query's tokens, of the largest dot product with a document token."""
    return sum(max(_sumprod(token, other) for other in document) for token in query)
