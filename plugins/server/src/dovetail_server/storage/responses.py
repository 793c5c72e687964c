"""The store of responses: bounded in number, bytes and age for each API key."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from dovetail_server.protocol.errors import APIError
from dovetail_server.settings import ServerSettings
from dovetail_server.storage.database import Database

_encode, _decode = msgspec.json.encode, msgspec.json.decode
RUNNING = "in_progress"


class ResponseStore:
    """Stores responses with the items of their conversation.

    If a key reaches a limit, its oldest responses are deleted.
    """

    def __init__(self, database: Database, settings: ServerSettings) -> None:
        self._database = database
        self._settings = settings

    async def put(self, owner: str, body: dict[str, Any], items: Sequence[dict[str, Any]]) -> None:
        """Store a response. Raise APIError if it is too large.

        items: the input of the conversation.
        A response that has been deleted while it was generated is not stored again.
        """
        text, provided = _encode(body), _encode(items)
        size, now_s = len(text) + len(provided), time.time()
        if size > self._settings.max_stored_response_bytes:
            raise APIError(
                f"The response and its input have {size} bytes; the store keeps "
                f"{self._settings.max_stored_response_bytes} (--max-stored-response-bytes). Send "
                "store=false.",
                status=413,
                code="response_too_large",
                param="store",
            )
        outputs = [(item["id"], owner, body["id"], _encode(item)) for item in body["output"]]

        def work(db: sqlite3.Connection) -> None:
            known = "SELECT 1 FROM responses WHERE id = ? AND owner = ?"
            if body["status"] != RUNNING and not db.execute(known, (body["id"], owner)).fetchone():
                return
            row = (body["id"], owner, now_s, body["status"], size, self._database.process)
            db.execute(
                "INSERT OR REPLACE INTO responses VALUES (?,?,?,?,?,?,?,?)", (*row, text, provided)
            )
            db.executemany("INSERT OR REPLACE INTO items VALUES (?,?,?,?)", outputs)
            self._evict(db, owner, now_s)

        await self._database.run(work)

    async def get(
        self, owner: str, response_id: str
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Return a response and its input items. Raise APIError if the key has no such response."""
        oldest_s = time.time() - self._settings.response_lifetime_s
        row = await self._database.run(
            lambda db: db.execute(
                "SELECT body, input, status, process FROM responses"
                " WHERE id = ? AND owner = ? AND created >= ?",
                (response_id, owner, oldest_s),
            ).fetchone()
        )
        if row is None:
            raise not_found(response_id)
        body = _decode(row[0])
        if row[2] == RUNNING and not self._database.is_running(row[3]):
            message = "The server process that generated this response has ended."
            body |= {"status": "failed", "error": {"code": "server_error", "message": message}}
        return body, _decode(row[1])

    async def item(self, owner: str, item_id: str) -> dict[str, Any]:
        """Return an output item of a stored response. Raise APIError if the key has none."""
        row = await self._database.run(
            lambda db: db.execute(
                "SELECT body FROM items WHERE id = ? AND owner = ?", (item_id, owner)
            ).fetchone()
        )
        if row is None:
            raise APIError(
                f"The item {item_id[:80]!r} is not stored; send its contents.",
                status=404,
                code="item_not_found",
                param="input",
            )
        item: dict[str, Any] = _decode(row[0])
        return item

    async def delete(self, owner: str, response_id: str) -> None:
        """Delete a response. Raise APIError if the key has no such response."""

        def work(db: sqlite3.Connection) -> int:
            result = db.execute(
                "DELETE FROM responses WHERE id = ? AND owner = ?", (response_id, owner)
            ).rowcount
            if result:
                db.execute("DELETE FROM items WHERE response = ?", (response_id,))
            return result

        if not await self._database.run(work):
            raise not_found(response_id)

    def _evict(self, db: sqlite3.Connection, owner: str, now_s: float) -> None:
        """Delete the responses of a key that are too old, and the oldest ones above its limits."""
        settings = self._settings
        rows = db.execute(
            "SELECT id, num_bytes, created FROM responses WHERE owner = ? ORDER BY created DESC",
            (owner,),
        ).fetchall()
        size = 0
        for count, (response_id, num_bytes, created) in enumerate(rows, start=1):
            size += num_bytes
            if (
                count > settings.max_stored_responses
                or size > settings.max_stored_response_bytes
                or created < now_s - settings.response_lifetime_s
            ):
                db.execute("DELETE FROM responses WHERE id = ?", (response_id,))
                db.execute("DELETE FROM items WHERE response = ?", (response_id,))


def not_found(response_id: str, param: str | None = None) -> APIError:
    """Return the error for a response that is not stored, or belongs to another key."""
    return APIError(
        f"The response {response_id[:80]!r} is not stored. It may have been deleted or be too old.",
        status=404,
        code="response_not_found",
        param=param,
    )
