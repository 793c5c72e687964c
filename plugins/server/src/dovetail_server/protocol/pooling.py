"""The fields of requests to pooling models, and the formats of their responses.

Each result is encoded separately, so that other threads can run while many results are encoded.
"""

from __future__ import annotations

import base64
import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from dovetail.outputs import PoolingRequestOutput
from dovetail_server.protocol.errors import APIError
from dovetail_server.protocol.fields import PROMPT_SCHEMA, SharedFields
from dovetail_server.protocol.prompts import MAX_PROMPTS

Input = Annotated[Any, Meta(extra_json_schema=PROMPT_SCHEMA)]
_TEXTS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
Texts = Annotated[Any, Meta(extra_json_schema=_TEXTS)]
_TEXT_OBJECT = {
    "type": "object",
    "properties": {"text": {"type": "string"}},
    "required": ["text"],
}
_DOCUMENTS = {"type": "array", "items": {"anyOf": [{"type": "string"}, _TEXT_OBJECT]}}
Documents = Annotated[Any, Meta(extra_json_schema=_DOCUMENTS)]
Encoding = Literal["float", "base64"]


class EmbeddingRequest(SharedFields, kw_only=True):
    """The body of /v1/embeddings."""

    input: Input
    encoding_format: Encoding | None = None
    dimensions: int | None = None
    normalize: bool | None = None


class PoolingRequest(EmbeddingRequest, kw_only=True):
    """The body of /pooling. task: see `PoolingParams`; the model's first task if None."""

    task: str | None = None
    use_activation: bool | None = None


class ClassifyRequest(SharedFields, kw_only=True):
    """The body of /classify."""

    input: Input
    use_activation: bool | None = None


class ScoreRequest(SharedFields, kw_only=True):
    """The body of /v1/score and /score. text_1: one text, or one for each of text_2."""

    text_1: Texts
    text_2: Texts
    use_activation: bool | None = None


class RerankRequest(SharedFields, kw_only=True):
    """The body of the rerank routes. documents: texts, or objects with the key "text"."""

    query: str
    documents: Documents
    top_n: int | None = None
    return_documents: bool | None = None
    use_activation: bool | None = None


def read_texts(name: str, value: object) -> list[str]:
    """Return one string, or a list of strings. Raise APIError that names an invalid entry."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not 1 <= len(texts) <= MAX_PROMPTS:
        raise APIError(
            f"{name} must be a string, or a list of 1 to {MAX_PROMPTS} strings.",
            code="invalid_type",
            param=name,
        )
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            param = f"{name}[{index}]"
            raise APIError(f"{param} must be a string.", code="invalid_type", param=param)
    return texts


def document_texts(documents: object) -> list[str]:
    """Return the texts of documents. Raise APIError that names an invalid one."""
    if not isinstance(documents, list) or not 1 <= len(documents) <= MAX_PROMPTS:
        raise APIError(
            f"documents must be a list of 1 to {MAX_PROMPTS} documents, each a string or an object "
            'with a string "text".',
            code="invalid_type",
            param="documents",
        )
    texts = [item.get("text") if isinstance(item, dict) else item for item in documents]
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            param = f"documents[{index}]"
            message = f'{param} must be a string, or an object with a string "text".'
            raise APIError(message, code="invalid_type", param=param)
    return texts


def embedding_items(
    outputs: Sequence[PoolingRequestOutput], kind: str, key: str, encoding: Encoding | None
) -> list[msgspec.Raw]:
    """Return an item for each output. kind: the value of "object". key: the key of the result."""
    items = []
    for index, output in enumerate(outputs):
        assert output.outputs is not None, "raise_failure has raised the errors of failed outputs"
        data: Any = output.outputs.data
        if encoding == "base64":
            data = _base64(data)
        items.append(_item({"index": index, "object": kind, key: data}))
    return items


def class_items(
    outputs: Sequence[PoolingRequestOutput], labels: Mapping[str, Any]
) -> list[msgspec.Raw]:
    """Return an item for each output, with the label of the most likely class."""
    items = []
    for index, output in enumerate(outputs):
        assert output.outputs is not None, "raise_failure has raised the errors of failed outputs"
        probs = output.outputs.probs
        best = str(probs.index(max(probs)))
        label = labels.get(best, f"LABEL_{best}")
        item = {"index": index, "label": label, "probs": probs, "num_classes": len(probs)}
        items.append(_item(item))
    return items


def score_items(outputs: Sequence[PoolingRequestOutput]) -> list[msgspec.Raw]:
    """Return an item for each score."""
    return [
        _item({"index": index, "object": "score", "score": _score(output)})
        for index, output in enumerate(outputs)
    ]


def rank_items(
    outputs: Sequence[PoolingRequestOutput], documents: Sequence[str], request: RerankRequest
) -> list[msgspec.Raw]:
    """Return the documents with the highest scores, the best one first."""
    scores = [_score(output) for output in outputs]
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    items = []
    for index in order[: request.top_n]:
        item: dict[str, Any] = {"index": index, "relevance_score": scores[index]}
        if request.return_documents is not False:
            item["document"] = {"text": documents[index]}
        items.append(_item(item))
    return items


def encode_body(
    make_items: Callable[[], list[msgspec.Raw]], name: str, fields: Mapping[str, Any]
) -> bytes:
    """Return a response. name: the field of the items. Call it in a thread."""
    return msgspec.json.encode({**fields, name: make_items()})


def _item(fields: Mapping[str, Any]) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(fields))


def _score(output: PoolingRequestOutput) -> float:
    assert output.outputs is not None, "raise_failure has raised the errors of failed outputs"
    return output.outputs.score


def _base64(data: Any) -> Any:
    """Return little-endian float32 values in base64: a string, or a list of one per row."""
    if data and isinstance(data[0], list):
        return [_base64(row) for row in data]
    values = array("f", data)
    if sys.byteorder == "big":
        values.byteswap()
    return base64.b64encode(values.tobytes()).decode("ascii")
