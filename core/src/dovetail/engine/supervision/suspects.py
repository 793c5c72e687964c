"""Requests that an engine died with, again and again: they may be what it dies of."""

from __future__ import annotations

from collections.abc import Iterable

from dovetail.errors import RequestError

_MAX_KEPT = 4096


class Suspects:
    """Counts deaths by request id. Keeps the latest few thousand ids. Not thread-safe."""

    def __init__(self, max_deaths: int) -> None:
        self._max_deaths = max_deaths
        self._deaths: dict[str, int] = {}

    def accuse(self, request_ids: Iterable[str]) -> None:
        """Note that an engine died while these were under way."""
        for request_id in request_ids:
            self._deaths[request_id] = self._deaths.pop(request_id, 0) + 1
        while len(self._deaths) > _MAX_KEPT:
            del self._deaths[next(iter(self._deaths))]

    def check(self, request_id: str) -> None:
        """Raise RequestError for a request that too many engines died with."""
        deaths = self._deaths.get(request_id, 0)
        if deaths >= self._max_deaths:
            raise RequestError(
                f"request {request_id!r} was under way when the engine died, {deaths} times; it is "
                "not run again. If it is not at fault, ask under another id.",
                parameter="request_id",
            )
