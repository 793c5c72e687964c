"""Query parameters and pagination of lists, in OpenAI's format."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any
from urllib.parse import parse_qsl

from dovetail_server.protocol.errors import APIError
from dovetail_server.transport.exchange import Exchange

MAX_QUERY_FIELDS = 100
DEFAULT_LIMIT, MAX_LIMIT = 20, 100


def read_query(exchange: Exchange, names: Collection[str]) -> dict[str, str]:
    """Return the fields of the query. Raise APIError for an unknown or invalid field."""
    try:
        pairs = parse_qsl(
            exchange.query.decode("latin-1"),
            keep_blank_values=True,
            max_num_fields=MAX_QUERY_FIELDS,
        )
    except ValueError:
        raise APIError(f"The query string has more than {MAX_QUERY_FIELDS} parameters.") from None
    query = {name.removesuffix("[]"): value for name, value in pairs}
    for name in query:
        if name not in names:
            raise APIError(
                f"The field {name[:80]!r} of the query is not known; use: {', '.join(names)}.",
                code="unknown_parameter",
                param=name[:80],
            )
    if query.get("order", "asc") not in ("asc", "desc"):
        raise APIError('order must be "asc" or "desc".', param="order")
    return query


def page_of(
    items: Sequence[dict[str, Any]],
    query: Mapping[str, str],
    maximum: int = MAX_LIMIT,
    default: int = DEFAULT_LIMIT,
) -> dict[str, Any]:
    """Return the page of a list that a query selects. Raise APIError for an invalid limit or id.

    maximum, default: number of entries of a page.
    """
    limit = query.get("limit", str(default))
    if not (limit.isascii() and limit.isdigit() and len(limit) <= 6 and 1 <= int(limit) <= maximum):
        raise APIError(f"limit must be a number from 1 to {maximum}.", param="limit")
    start = 0
    if (after := query.get("after")) is not None:
        start = next((i for i, item in enumerate(items, start=1) if item["id"] == after), 0)
        if not start:
            raise APIError(f"after: the list has no entry {after[:80]!r}.", param="after")
    page = list(items[start : start + int(limit)])
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": start + len(page) < len(items),
    }
