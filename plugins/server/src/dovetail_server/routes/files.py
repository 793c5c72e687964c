"""The routes of OpenAI's Files API."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, BinaryIO

from dovetail_server.protocol.errors import APIError
from dovetail_server.routes.pages import page_of, read_query
from dovetail_server.routes.table import Route
from dovetail_server.settings import KIB, ServerSettings
from dovetail_server.storage.database import storage_failed
from dovetail_server.storage.files import (
    FileStore,
    StoredFile,
    file_not_found,
    file_too_large,
)
from dovetail_server.transport.exchange import Exchange

if TYPE_CHECKING:
    from dovetail_server.transport.upload import Upload

PATH = "/v1/files"
PURPOSES = ("batch", "user_data", "assistants", "fine-tune", "vision", "evals")
"""The purposes of OpenAI's API. The server itself uses only files for batches."""

FIELDS = ("purpose", "expires_after[anchor]", "expires_after[seconds]")
MIN_LIFETIME_S, MAX_LIFETIME_S = 3600, 2592000
MAX_PAGE = 10_000
FORM_BYTES = 64 * KIB
"""Bytes of a form in addition to its file."""

_CHUNK_BYTES = 256 * KIB


def file_routes(store: FileStore, settings: ServerSettings) -> list[Route]:
    """Return the routes."""
    routes = FileRoutes(store, settings)
    return [
        Route(method="POST", path=PATH, handler=routes.create),
        Route(method="GET", path=PATH, handler=routes.list),
        Route(method="GET", path=f"{PATH}/*", handler=routes.retrieve),
        Route(method="DELETE", path=f"{PATH}/*", handler=routes.delete),
        Route(
            method="GET",
            path=f"{PATH}/*/content",
            handler=routes.content,
            media_type="application/octet-stream",
        ),
    ]


class FileRoutes:
    """Handles files."""

    def __init__(self, store: FileStore, settings: ServerSettings) -> None:
        self._store = store
        self._settings = settings

    async def create(self, exchange: Exchange) -> None:
        """Store an uploaded file."""
        from dovetail_server.transport.upload import Upload  # other routes need no form parser

        received: list[bytes] = []
        upload = Upload(exchange.headers, FIELDS, received.append, self._settings.max_file_bytes)
        length = _stated_length(exchange, self._settings.max_file_bytes + FORM_BYTES)
        if length > self._settings.max_file_bytes + FORM_BYTES:
            raise file_too_large(self._settings.max_file_bytes)
        exchange.allow_body_time(self._settings.upload_timeout_s)
        file_id = await self._store.reserve(
            exchange.caller, min(length, self._settings.max_file_bytes)
        )
        try:
            await self._receive(exchange, upload, received, file_id)
            purpose, lifetime_s = _read_fields(upload)
            file = await self._store.finish(
                file_id, purpose=purpose, name=upload.name, lifetime_s=lifetime_s
            )
        except BaseException:
            await asyncio.shield(self._store.discard(file_id))
            raise
        await exchange.respond(file.object())

    async def _receive(
        self, exchange: Exchange, upload: Upload, received: list[bytes], file_id: str
    ) -> None:
        """Write the file of an upload while it arrives."""
        num_bytes, maximum = 0, self._settings.max_file_bytes

        def write(data: bytes) -> None:
            upload.feed(data)
            _write(file, received)

        file = await asyncio.to_thread(self._store.create, file_id)
        try:
            async for piece in exchange.read_pieces():
                num_bytes += len(piece)
                if num_bytes > maximum + FORM_BYTES:
                    raise file_too_large(maximum)
                await asyncio.to_thread(write, piece)
            upload.finish()
            await asyncio.to_thread(_sync, file)
        finally:
            await asyncio.to_thread(file.close)

    async def list(self, exchange: Exchange) -> None:
        """Respond with a page of the files of the key."""
        query = read_query(exchange, ("after", "limit", "order", "purpose"))
        files = await self._store.list(exchange.caller, query.get("purpose"))
        if query.get("order") == "asc":
            files.reverse()
        page = page_of([item.object() for item in files], query, MAX_PAGE, MAX_PAGE)
        await exchange.respond(page)

    async def retrieve(self, exchange: Exchange) -> None:
        """Respond with the properties of a file."""
        await exchange.respond((await self._get(exchange)).object())

    async def delete(self, exchange: Exchange) -> None:
        """Delete a file."""
        await self._store.delete(exchange.caller, exchange.rest)
        await exchange.respond({"id": exchange.rest, "object": "file", "deleted": True})

    async def content(self, exchange: Exchange) -> None:
        """Respond with the content of a file."""
        await exchange.read_body()  # from now on, a disconnect cancels this request
        file = await self._get(exchange)
        content = await asyncio.to_thread(self._open, file)
        with content:
            headers = [
                (b"content-type", b"application/octet-stream"),
                (b"content-length", str(file.num_bytes).encode()),
                (b"x-content-type-options", b"nosniff"),
                (b"content-disposition", b"attachment"),
            ]
            await exchange.start_stream(headers)
            while chunk := await asyncio.to_thread(content.read, _CHUNK_BYTES):
                await exchange.write(chunk)
            await exchange.end()

    async def _get(self, exchange: Exchange) -> StoredFile:
        return await self._store.get(exchange.caller, exchange.rest)

    def _open(self, file: StoredFile) -> BinaryIO:
        try:
            return self._store.path(file.id).open("rb")
        except OSError:
            raise file_not_found(file.id) from None


def _stated_length(exchange: Exchange, default: int) -> int:
    text = exchange.headers.get("content-length", "")
    return int(text) if text.isdecimal() and len(text) < 20 else default


def _read_fields(upload: Upload) -> tuple[str, float | None]:
    """Return the purpose and the lifetime of a file. Raise APIError for an invalid field."""
    purpose = upload.fields.get("purpose", "")
    if purpose not in PURPOSES:
        raise APIError(f"purpose must be one of: {', '.join(PURPOSES)}.", param="purpose")
    if upload.fields.get("expires_after[anchor]", "created_at") != "created_at":
        raise APIError("expires_after.anchor must be created_at.", param="expires_after.anchor")
    text = upload.fields.get("expires_after[seconds]")
    if text is None:
        return purpose, None
    seconds = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0
    check_lifetime(seconds, "expires_after.seconds")
    return purpose, seconds


def check_lifetime(seconds: int, param: str) -> None:
    """Raise APIError if a lifetime is outside the limits of the API."""
    if not MIN_LIFETIME_S <= seconds <= MAX_LIFETIME_S:
        raise APIError(
            f"{param} must be an integer from {MIN_LIFETIME_S} to {MAX_LIFETIME_S}.", param=param
        )


def _write(file: BinaryIO, received: list[bytes]) -> None:
    try:
        file.writelines(received)
    except OSError as error:
        raise storage_failed(error) from None
    received.clear()


def _sync(file: BinaryIO) -> None:
    try:
        file.flush()
        os.fsync(file.fileno())
    except OSError as error:
        raise storage_failed(error) from None
