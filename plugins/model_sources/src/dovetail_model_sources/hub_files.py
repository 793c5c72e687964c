"""Files of one repository on the hub: their metadata, and verified downloads into the cache.

`hub_cache` describes the layout of the cache. A file gets its name in `blobs` after its size and
checksum were compared with those of the hub. The received part of an interrupted download stays in
`blobs/CHECKSUM.part`; the next download continues it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote, urlsplit

from huggingface_hub import get_hf_file_metadata
from huggingface_hub.errors import HfHubHTTPError, HTTPError
from huggingface_hub.file_download import http_get
from huggingface_hub.utils import build_hf_headers

from dovetail.errors import ModelError
from dovetail.value_checks import shorten
from dovetail_model_sources.hub_cache import has_checksum, is_checksum
from dovetail_model_sources.hub_reference import HubReference

MAX_FILE_BYTES = 1 << 40
MAX_HTTP_BYTES = 50 * 10**9
"""Maximum size of a file that huggingface_hub downloads without Xet."""
_LOCK_INTERVAL_S = 0.2
_SYNC_INTERVAL_S = 10.0
_MAX_SYNC_S = 3600.0
_COMMIT = re.compile(r"[\w-]{1,64}", re.ASCII)
_ETAG = re.compile(r"[\w.-]{1,128}", re.ASCII)
_PARTIAL = ".part"
_WRONG_RANGE = 416


@dataclass(frozen=True, kw_only=True)
class HubFile:
    """What the hub states about a file. num_bytes: None if the hub does not state the size.

    etag: the name of its contents in the cache. For files of huggingface.co, it is their checksum.
    """

    name: str
    url: str
    commit: str
    etag: str
    num_bytes: int | None

    @property
    def has_checksum(self) -> bool:
        """Whether the hub states a checksum: SHA-256, or SHA-1 as in git."""
        return is_checksum(self.etag)


class Repository:
    """The files of one repository at one commit. The first requested file determines the commit."""

    def __init__(self, reference: HubReference, endpoint: str, cache: Path) -> None:
        """Store the arguments. No request is sent yet. huggingface_hub provides the token."""
        self._wanted = reference
        self._endpoint = endpoint
        self._folder = cache / reference.folder_name
        self._headers: dict[str, str] = build_hf_headers(library_name="dovetail")
        self.commit = ""

    @property
    def snapshot(self) -> Path:
        """The directory of this commit."""
        return self._folder / "snapshots" / self.commit

    def look_up(self, name: str, *, max_bytes: int = MAX_FILE_BYTES) -> HubFile:
        """Return size, checksum and address of a file.

        Raises ModelError for an invalid size, checksum or address, and the errors of
        huggingface_hub.
        """
        revision = self.commit or self._wanted.revision
        path = f"{self._wanted.repo}/resolve/{quote(revision, safe='')}/{quote(name)}"
        url = f"{self._endpoint}/{path}"
        # The first request fails immediately if the hub is absent; later ones are repeated.
        metadata = get_hf_file_metadata(
            url, headers=self._headers, token=False, retry_on_errors=bool(self.commit)
        )
        commit, etag = metadata.commit_hash or "", metadata.etag or ""
        if not _COMMIT.fullmatch(commit) or (self.commit and commit != self.commit):
            self._reject(name, f"the commit {shorten(commit)}")
        if not _ETAG.fullmatch(etag) or etag.startswith("."):
            self._reject(name, f"the ETag {shorten(etag)}")
        if metadata.size is not None and not 0 <= metadata.size <= max_bytes:
            self._reject(name, f"a size of {metadata.size} bytes; the limit is {max_bytes}")
        if self._endpoint.startswith("https:") and not metadata.location.startswith("https:"):
            self._reject(name, "a URL without TLS")
        self.commit = commit
        return HubFile(
            name=name, url=metadata.location, commit=commit, etag=etag, num_bytes=metadata.size
        )

    def _reject(self, name: str, what: str) -> None:
        raise ModelError(
            f"{self._wanted.title} is rejected. The hub {self._endpoint} reports for "
            f"{shorten(name)}: {what}."
        )

    def has(self, file: HubFile) -> bool:
        """Return whether the contents of a file are in the cache."""
        return os.path.isfile(self._blob(file))

    def check_space(self, num_bytes: int) -> None:
        """Raise OSError if the disk of the cache has less than `num_bytes` left."""
        folder = self._folder
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
        if num_bytes > shutil.disk_usage(folder).free:
            raise OSError(errno.ENOSPC, "no space left on the device")

    def check_sizes(self, files: Iterable[HubFile]) -> None:
        """Raise ModelError for a file that the hub does not send without Xet."""
        for file in files:
            size = file.num_bytes or 0
            if size > MAX_HTTP_BYTES:
                raise ModelError(
                    f"{self._wanted.title} cannot be downloaded: {file.name} has {size / 1e9:.1f} "
                    f"GB, and the hub sends files above {MAX_HTTP_BYTES / 1e9:.0f} GB only to "
                    "clients with Xet.\nDownload it into the same cache with huggingface_hub, then "
                    f"run the command again:\nhf download {self._wanted.repo} {file.name} "
                    f"--revision {self._wanted.revision}"
                )

    def download(self, file: HubFile, received: Callable[[int], None], *, limit: int) -> Path:
        """Download a file unless it is in the cache, and return its path in the snapshot.

        received: called with the number of new bytes, and with 0 at intervals while the file is
        written to disk and checked, or another process downloads it. limit: maximum size, if the
        hub states none.
        """
        blob = self._blob(file)
        blob.parent.mkdir(parents=True, exist_ok=True)
        if not blob.is_file():
            self._download_blob(file, blob, received, limit if file.num_bytes is None else None)
        link = self.snapshot / file.name
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.exists():
            link.unlink(missing_ok=True)
            with suppress(FileExistsError):  # another process was faster
                link.symlink_to(os.path.relpath(blob, link.parent))
        return link

    def write_ref(self) -> None:
        """Record the commit of the revision."""
        ref = self._folder / "refs" / self._wanted.revision
        if self._wanted.revision != self.commit:
            ref.parent.mkdir(parents=True, exist_ok=True)
            temporary = ref.with_name(f"{ref.name}.{os.getpid()}.tmp")
            temporary.write_text(self.commit, encoding="ascii")
            temporary.replace(ref)

    def _blob(self, file: HubFile) -> Path:
        return self._folder / "blobs" / file.etag

    def _download_blob(
        self, file: HubFile, blob: Path, received: Callable[[int], None], limit: int | None
    ) -> None:
        partial = blob.with_name(blob.name + _PARTIAL)
        with _open_locked(partial, lambda: received(0)) as stream:
            if blob.is_file():  # another process has just downloaded it
                partial.unlink()
                return
            start = stream.tell() if file.has_checksum else 0
            if start > (file.num_bytes or 0):
                start = 0
            stream.truncate(start)
            stream.seek(start)
            received(start)
            bounded = _BoundedFile(stream, file, received, limit)
            try:
                http_get(
                    file.url,
                    bounded,  # type: ignore[arg-type]  # it has the methods that are used
                    resume_size=start,
                    headers=self._headers_for(file.url),
                    expected_size=file.num_bytes,
                    displayed_filename=file.name,
                )
                stream.flush()
                _sync(stream, lambda: received(0))
                _check_contents(partial, file, lambda: received(0))
            except Exception as error:
                if not (file.has_checksum and _can_continue(error)):
                    partial.unlink()
                raise
            partial.replace(blob)

    def _headers_for(self, url: str) -> dict[str, str]:
        """Return the headers of a request. The token is only sent to the hub itself."""
        same = urlsplit(url)[:2] == urlsplit(self._endpoint)[:2]
        return {
            name: value
            for name, value in self._headers.items()
            if same or name.lower() != "authorization"
        }


@contextmanager
def _open_locked(path: Path, waiting: Callable[[], None]) -> Iterator[IO[bytes]]:
    """Open a file for appending, and lock it so that no other process changes it.

    waiting: is called at intervals while another process has the lock.
    """
    while True:
        with path.open("ab") as stream:
            _lock(stream, waiting)
            # The previous owner may have renamed or removed the file.
            if path.exists() and os.path.samestat(os.fstat(stream.fileno()), path.stat()):
                yield stream
                return


def _lock(stream: IO[bytes], waiting: Callable[[], None]) -> None:
    while True:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            time.sleep(_LOCK_INTERVAL_S)
        else:
            return


def _sync(stream: IO[bytes], waiting: Callable[[], None]) -> None:
    """Write a file to disk. waiting: is called at intervals, for at most `_MAX_SYNC_S`."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        done = pool.submit(os.fsync, stream.fileno())
        deadline = time.monotonic() + _MAX_SYNC_S
        while time.monotonic() < deadline and not wait([done], timeout=_SYNC_INTERVAL_S).done:
            waiting()
        done.result()


def _can_continue(error: Exception) -> bool:
    """Return whether a later download can continue the received part after `error`."""
    if isinstance(error, HfHubHTTPError):
        return error.response.status_code != _WRONG_RANGE
    without_cause = isinstance(error, OSError) and error.errno is None  # of huggingface_hub
    return isinstance(error, HTTPError) or without_cause


class _BoundedFile:
    """A file that counts the received bytes, and rejects more bytes than the hub has stated."""

    def __init__(
        self, stream: IO[bytes], file: HubFile, received: Callable[[int], None], limit: int | None
    ) -> None:
        self._stream, self._file, self._received = stream, file, received
        self._limit = limit if file.num_bytes is None else file.num_bytes

    def write(self, chunk: bytes) -> int:
        if self._limit is not None and self._stream.tell() + len(chunk) > self._limit:
            self._stream.truncate(0)
            raise ModelError(
                f"{self._file.name} is larger than the {self._limit} bytes that are allowed."
            )
        self._received(len(chunk))
        return self._stream.write(chunk)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _check_contents(path: Path, file: HubFile, progress: Callable[[], None]) -> None:
    if file.has_checksum and not has_checksum(path, file.etag, progress):
        raise ModelError(
            f"{file.name} has a wrong checksum; the hub reports {file.etag}.\n"
            "The download was deleted. Try again; if it happens again, do not trust the hub."
        )
