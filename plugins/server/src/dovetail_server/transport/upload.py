"""Reads an upload in the form multipart/form-data. The file goes to a sink, never into memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from dovetail_server.protocol.errors import APIError
from dovetail_server.storage.files import file_too_large

FILE_FIELD = "file"
MAX_PARTS = 16
MAX_FIELD_BYTES = 1024
MAX_NAME_CHARS = 255


class Upload:
    """An upload that is being received.

    fields: the text fields. name: the name of the file on the client's machine, without
    directories. num_bytes: the size of the file so far.
    """

    def __init__(
        self,
        headers: Mapping[str, str],
        names: Collection[str],
        write: Callable[[bytes], object],
        max_file_bytes: int,
    ) -> None:
        """names: names of the accepted text fields. write: receives the content of the file.

        Raises APIError if the body has a different form.
        """
        self.fields: dict[str, str] = {}
        self.name = ""
        self.num_bytes = 0
        self._names = names
        self._write = write
        self._max_file_bytes = max_file_bytes
        self._num_parts = 0
        self._has_file = False
        self._is_complete = False
        self._field = ""
        self._header = b""
        self._disposition = b""
        self._value = b""
        self._parser = MultipartParser(
            _boundary(headers),
            {
                "on_part_begin": self._begin,
                "on_header_begin": self._begin_header,
                "on_header_field": self._add_name,
                "on_header_value": self._add_value,
                "on_headers_finished": self._read_headers,
                "on_part_data": self._add_data,
                "on_part_end": self._end,
                "on_end": self._complete,
            },
        )

    def feed(self, data: bytes) -> None:
        """Parse a part of the body. Blocks while the file is written.

        Raises APIError for an invalid form or field, or a file that is too large.
        """
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise APIError(f"The form cannot be read: {error}.", code="invalid_form") from None

    def finish(self) -> None:
        """Check that the form is complete and has a file that is not empty."""
        if not self._is_complete:
            raise APIError(
                "The multipart/form-data body is incomplete: the closing boundary is missing.",
                code="invalid_form",
            )
        if not self._has_file:
            raise APIError(
                "The field 'file' is missing.", code="missing_required_parameter", param=FILE_FIELD
            )
        if not self.num_bytes:
            raise APIError("The file is empty.", param=FILE_FIELD)

    # --- callbacks of the parser --------------------------------------------------------------

    def _begin(self) -> None:
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise APIError(f"The form has more than {MAX_PARTS} fields.", code="invalid_form")
        self._disposition = self._value = b""

    def _begin_header(self) -> None:
        self._header = b""

    def _add_name(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end].lower()

    def _add_value(self, data: bytes, start: int, end: int) -> None:
        if self._header == b"content-disposition":
            self._disposition += data[start:end]

    def _read_headers(self) -> None:
        _, options = parse_options_header(self._disposition.decode("latin-1"))
        self._field = options.get(b"name", b"").decode("utf-8", "replace")
        if self._field == FILE_FIELD and not self._has_file:
            self._has_file = True
            self.name = _base_name(options.get(b"filename", b"").decode("utf-8", "replace"))
        elif self._field in self.fields or self._field == FILE_FIELD:
            raise APIError(f"The field {self._field} occurs twice.", param=self._field)
        elif self._field not in self._names:
            names = ", ".join([FILE_FIELD, *self._names])
            raise APIError(
                f"The field {self._field[:80]!r} is not known; use: {names}.",
                code="unknown_parameter",
                param=self._field[:80],
            )

    def _add_data(self, data: bytes, start: int, end: int) -> None:
        if self._field == FILE_FIELD:
            self.num_bytes += end - start
            if self.num_bytes > self._max_file_bytes:
                raise file_too_large(self._max_file_bytes)
            self._write(data[start:end])
            return
        self._value += data[start:end]
        if len(self._value) > MAX_FIELD_BYTES:
            raise APIError(
                f"{self._field} has more than {MAX_FIELD_BYTES} bytes.", param=self._field
            )

    def _end(self) -> None:
        if self._field != FILE_FIELD:
            self.fields[self._field] = self._value.decode("utf-8", "replace")

    def _complete(self) -> None:
        self._is_complete = True


def _boundary(headers: Mapping[str, str]) -> bytes:
    kind, options = parse_options_header(headers.get("content-type", ""))
    boundary = options.get(b"boundary", b"")
    if kind.strip() != b"multipart/form-data" or not 0 < len(boundary) <= 200:
        raise APIError(
            "The file must be sent as multipart/form-data with a boundary.",
            status=415,
            code="unsupported_media_type",
        )
    return boundary


def _base_name(name: str) -> str:
    last = name.replace("\\", "/").rpartition("/")[2]
    return "".join(sign for sign in last if sign.isprintable())[:MAX_NAME_CHARS] or "upload"
