"""The grammar of a request's output, from `response_format` and the fields of other servers."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from dovetail.errors import RequestError
from dovetail.sampling_params import StructuredOutputsParams
from dovetail_server.protocol.errors import APIError, api_error
from dovetail_server.protocol.fields import GenerationFields

logger = logging.getLogger(__name__)

GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
"""Maps each old field name to the argument of `StructuredOutputsParams` that it sets."""

FIELDS = ("response_format", "structured_outputs", *GUIDED)
OPTIONS = frozenset({"whitespace_pattern", "disable_any_whitespace", "backend"})
"""Keys of `structured_outputs` in other servers that do not change which outputs are valid."""


def grammar_field(request: GenerationFields) -> str:
    """Return the field that restricts the output, or "". Raise APIError if there are several."""
    names = [name for name in FIELDS if getattr(request, name) is not None]
    if request.response_format is not None and request.response_format.get("type") == "text":
        names.remove("response_format")
    if len(names) > 1:
        raise APIError(
            f"{names[0]} and {names[1]} both restrict the output; use only one of them.",
            code="contradictory_parameters",
            param=names[1],
        )
    return names[0] if names else ""


def read_grammar(request: GenerationFields) -> StructuredOutputsParams | None:
    """Return the grammar of a request's output, or None. Raise APIError that names the field."""
    field = grammar_field(request)
    if not field:
        return None
    if field in GUIDED:
        logger.warning("%s is an old name; use structured_outputs.%s.", field, GUIDED[field])
        return _made({GUIDED[field]: getattr(request, field)}, field)
    if field == "structured_outputs":
        grammar = request.structured_outputs or {}
        return _made({name: item for name, item in grammar.items() if name not in OPTIONS}, field)
    return _made(_read_format(request.response_format or {}), field)


def _read_format(response_format: Mapping[str, Any]) -> dict[str, Any]:
    """Return the argument of `StructuredOutputsParams` that a `response_format` sets."""
    kind = response_format.get("type")
    if kind == "json_object":
        return {"json_object": True}
    if kind == "structural_tag":
        return {"structural_tag": response_format}
    if kind != "json_schema":
        raise APIError(
            'response_format.type must be "text", "json_object", "json_schema" or '
            '"structural_tag".',
            param="response_format.type",
        )
    wrapper = response_format.get("json_schema")
    schema = wrapper.get("schema") if isinstance(wrapper, dict) else None
    if not isinstance(schema, dict):
        raise APIError(
            "response_format.json_schema.schema must be a JSON schema (an object).",
            code="invalid_type",
            param="response_format.json_schema",
        )
    return {"json": schema}


def _made(fields: dict[str, Any], field: str) -> StructuredOutputsParams:
    try:
        return StructuredOutputsParams(**{str(name): item for name, item in fields.items()})
    except RequestError as error:
        names = {"structured_outputs": field}
        if field != "structured_outputs":
            names[error.parameter] = field
        raise api_error(error, names) from None
