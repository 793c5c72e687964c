"""The database of a server: a SQLite file in a private directory, which all API processes use.

Every row belongs to the API key that created it; queries of other keys do not find it.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import sqlite3
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from dovetail.errors import ConfigError
from dovetail_server.protocol.errors import APIError
from dovetail_server.state import ServerState

R = TypeVar("R")

BUSY_S = 10.0
_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, owner TEXT, created REAL, status TEXT, num_bytes INTEGER, process TEXT,
    body BLOB, input BLOB);
CREATE INDEX IF NOT EXISTS responses_by_owner ON responses (owner, created);
CREATE TABLE IF NOT EXISTS items (
    id TEXT, owner TEXT, response TEXT, body BLOB, PRIMARY KEY (owner, id));
CREATE INDEX IF NOT EXISTS items_by_response ON items (response);
CREATE TABLE IF NOT EXISTS files (
    id TEXT PRIMARY KEY, owner TEXT, created REAL, expires REAL, purpose TEXT, name TEXT,
    num_bytes INTEGER, status TEXT, process TEXT);
CREATE INDEX IF NOT EXISTS files_by_owner ON files (owner, created);
CREATE TABLE IF NOT EXISTS batches (
    id TEXT PRIMARY KEY, owner TEXT, created REAL, status TEXT, process TEXT, input_file TEXT,
    body BLOB);
CREATE INDEX IF NOT EXISTS batches_by_owner ON batches (owner, created);
CREATE INDEX IF NOT EXISTS batches_by_status ON batches (status);
"""


@contextmanager
def storage_folder(state: ServerState) -> Iterator[ServerState]:
    """Yield the state with a directory for stored data. Remove a temporary directory at the end.

    Raises ConfigError if the directory of `--storage-dir` cannot be used.
    """
    chosen = state.settings.storage_dir
    if chosen is not None:
        _check_folder(chosen)
        yield state
        return
    folder = tempfile.mkdtemp(prefix="dovetail-storage-")
    try:
        yield replace(state, settings=replace(state.settings, storage_dir=folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _check_folder(folder: str) -> None:
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(13, "no permission to write")
    except OSError as error:
        raise ConfigError(
            f"--storage-dir {folder} cannot be used: {error.strerror}. Use a directory that the "
            "server can write to."
        ) from None


class Database:
    """A connection to the database, and the lock that shows that this process runs.

    process: the id of this process in rows. The database is opened at first use.
    """

    def __init__(self, folder: str | None) -> None:
        self.process = uuid.uuid4().hex
        self._folder = folder
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._running = -1

    @property
    def folder(self) -> Path:
        """The directory of the database. Raises APIError if the server has none."""
        if self._folder is None:
            raise APIError(
                "This server stores no data (--storage-dir).", status=501, code="no_storage"
            )
        return Path(self._folder)

    @property
    def exists(self) -> bool:
        """Whether this server has stored anything."""
        return self._folder is not None and (self.folder / "data.sqlite").exists()

    async def run(self, work: Callable[[sqlite3.Connection], R]) -> R:
        """Run a transaction in a thread. Raise APIError if the disk or the database fails."""
        return await asyncio.to_thread(self.run_here, work)

    def run_here(self, work: Callable[[sqlite3.Connection], R]) -> R:
        """Run a transaction. Blocks."""
        with self._lock:
            try:
                connection = self._connection or self._open()
                connection.execute("BEGIN IMMEDIATE")
                with connection:
                    return work(connection)
            except (sqlite3.Error, OSError) as error:
                raise storage_failed(error) from error

    def is_running(self, process: str) -> bool:
        """Return whether the process with this id is still running."""
        if process == self.process:
            return True
        try:
            descriptor = os.open(self._lock_file(process), os.O_RDWR)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    def close(self) -> None:
        """Close the connection and release the lock."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None
            if self._running >= 0:
                os.unlink(self._lock_file(self.process))
                os.close(self._running)
                self._running = -1

    def _open(self) -> sqlite3.Connection:
        path = self.folder / "data.sqlite"
        if self._running < 0:
            self._running = os.open(
                self._lock_file(self.process), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
            )
            fcntl.flock(self._running, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        connection = sqlite3.connect(
            path, timeout=BUSY_S, isolation_level=None, check_same_thread=False
        )
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")
        connection.executescript(_SCHEMA)
        self._connection = connection
        return connection

    def _lock_file(self, process: str) -> Path:
        return self.folder / f"process-{process}.lock"


def storage_failed(error: Exception) -> APIError:
    """Return the error for a failed operation of the disk or database, without a path."""
    reason = error.strerror if isinstance(error, OSError) else str(error)
    return APIError(
        f"The server cannot store the data: {reason}. Try again later.",
        status=503,
        code="storage_failed",
        retry_after_s=5.0,
    )
