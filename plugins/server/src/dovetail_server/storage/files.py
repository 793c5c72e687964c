"""The store of files: bounded in number, bytes and age for each API key.

The database has a row for each file before the file exists on the disk, so that no file remains
without a row. A row reserves the bytes of an upload until it is complete.
"""

from __future__ import annotations

import os
import sqlite3
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from dovetail_server.protocol.errors import APIError
from dovetail_server.settings import ServerSettings
from dovetail_server.storage.database import Database, storage_failed

UPLOADING = "uploading"
"""The upload of a file is not complete. Its row is deleted if its process has ended."""
WRITING = "writing"
"""A batch writes the file. The row is kept when a process ends, because the batch is resumed."""
STORED = "processed"

UNFINISHED = ("validating", "in_progress", "finalizing", "cancelling")
"""Statuses of batches that are not complete."""

_COLUMNS = "id, created, expires, purpose, name, num_bytes"


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A complete file. created, expires: UNIX times in seconds."""

    id: str
    created: float
    expires: float
    purpose: str
    name: str
    num_bytes: int

    def object(self) -> dict[str, Any]:
        """Return the file in the format of OpenAI's API."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.num_bytes,
            "created_at": int(self.created),
            "expires_at": int(self.expires),
            "filename": self.name,
            "purpose": self.purpose,
            "status": STORED,
            "status_details": None,
        }


class FileStore:
    """Stores files. A key that has reached a limit must delete files before it stores others."""

    def __init__(self, database: Database, settings: ServerSettings) -> None:
        self._database = database
        self._settings = settings

    def path(self, file_id: str) -> Path:
        """Return the path of a file that has a row."""
        return self._database.folder / "files" / file_id

    async def reserve(self, owner: str, num_bytes: int, status: str = UPLOADING) -> str:
        """Add the row of a file that is not complete, and return its id.

        num_bytes: maximum size of the file. Raises APIError if a limit is reached.
        """
        settings, file_id, now_s = self._settings, f"file-{uuid.uuid4().hex}", time.time()

        def work(db: sqlite3.Connection) -> None:
            self._delete_old(db, now_s)
            count, size = _usage(db, owner)
            if count >= settings.max_stored_files:
                raise storage_full(f"{count} files (--max-stored-files)")
            if size + num_bytes > settings.max_stored_file_bytes:
                raise storage_full(f"{size} bytes of files (--max-stored-file-bytes)")
            row = (file_id, owner, now_s, now_s + settings.file_lifetime_s, "", "", num_bytes)
            db.execute(
                "INSERT INTO files VALUES (?,?,?,?,?,?,?,?,?)",
                (*row, status, self._database.process),
            )
            (self._database.folder / "files").mkdir(mode=0o700, exist_ok=True)

        await self._database.run(work)
        return file_id

    def create(self, file_id: str) -> BinaryIO:
        """Open a reserved file for appending. Blocks."""
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
            return os.fdopen(os.open(self.path(file_id), flags, 0o600), "a+b")
        except OSError as error:
            raise storage_failed(error) from None

    async def finish(
        self, file_id: str, *, purpose: str, name: str, lifetime_s: float | None = None
    ) -> StoredFile:
        """Make a file visible that has been written completely.

        lifetime_s: time after which it is deleted; None for the default, which is the maximum.
        """
        longest_s = self._settings.file_lifetime_s

        def work(db: sqlite3.Connection) -> StoredFile:
            now_s, size = time.time(), self.path(file_id).stat().st_size
            expires_s = now_s + min(lifetime_s or longest_s, longest_s)
            db.execute(
                "UPDATE files SET created = ?, expires = ?, purpose = ?, name = ?, num_bytes = ?,"
                " status = ? WHERE id = ?",
                (now_s, expires_s, purpose, name, size, STORED, file_id),
            )
            return StoredFile(file_id, now_s, expires_s, purpose, name, size)

        return await self._database.run(work)

    async def discard(self, file_id: str) -> None:
        """Delete a file that is not complete."""
        await self._database.run(lambda db: self._delete(db, file_id))

    async def set_sizes(self, owner: str, sizes: dict[str, int]) -> None:
        """Set the sizes of files that grow. Raise APIError if the key then has too many bytes."""

        def work(db: sqlite3.Connection) -> int:
            for file_id, size in sizes.items():
                db.execute("UPDATE files SET num_bytes = ? WHERE id = ?", (size, file_id))
            return _usage(db, owner)[1]

        if (size := await self._database.run(work)) > self._settings.max_stored_file_bytes:
            raise storage_full(f"{size} bytes of files (--max-stored-file-bytes)")

    async def get(self, owner: str, file_id: str, param: str | None = None) -> StoredFile:
        """Return a complete file. Raise APIError if the key has no such file."""
        row = await self._database.run(
            lambda db: db.execute(
                f"SELECT {_COLUMNS} FROM files"
                " WHERE id = ? AND owner = ? AND status = ? AND expires >= ?",
                (file_id, owner, STORED, time.time()),
            ).fetchone()
        )
        if row is None:
            raise file_not_found(file_id, param)
        return StoredFile(*row)

    async def list(self, owner: str, purpose: str | None = None) -> list[StoredFile]:
        """Return the complete files of a key, the newest first."""
        rows = await self._database.run(
            lambda db: db.execute(
                f"SELECT {_COLUMNS} FROM files WHERE owner = ? AND status = ? AND expires >= ?"
                " ORDER BY created DESC",
                (owner, STORED, time.time()),
            ).fetchall()
        )
        files = [StoredFile(*row) for row in rows]
        return [item for item in files if purpose in (None, item.purpose)]

    async def delete(self, owner: str, file_id: str) -> None:
        """Delete a file. Raise APIError if the key has no such file, or a batch reads it."""
        await self.get(owner, file_id)

        def work(db: sqlite3.Connection) -> None:
            if _is_used(db, file_id):
                raise APIError(
                    "An unfinished batch uses this file. Cancel the batch first.",
                    status=409,
                    code="file_in_use",
                )
            self._delete(db, file_id)

        await self._database.run(work)

    async def clean(self) -> None:
        """Delete files that are too old, and uploads of processes that have ended."""
        await self._database.run(lambda db: self._delete_old(db, time.time()))

    def _delete_old(self, db: sqlite3.Connection, now_s: float) -> None:
        old = db.execute(
            "SELECT id FROM files WHERE expires < ? AND status = ?", (now_s, STORED)
        ).fetchall()
        for (file_id,) in old:
            if not _is_used(db, file_id):
                self._delete(db, file_id)
        uploads = db.execute(
            "SELECT id, process FROM files WHERE status = ?", (UPLOADING,)
        ).fetchall()
        for file_id, process in uploads:
            if not self._database.is_running(process):
                self._delete(db, file_id)

    def _delete(self, db: sqlite3.Connection, file_id: str) -> None:
        with suppress(FileNotFoundError):
            self.path(file_id).unlink()
        db.execute("DELETE FROM files WHERE id = ?", (file_id,))


def _usage(db: sqlite3.Connection, owner: str) -> tuple[int, int]:
    """Return the number of files of a key, and their total size in bytes."""
    count, size = db.execute(
        "SELECT COUNT(*), COALESCE(SUM(num_bytes), 0) FROM files WHERE owner = ?", (owner,)
    ).fetchone()
    return count, size


def _is_used(db: sqlite3.Connection, file_id: str) -> bool:
    marks = ",".join("?" * len(UNFINISHED))
    return (
        db.execute(
            f"SELECT 1 FROM batches WHERE input_file = ? AND status IN ({marks})",
            (file_id, *UNFINISHED),
        ).fetchone()
        is not None
    )


def file_not_found(file_id: str, param: str | None = None) -> APIError:
    """Return the error for a file that is not stored, or belongs to another key."""
    return APIError(
        f"The file {file_id[:80]!r} is not stored. It may be deleted or expired.",
        status=404,
        code="file_not_found",
        param=param,
    )


def storage_full(usage: str) -> APIError:
    """Return the error for a key that has reached a limit of the store."""
    return APIError(
        f"The API key has {usage}; the store keeps no more. Delete files that are not needed.",
        status=413,
        code="storage_full",
    )


def file_too_large(max_file_bytes: int) -> APIError:
    """Return the error for a file above the limit."""
    return APIError(
        f"The file has more than {max_file_bytes} bytes (--max-file-bytes). Split it.",
        status=413,
        code="file_too_large",
        param="file",
    )
