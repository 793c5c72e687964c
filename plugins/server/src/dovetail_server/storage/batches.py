"""The store of batches. The API processes share it, and each batch is executed by one of them."""

from __future__ import annotations

import sqlite3
from collections import Counter

import msgspec

from dovetail_server.batches.batch import Batch
from dovetail_server.protocol.errors import APIError
from dovetail_server.settings import ServerSettings
from dovetail_server.storage.database import Database
from dovetail_server.storage.files import UNFINISHED

MAX_STORED = 1000
"""Batches of an API key; the oldest ones that are complete are deleted."""

_CANCELLABLE = ("validating", "in_progress", "cancelling")
_DECODER = msgspec.json.Decoder(Batch)
_MARKS = ",".join("?" * len(UNFINISHED))


class BatchStore:
    """Stores batches."""

    def __init__(self, database: Database, settings: ServerSettings) -> None:
        self._database = database
        self._settings = settings

    async def add(self, batch: Batch) -> None:
        """Store a new batch. Raise APIError if its key has too many unfinished ones."""
        maximum = self._settings.max_unfinished_batches

        def work(db: sqlite3.Connection) -> None:
            rows = db.execute(
                "SELECT id, status FROM batches WHERE owner = ? ORDER BY created DESC",
                (batch.owner,),
            ).fetchall()
            if sum(status in UNFINISHED for _, status in rows) >= maximum:
                raise APIError(
                    f"The API key has {maximum} unfinished batches (--max-unfinished-batches). "
                    "Wait until one is complete, or cancel one.",
                    status=429,
                    code="too_many_batches",
                    retry_after_s=60.0,
                )
            for batch_id, status in rows[MAX_STORED - 1 :]:
                if status not in UNFINISHED:
                    db.execute("DELETE FROM batches WHERE id = ?", (batch_id,))
            row = (batch.id, batch.owner, batch.created_at, batch.status, "", batch.input_file_id)
            db.execute(
                "INSERT INTO batches VALUES (?,?,?,?,?,?,?)", (*row, msgspec.json.encode(batch))
            )

        await self._database.run(work)

    async def get(self, owner: str, batch_id: str) -> Batch:
        """Return a batch. Raise APIError if the key has no such batch."""
        row = await self._database.run(
            lambda db: db.execute(
                "SELECT body FROM batches WHERE id = ? AND owner = ?", (batch_id, owner)
            ).fetchone()
        )
        if row is None:
            raise _not_found(batch_id)
        return _DECODER.decode(row[0])

    async def list(self, owner: str) -> list[Batch]:
        """Return the batches of a key, the newest first."""
        rows = await self._database.run(
            lambda db: db.execute(
                "SELECT body FROM batches WHERE owner = ? ORDER BY created DESC, rowid DESC",
                (owner,),
            ).fetchall()
        )
        return [_DECODER.decode(row[0]) for row in rows]

    async def cancel(self, owner: str, batch_id: str) -> Batch:
        """Request that a batch is cancelled, and return it. Raise APIError if it is complete."""

        def work(db: sqlite3.Connection) -> Batch:
            row = db.execute(
                "SELECT body FROM batches WHERE id = ? AND owner = ?", (batch_id, owner)
            ).fetchone()
            if row is None:
                raise _not_found(batch_id)
            batch = _DECODER.decode(row[0])
            if batch.status not in _CANCELLABLE:
                raise APIError(
                    f"The batch has the status {batch.status!r}; it cannot be cancelled.",
                    status=409,
                    code="batch_not_cancellable",
                )
            if batch.status != "cancelling":
                batch.set_status("cancelling")
                _write(db, batch)
            return batch

        return await self._database.run(work)

    async def save(self, batch: Batch) -> bool:
        """Store the progress of a batch. Return whether its end has been requested.

        In that case, the status "cancelling" replaces "validating" and "in_progress".
        """

        def work(db: sqlite3.Connection) -> bool:
            row = db.execute("SELECT body FROM batches WHERE id = ?", (batch.id,)).fetchone()
            if row is None:
                return True
            stored = _DECODER.decode(row[0])
            is_cancelled = "cancelling" in stored.times
            if is_cancelled:
                batch.times["cancelling"] = stored.times["cancelling"]
                if batch.status in _CANCELLABLE:
                    batch.status = "cancelling"
            _write(db, batch)
            return is_cancelled

        return await self._database.run(work)

    async def claim(self) -> Batch | None:
        """Assign a batch that no running process executes to this process.

        Return the batch, or None. Batches of keys with few running batches come first, and then
        older ones.
        """

        def work(db: sqlite3.Connection) -> Batch | None:
            rows = db.execute(
                f"SELECT id, owner, process FROM batches WHERE status IN ({_MARKS})"
                " ORDER BY created, rowid",
                UNFINISHED,
            ).fetchall()
            waiting = []
            num_running: Counter[str] = Counter()
            is_running = {item: self._database.is_running(item) for _, _, item in rows if item}
            for batch_id, owner, process in rows:
                if is_running.get(process, False):
                    num_running[owner] += 1
                else:
                    waiting.append((batch_id, owner))
            if not waiting:
                return None
            batch_id, _ = min(waiting, key=lambda item: num_running[item[1]])
            db.execute(
                "UPDATE batches SET process = ? WHERE id = ?", (self._database.process, batch_id)
            )
            row = db.execute("SELECT body FROM batches WHERE id = ?", (batch_id,)).fetchone()
            return _DECODER.decode(row[0])

        return await self._database.run(work)

    async def release(self, batch_id: str) -> None:
        """Allow another process to execute a batch that is not complete."""
        await self._database.run(
            lambda db: db.execute("UPDATE batches SET process = '' WHERE id = ?", (batch_id,))
        )


def _write(db: sqlite3.Connection, batch: Batch) -> None:
    db.execute(
        "UPDATE batches SET status = ?, body = ? WHERE id = ?",
        (batch.status, msgspec.json.encode(batch), batch.id),
    )


def _not_found(batch_id: str) -> APIError:
    return APIError(
        f"The batch {batch_id[:80]!r} is not stored.", status=404, code="batch_not_found"
    )
