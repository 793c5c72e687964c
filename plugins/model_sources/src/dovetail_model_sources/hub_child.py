"""The child process of a download from the hub, with limits on memory and time.

Run as: python -m dovetail_model_sources.hub_child PARENT_PID REQUEST. The request is a JSON object
with repo, file, revision, endpoint and cache. The script writes JSON lines to stdout: {"total":
BYTES}, {"received": BYTES}, and at the end {"path": TEXT} or {"error": TEXT}.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError, HTTPError

from dovetail.errors import DovetailError, ModelError
from dovetail.model_files import MAX_BYTES, MAX_OTHER_BYTES, MAX_TEMPLATE_BYTES
from dovetail.value_checks import shorten
from dovetail_model_sources.hub_cache import read_shards
from dovetail_model_sources.hub_files import MAX_FILE_BYTES, HubFile, Repository
from dovetail_model_sources.hub_reference import (
    CARD_FILE,
    CONFIG_FILE,
    INDEX_FILE,
    SINGLE_FILE,
    SMALL_FILES,
    HubReference,
)
from dovetail_model_sources.pip_child import limit_child

REPORT_BYTES = 64 << 10
"""Received bytes are reported in units of at least this size."""
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_LIMITS = {"chat_template.jinja": MAX_TEMPLATE_BYTES, CARD_FILE: 1 << 20}
_ABSENT = 404
_FULL = (errno.ENOSPC, errno.EDQUOT)


def main() -> None:
    """Download one model, and write the result to stdout."""
    # Larger chunks would be lost if the connection fails, and would delay the progress.
    constants.DOWNLOAD_CHUNK_SIZE = REPORT_BYTES
    if limit_child(int(sys.argv[1])):
        run(json.loads(sys.argv[2]), lambda line: print(json.dumps(line), flush=True))


def run(request: dict[str, str], write: Callable[[dict[str, Any]], None]) -> None:
    """Download one model. `write` receives the progress, and at the end the result."""
    reference = HubReference(
        repo=request["repo"], file=request["file"], revision=request["revision"]
    )
    endpoint, cache = request["endpoint"], Path(request["cache"])
    try:
        path = _Download(reference, Repository(reference, endpoint, cache), write).run()
    except Exception as error:
        write({"error": _explain(error, reference, endpoint, cache)})
    else:
        write({"path": str(path)})


class _Download:
    """Downloads one model.

    It requests the metadata of all files, then downloads the files, weights last.
    """

    def __init__(
        self,
        reference: HubReference,
        repository: Repository,
        write: Callable[[dict[str, Any]], None],
    ) -> None:
        self._wanted, self._repository, self._write = reference, repository, write
        self._pending = 0

    def run(self) -> Path:
        """Return the path of the model directory or GGUF file."""
        if self._wanted.file:
            names = self._wanted.gguf_files()
            self._fetch([self._require(name) for name in names])
            path = self._repository.snapshot / names[0]
        else:
            self._fetch_directory()
            path = self._repository.snapshot
        self._repository.write_ref()
        return path

    def _fetch_directory(self) -> None:
        config = self._require(CONFIG_FILE)
        optional = (self._look_up(name) for name in SMALL_FILES)
        small = [config, *(file for file in optional if file is not None)]
        single = self._look_up(SINGLE_FILE)
        index = None if single else self._look_up(INDEX_FILE)
        if single is None and index is None:
            raise ModelError(self._no_weights())
        if index is not None:
            self._fetch([*small, index])
            shards = read_shards(self._repository.snapshot / INDEX_FILE)
            self._fetch([self._require(name) for name in shards])
        elif single is not None:
            self._fetch([*small, single])

    def _fetch(self, files: Sequence[HubFile]) -> None:
        # Files with equal contents are downloaded once.
        missing = {file.etag: file for file in files if not self._repository.has(file)}
        num_bytes = sum(file.num_bytes or 0 for file in missing.values())
        self._repository.check_space(num_bytes)
        self._repository.check_sizes(missing.values())
        self._write({"total": num_bytes})
        for file in files:
            self._repository.download(file, self._received, limit=_limit(file.name))
        self._report()

    def _received(self, num_bytes: int) -> None:
        """Report new bytes. 0 is reported, too: it shows that the download makes progress."""
        self._pending += num_bytes
        if self._pending >= REPORT_BYTES or not num_bytes:
            self._report()

    def _report(self) -> None:
        self._write({"received": self._pending})
        self._pending = 0

    def _require(self, name: str) -> HubFile:
        self._report()  # an index may name 1,000 files
        return self._repository.look_up(name, max_bytes=_limit(name))

    def _look_up(self, name: str) -> HubFile | None:
        """Return the metadata of a file, or None if the repository does not have it."""
        try:
            return self._require(name)
        except HfHubHTTPError as error:
            code = error.response.headers.get("X-Error-Code", "EntryNotFound")
            if error.response.status_code == _ABSENT and code == "EntryNotFound":
                return None
            raise

    def _no_weights(self) -> str:
        title = self._wanted.title
        if any(self._look_up(name) for name in _PICKLES):
            return (
                f"{title} has no safetensors files, only pickle files (*.bin), which can run code "
                "and are never loaded.\nChoose a model with safetensors, or convert this one."
            )
        return (
            f"{title} has neither {SINGLE_FILE} nor {INDEX_FILE}.\n"
            f"For a GGUF file of the repository, specify its name: {self._wanted.repo}:NAME.gguf"
        )


def _limit(name: str) -> int:
    if name.endswith((".safetensors", ".gguf")):
        return MAX_FILE_BYTES
    return _LIMITS.get(name, MAX_BYTES.get(name, MAX_OTHER_BYTES))


def _explain(error: Exception, reference: HubReference, endpoint: str, cache: Path) -> str:
    """Return the message for an error, of at most three lines."""
    title = reference.title
    if isinstance(error, DovetailError):
        return str(error)
    if isinstance(error, HfHubHTTPError):
        return f"{title} cannot be downloaded: {_explain_status(error, reference, endpoint)}"
    if isinstance(error, HTTPError):
        return (
            f"{title} cannot be downloaded: the hub {endpoint} cannot be reached or the connection "
            f"failed ({shorten(str(error) or type(error).__name__)}).\nCheck the network, "
            "HF_ENDPOINT and the proxy. Run the command again to continue the download."
        )
    if isinstance(error, OSError) and error.errno is not None:
        why = "no space left on the device" if error.errno in _FULL else str(error)
        return (
            f"{title}: the cache {cache} cannot be changed: {why}.\nMake the directory writable "
            "and free space, or set HF_HUB_CACHE to another directory."
        )
    if isinstance(error, OSError):  # the message of huggingface_hub for a wrong size
        return f"{title} is damaged: {shorten(str(error))}. Try again."
    if isinstance(error, MemoryError):
        return f"{title} is rejected: the response of the hub {endpoint} needs too much memory."
    return f"{title} cannot be downloaded: {type(error).__name__}: {shorten(str(error))}"


def _explain_status(error: HfHubHTTPError, reference: HubReference, endpoint: str) -> str:
    status = error.response.status_code
    code = error.response.headers.get("X-Error-Code", "")
    if code == "RevisionNotFound":
        return f"the repository has no revision {shorten(reference.revision)}."
    if code == "EntryNotFound":
        name = reference.file or CONFIG_FILE
        return (
            f"the repository has no file {name}.\nFor a GGUF file of the repository, specify its "
            f"name: {reference.repo}:NAME.gguf"
        )
    if code == "GatedRepo" or status == 403:
        return (
            f"access to the repository is restricted.\nAccept its conditions at "
            f"{endpoint}/{reference.repo}, and set HF_TOKEN to a token of your account."
        )
    if status == 401 and code != "RepoNotFound" and "Invalid" in _reason(error):
        return "the hub rejects the token.\nSet HF_TOKEN to a valid token, or unset it."
    if status in (401, _ABSENT):
        return (
            f"the hub {endpoint} has no such model, or it is private.\nCheck the name. For a "
            "private model, set HF_TOKEN to a token with access."
        )
    if status == 429:
        return "the hub limits the rate of requests (status 429).\nTry again later."
    return f"the hub {endpoint} responded with status {status}.\nTry again later."


def _reason(error: HfHubHTTPError) -> str:
    return str(error.response.headers.get("X-Error-Message", ""))


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()
    sys.stdout.flush()
    os._exit(0)  # threads of the HTTP client must not delay the exit
