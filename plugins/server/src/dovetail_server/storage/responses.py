"""The store of responses: bounded in number, bytes and age for each API key."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from dovetail_server.protocol.errors import APIError
from dovetail_server.settings import ServerSettings
from dovetail_server.storage.database import Database
from dovetail_server.transport.body import num_values

_encode, _decode = msgspec.json.encode, msgspec.json.decode
RUNNING = "in_progress"
CONVERSATION_BODIES = 2
"""Maximum size of a stored conversation, as a multiple of the limits of a request's body. It also
contains the earlier turns, and stored items have additional fields."""
_ITEMS_PER_QUERY = 500


class ResponseStore:
    """Stores responses with the items of their conversation.

    If a key reaches a limit, its oldest responses are deleted.
    """

    def __init__(self, database: Database, settings: ServerSettings) -> None:
        self._database = database
        self._settings = settings

    async def put(self, owner: str, body: dict[str, Any], items: bytes) -> None:
        """Store a response. Raise APIError if it is too large.

        items: the input of the conversation, encoded by `encode_items`.
        A response that has been deleted while it was generated is not stored again.
        """
        text, now_s = _encode(body), time.time()
        size = len(text) + len(items)
        if size > self._settings.max_stored_response_bytes:
            raise APIError(
                f"The response and its input have {size} bytes; the limit is "
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
                "INSERT OR REPLACE INTO responses VALUES (?,?,?,?,?,?,?,?)", (*row, text, items)
            )
            db.executemany("INSERT OR REPLACE INTO items VALUES (?,?,?,?)", outputs)
            self._evict(db, owner, now_s)

        await self._database.run(work)

    async def encode_items(self, items: Sequence[dict[str, Any]]) -> bytes:
        """Return the input of a conversation for `put`. Raise APIError if it is too long."""
        text = await asyncio.to_thread(_encode, items)
        max_bytes = CONVERSATION_BODIES * self._settings.max_body_bytes
        max_values = CONVERSATION_BODIES * self._settings.max_json_values
        if len(text) > max_bytes or num_values(text) > max_values:
            raise APIError(
                f"The input and the previous responses have {len(text)} bytes; the store keeps at "
                f"most {max_bytes} bytes and {max_values} values of a conversation "
                "(--max-body-bytes, --max-json-values). Start a new conversation, or send "
                "store=false.",
                status=413,
                code="conversation_too_long",
                param="input",
            )
        return text

    async def get(self, owner: str, response_id: str) -> dict[str, Any]:
        """Return a response. Raise APIError if the key has no such response."""
        body, _ = await self._read(owner, response_id)
        return body

    async def conversation(
        self, owner: str, response_id: str
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Return a response and its input items. Raise APIError if the key has no such response."""
        body, text = await self._read(owner, response_id)
        return body, await asyncio.to_thread(_decode_items, text)

    async def _read(self, owner: str, response_id: str) -> tuple[dict[str, Any], bytes]:
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
            message = "The server process that generated this response has exited."
            body |= {"status": "failed", "error": {"code": "server_error", "message": message}}
        return body, row[1]

    async def items(self, owner: str, ids: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Return output items of stored responses by id.

        Raises APIError if the key does not have all of them, or if the items that `ids` names have
        more bytes than the body of a request may have.
        """
        counts = Counter(ids)
        names = list(counts)

        def work(db: sqlite3.Connection) -> dict[str, bytes]:
            found: dict[str, bytes] = {}
            for start in range(0, len(names), _ITEMS_PER_QUERY):
                part = names[start : start + _ITEMS_PER_QUERY]
                marks = ",".join("?" * len(part))
                query = f"SELECT id, body FROM items WHERE owner = ? AND id IN ({marks})"
                found.update(db.execute(query, (owner, *part)))
                self._check_size(found, counts)
            return found

        found = await self._database.run(work)
        if missing := next((name for name in names if name not in found), None):
            raise APIError(
                f"The item {missing[:80]!r} is not stored; send its contents.",
                status=404,
                code="item_not_found",
                param="input",
            )
        return {name: _decode(text) for name, text in found.items()}

    def _check_size(self, found: dict[str, bytes], counts: Counter[str]) -> None:
        """Raise APIError if items are too large. counts: how often each is used, by id."""
        maximum = self._settings.max_body_bytes
        if sum(len(text) * counts[name] for name, text in found.items()) > maximum:
            raise APIError(
                f"The items that the input refers to have more than {maximum} bytes "
                "(--max-body-bytes). Refer to fewer items.",
                status=413,
                code="body_too_large",
                param="input",
            )

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


def _decode_items(text: bytes) -> list[dict[str, Any]]:
    """Return the items of a conversation. Other threads can run between two items."""
    return [_decode(item) for item in msgspec.json.decode(text, type=list[msgspec.Raw])]


def not_found(response_id: str, param: str | None = None) -> APIError:
    """Return the error for a response that is not stored, or belongs to another key."""
    return APIError(
        f"The response {response_id[:80]!r} is not stored. It may be deleted or expired.",
        status=404,
        code="response_not_found",
        param=param,
    )
