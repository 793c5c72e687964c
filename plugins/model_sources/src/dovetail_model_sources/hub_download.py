"""Downloads a model from the hub in a child process with limits on memory, output and time."""

from __future__ import annotations

import importlib.util
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO

from dovetail.errors import ModelError
from dovetail_model_sources.download import OFFLINE_VARIABLE, PARTS, is_offline, progress_bar
from dovetail_model_sources.hub_reference import HubReference, hub_endpoint

STALL_S = 120.0
"""Seconds without progress, such as 64 KiB of data, after which a download is stopped."""
_ENVIRONMENT = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_XET": "1",  # without Xet, all bytes pass through our checks
}
_MAX_LINE_BYTES = 1 << 16
_OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
_TRUE = ("1", "on", "yes", "true")


def download_model(reference: HubReference, cache: Path, report: Callable[[str], None]) -> Path:
    """Download a model into the cache, and return its path.

    Raises ModelError that names the cause: downloads are forbidden, huggingface_hub is missing, no
    network, no such model, no access, a wrong checksum, a full disk, or a limit.
    """
    _check_allowed(reference, cache)
    if importlib.util.find_spec("huggingface_hub") is None:
        raise ModelError(
            f"{reference.title} cannot be downloaded: the package huggingface_hub is missing.\n"
            "Run: pip install 'dovetail-model-sources[hub]'"
        )
    endpoint = hub_endpoint()
    report(f"Downloading {reference.title} from {endpoint}.")
    process = _start(reference, endpoint, cache)
    assert process.stdout is not None
    try:
        path = _follow(process.stdout, reference, report)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    size = sum(file.stat().st_size for file in _files_of(path)) / 1e6
    report(f"Downloaded {reference.title}: {size:.1f} MB.")
    return path


def _start(reference: HubReference, endpoint: str, cache: Path) -> subprocess.Popen[bytes]:
    request = {
        "repo": reference.repo,
        "file": reference.file,
        "revision": reference.revision,
        "endpoint": endpoint,
        "cache": str(cache),
    }
    module = "dovetail_model_sources.hub_child"
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, str(os.getpid()), json.dumps(request)],
        env={**os.environ, **_ENVIRONMENT},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )


def _check_allowed(reference: HubReference, cache: Path) -> None:
    stated = [name for name in _OFFLINE_VARIABLES if os.environ.get(name, "").lower() in _TRUE]
    if is_offline():
        stated.insert(0, OFFLINE_VARIABLE)
    if stated:
        raise ModelError(
            f"{reference.title} is not in the cache {cache}, and {stated[0]} forbids downloads.\n"
            f"Unset {stated[0]}, or copy the cache of another machine."
        )


def _follow(output: IO[bytes], reference: HubReference, report: Callable[[str], None]) -> Path:
    """Report the progress of the download. Return the model's path, which the child prints."""
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read_lines, args=(output, lines), daemon=True).start()
    total = received = shown = 0
    while True:
        try:
            line = lines.get(timeout=STALL_S)
        except queue.Empty:
            raise ModelError(
                f"{reference.title} cannot be downloaded: the hub sent almost no data for "
                f"{STALL_S:.0f} s.\nCheck the network. Run the command again to continue the "
                "download."
            ) from None
        if not line:
            raise ModelError(
                f"{reference.title} cannot be downloaded: the download process was killed, "
                "perhaps because of its memory limit."
            )
        message = json.loads(line)
        if "path" in message:
            return Path(message["path"])
        if "error" in message:
            raise ModelError(message["error"])
        total += message.get("total", 0)
        received += message.get("received", 0)
        done = min(PARTS, PARTS * received // total) if total else 0
        if done > shown:
            shown = done
            report(progress_bar(reference.title, received, total))


def _read_lines(output: IO[bytes], lines: queue.SimpleQueue[bytes]) -> None:
    """Put each line into the queue, and an empty line at the end of the output."""
    try:
        while line := output.readline(_MAX_LINE_BYTES):
            lines.put(line)
    except ValueError:  # the caller has closed the pipe
        pass
    lines.put(b"")


def _files_of(path: Path) -> list[Path]:
    return [path] if path.is_file() else [file for file in path.iterdir() if file.is_file()]
