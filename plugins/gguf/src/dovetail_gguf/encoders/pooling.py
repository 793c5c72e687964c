"""Reads how the hidden states of a text become one vector: the key `pooling_type`."""

from __future__ import annotations

from dovetail.errors import ModelError
from dovetail.value_checks import shorten
from dovetail_gguf.encoders.architecture_names import ENCODER_NAMES
from dovetail_gguf.metadata_fields import Fields

HEAD = "cls.output.weight"
"""The last layer of a classification head."""
_LABELS = "classifier.output_labels"
NONE, MEAN, CLS, LAST, RANK = range(5)
"""Values of the key. RANK: a classification head computes the result."""
_NAMES = {NONE: "", MEAN: "mean", CLS: "cls", LAST: "last"}
_CHOICES = "0 (none), 1 (mean), 2 (cls), 3 (last) or 4 (rank)"


def read_pooling(fields: Fields) -> str | None:
    """Return "mean", "cls" or "last", or "" for none; None if the model has its own pooling.

    Raises ModelError, naming file and key, for an unknown value, for RANK without a head, and for a
    decoder with a classification head, such as Qwen3-Reranker.
    """
    value = read_pooling_type(fields)
    is_encoder = fields.name in ENCODER_NAMES
    has_head = HEAD in fields.file.tensors
    if not is_encoder:
        _reject_reranker(fields, value)
    elif value == RANK and not has_head:
        raise ModelError(
            f"{fields.file.path}: {fields.name}.pooling_type is 4 (rank), but the file has no "
            f"classification head ({HEAD})."
        )
    if value is None or (is_encoder and has_head):
        return None
    return _NAMES[value] or ("" if is_encoder else None)


def _reject_reranker(fields: Fields, value: int | None) -> None:
    """Raise ModelError for a decoder with a classification head."""
    labels = f"{fields.name}.{_LABELS}"
    if value == RANK:
        key = f"{fields.name}.pooling_type is 4 (rank)"
    elif labels in fields.file.metadata:
        key = f"{labels} is set"
    elif HEAD in fields.file.tensors:
        key = f"the tensor {HEAD} exists"
    else:
        return
    raise ModelError(
        f"{fields.file.path}: {key}, so the model is a reranker or classifier, which is supported "
        f"in GGUF files of {', '.join(ENCODER_NAMES)} only. Load the original checkpoint."
    )


def read_pooling_type(fields: Fields) -> int | None:
    """Return the value of the key; None if it is missing."""
    value = fields.get("pooling_type")
    if value is not None and (type(value) is not int or not NONE <= value <= RANK):
        raise ModelError(
            f"{fields.file.path}: {fields.name}.pooling_type is {shorten(value)}; it must be "
            f"{_CHOICES}."
        )
    return value
