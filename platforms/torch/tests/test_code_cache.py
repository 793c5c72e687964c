"""The cache of compiled code: files of other keys, damaged and hostile files, and directories."""

import hashlib
import json
import os
from pathlib import Path

import pytest

from dovetail.errors import ConfigError
from dovetail_torch.cache_folder import CacheFolder
from dovetail_torch.compilation import code_cache, setup
from dovetail_torch.compilation.code_cache import ENDING, MAGIC, CodeCache

KEY = {"graph": "abc", "sizes": [1, 8]}
FILES = {"a.txt": b"x" * 1000, "deep/er/b.so": b"\x7fELF", "empty": b""}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "cache"


def make(path, **options):
    return CodeCache(CacheFolder(path=path, max_bytes=1 << 20, ending=ENDING), **options)


@pytest.fixture
def stored(path, tmp_path):
    """Return the path of a stored cache entry."""
    source = tmp_path / "source"
    for name, data in FILES.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(data)
    (source / "deep/er/b.so").chmod(0o700)
    (source / "link").symlink_to("/etc/passwd")
    assert make(path).store(KEY, source) > 1000
    (file,) = path.iterdir()
    return file


def restore(path, tmp_path, key=KEY, **options):
    target = tmp_path / "target"
    target.mkdir(exist_ok=True)
    state = make(path, **options).restore(key, target).state
    return state, {
        str(item.relative_to(target)): item.read_bytes()
        for item in target.rglob("*")
        if item.is_file()
    }


def test_the_files_of_an_entry_are_restored_without_links(stored, path, tmp_path):
    assert restore(path, tmp_path) == ("hit", FILES)
    assert os.access(tmp_path / "target/deep/er/b.so", os.X_OK)
    assert not os.access(tmp_path / "target/a.txt", os.X_OK)


def test_a_different_key_is_a_cache_miss(stored, path, tmp_path):
    assert restore(path, tmp_path, KEY | {"sizes": [1]}) == ("miss", {})


def with_index(change):
    """Return a function that changes the index of an entry and corrects the checksum."""

    def apply(data):
        rest = data[len(MAGIC) + 32 :]
        end = 8 + int.from_bytes(rest[:8], "little")
        index = json.loads(rest[8:end])
        text = change(index)
        text = json.dumps(index if text is None else text).encode() if text != b"" else b"["
        rest = len(text).to_bytes(8, "little") + text + rest[end:]
        return MAGIC + hashlib.sha256(rest).digest() + rest

    return apply


def renamed(name):
    return with_index(lambda index: index["files"][0].__setitem__(0, name))


HOSTILE = {
    "empty": lambda data: b"",
    "cut": lambda data: data[:-1],
    "longer": lambda data: data + b"x",
    "one bit": lambda data: data[:-3] + bytes([data[-3] ^ 1]) + data[-2:],
    "another magic": lambda data: b"X" + data[1:],
    "only the magic": lambda data: MAGIC,
    "parent directory": renamed("../escaped"),
    "inner parent directory": renamed("a/../../escaped"),
    "absolute path": renamed("/tmp/dovetail-escaped"),
    "no path": renamed(""),
    "another key": with_index(lambda index: index["key"].update(graph="other")),
    "no files": with_index(lambda index: index.pop("files") and None),
    "wrong size": with_index(lambda index: index["files"][0].__setitem__(1, 7)),
    "negative sizes": with_index(
        lambda index: index["files"].extend([["n", -5, False], ["m", 5, False]])
    ),
    "rows of text": with_index(lambda index: {"key": index["key"], "files": ["abc"]}),
    "invalid JSON": with_index(lambda index: b""),
    "a list": with_index(lambda index: [1]),
    "infinite size": with_index(lambda index: index["files"][0].__setitem__(1, float("inf"))),
    "a file as a directory": renamed("deep"),
    "a null character": renamed("a\0b"),
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_file_is_deleted_and_no_file_is_written_outside_the_directory(
    stored, path, tmp_path, change, caplog
):
    stored.write_bytes(change(stored.read_bytes()))
    assert restore(path, tmp_path) == ("damaged", {})
    assert "Cached code cannot be used and is recompiled" in caplog.text
    assert not stored.exists()
    assert not list(tmp_path.rglob("*escaped*"))
    # Nothing that could be taken for code of this key remains.
    assert restore(path, tmp_path)[0] == "miss"


def test_a_link_and_a_file_that_other_users_may_write_to_are_rejected(
    stored, path, tmp_path, caplog
):
    stored.chmod(0o666)
    assert restore(path, tmp_path) == ("damaged", {})
    assert "other users may write" in caplog.text
    stored.symlink_to("/dev/zero")
    assert restore(path, tmp_path) == ("damaged", {})


def test_a_directory_that_other_users_may_write_to_is_not_used(stored, path, tmp_path, caplog):
    path.chmod(0o777)
    assert restore(path, tmp_path) == ("damaged", {})
    with pytest.raises(ConfigError, match=r"compile_cache=.*other users may write"):
        restore(path, tmp_path, is_required=True)


@pytest.mark.parametrize("kind", ["file", "below a file"])
def test_a_directory_that_cannot_be_written_is_an_error_only_if_the_user_named_it(
    tmp_path, kind, caplog
):
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" if kind == "file" else tmp_path / "file" / "cache"
    assert restore(path, tmp_path)[0] in ("miss", "damaged")
    assert make(path).store(KEY, tmp_path / "target") == 0
    assert "Compiled code cannot be cached" in caplog.text
    with pytest.raises(ConfigError, match=r"compile_cache='.*' cannot be used.*'off'"):
        restore(path, tmp_path, is_required=True)


def test_an_entry_beyond_the_limit_is_neither_stored_nor_read(
    stored, path, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(code_cache, "MAX_ENTRY_BYTES", 500)
    assert make(path).store(KEY, tmp_path / "source") == 0
    assert "the limit is 500" in caplog.text
    assert restore(path, tmp_path) == ("damaged", {})


def test_a_directory_below_an_unknown_home_is_rejected_and_the_default_is_no_cache(monkeypatch):
    with pytest.raises(ConfigError, match=r"compile_cache=.*home directory .* not known"):
        setup._make_cache("~no-such-user/x")

    def refuse(path):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "expanduser", refuse)
    assert setup._make_cache(None) is None
