"""Files of packed weights and their directory: integrity, ownership and the size limit."""

import os
import signal
import stat
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from dovetail.errors import ConfigError
from dovetail_cpu.options import CPUWorkerOptions
from dovetail_cpu.packed_cache import packed_file
from dovetail_cpu.packed_cache.folder import (
    CACHE_VARIABLE,
    ENDING,
    chosen_folder,
    packed_folder,
)
from dovetail_cpu.packed_cache.packed_file import (
    MAGIC,
    PAGE_BYTES,
    PackedEntry,
    PackedFile,
    PackedFileError,
    map_packed,
    read_packed,
    write_packed,
)
from dovetail_cpu.packed_cache.prefetch import PackedPrefetch
from dovetail_torch.cache_folder import FolderError

KEY = {"weights": "abc", "formats": ["x/1"]}
FORMS = {"a": bytes(range(256)) * 40, "b": b"q", "layers.0.c": b"\x00" * PAGE_BYTES}


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "one"
    with path.open("wb") as file:
        write_packed(file.fileno(), KEY, entries(FORMS))
    return path


def entries(forms):
    return [PackedEntry(name=name, form=memoryview(form)) for name, form in forms.items()]


def read(path, key=KEY):
    with path.open("rb") as file:
        return read_packed(file.fileno(), key, num_threads=2)


def test_packed_weights_are_mapped_on_page_boundaries(path):
    forms = read(path)
    assert {name: bytes(form) for name, form in forms.items()} == FORMS
    assert all(form.readonly for form in forms.values())
    assert path.read_bytes().find(FORMS["a"]) % PAGE_BYTES == 0
    # Pages of a mapped file need no new memory.
    address = np.frombuffer(forms["a"], np.uint8).ctypes.data
    lines = Path("/proc/self/maps").read_text().splitlines()
    assert any(_contains(line, address) and line.endswith(str(path)) for line in lines)
    path.unlink()
    assert bytes(forms["a"]) == FORMS["a"]


def _contains(line, address):
    start, _, end = line.split()[0].partition("-")
    return int(start, 16) <= address < int(end, 16)


def test_every_damaged_byte_is_detected(path):
    whole = path.read_bytes()
    begin = whole.find(FORMS["a"])
    # These are bytes of the header, of the index and of entries; bytes between entries are padding.
    offsets = [0, 17, 21, 25, 40, 120, begin, begin + len(FORMS["a"]) - 1, len(whole) - 1]
    for offset in offsets:
        damaged = bytearray(whole)
        damaged[offset] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(PackedFileError):
            read(path)
    path.write_bytes(whole)
    read(path)


@pytest.mark.parametrize("size", [0, 1, len(MAGIC), 200, PAGE_BYTES, -1, -PAGE_BYTES])
def test_a_truncated_file_is_rejected(path, size):
    os.truncate(path, size if size >= 0 else path.stat().st_size + size)
    with pytest.raises(PackedFileError):
        read(path)


def test_a_file_with_additional_bytes_is_rejected(path):
    with path.open("ab") as file:
        file.write(b"more")
    with pytest.raises(PackedFileError, match="bytes, expected"):
        read(path)


def test_a_packed_file_of_other_weights_or_of_another_program_is_rejected(path):
    with pytest.raises(PackedFileError, match="another checkpoint or format"):
        read(path, KEY | {"weights": "abd"})
    path.write_bytes(b"#!/bin/sh\n" * 1000)
    with pytest.raises(PackedFileError, match="does not contain packed weights"):
        read(path)


def store(folder, name, num_bytes):
    folder.store(name, num_bytes, lambda fd: os.write(fd, b"x" * num_bytes))


def names(folder):
    return sorted(path.name.removesuffix(ENDING) for path in folder.path.iterdir())


@pytest.fixture
def folder(tmp_path):
    return packed_folder(tmp_path / "deep" / "packed", max_bytes=100)


def test_a_directory_is_created_for_its_owner_only(folder):
    assert folder.open("a") is None
    store(folder, "a", 10)
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder.path / f"a{ENDING}").stat().st_mode) == 0o600
    fd = folder.open("a")
    assert os.read(fd, 100) == b"x" * 10
    os.close(fd)
    assert folder.open("b") is None


def test_the_least_recently_used_files_are_deleted_first(folder):
    for number, name in enumerate("abc"):
        store(folder, name, 30)
        os.utime(folder.path / f"{name}{ENDING}", (number, number))
    assert folder.names() == ["c", "b", "a"]
    os.close(folder.open("b", marks_use=False))
    os.close(folder.open("a"))
    assert folder.names() == ["a", "c", "b"]
    store(folder, "d", 30)
    assert names(folder) == ["a", "c", "d"]
    with pytest.raises(FolderError, match="limit of 100"):
        store(folder, "e", 101)
    assert names(folder) == ["a", "c", "d"]


def test_a_failed_write_leaves_no_file(folder):
    def fail(fd):
        os.write(fd, b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        folder.store("a", 10, fail)
    assert names(folder) == []


def test_temporary_files_of_exited_writers_are_deleted_even_if_the_process_id_is_reused(folder):
    store(folder, "a", 10)
    leftovers = [folder.path / f"b.{pid}.part" for pid in (os.getpid(), 1, 999_999_999)]
    for leftover in leftovers:
        leftover.touch()
    store(folder, "b", 10)
    assert names(folder) == ["a", "b"]


def test_a_file_that_another_process_is_writing_is_kept(folder, monkeypatch):
    """The other process may run in a container, so its process id is not valid here."""

    def write(fd):
        monkeypatch.setattr(os, "getpid", lambda: 12_345)
        store(folder, "b", 10)
        os.write(fd, b"x" * 10)

    monkeypatch.setattr(os, "getpid", lambda: 999_999_999)
    folder.store("a", 10, write)
    assert names(folder) == ["a", "b"]


def test_a_directory_that_others_may_write_to_is_rejected(folder):
    store(folder, "a", 10)
    folder.path.chmod(0o770)
    for use in (lambda: folder.open("a"), lambda: store(folder, "b", 1)):
        with pytest.raises(FolderError, match="other users may write"):
            use()


def test_a_file_that_others_may_write_to_is_rejected(folder):
    store(folder, "a", 10)
    (folder.path / f"a{ENDING}").chmod(0o606)
    with pytest.raises(FolderError, match="other users may write"):
        folder.open("a")


def test_files_of_another_user_are_rejected(folder, monkeypatch):
    store(folder, "a", 10)
    monkeypatch.setattr(os, "geteuid", lambda: 12_345)
    with pytest.raises(FolderError, match="not to you"):
        folder.open("a")


def test_symbolic_links_are_rejected(folder, tmp_path):
    store(folder, "a", 10)
    secret = tmp_path / "secret"
    secret.write_text("s")
    (folder.path / f"b{ENDING}").symlink_to(secret)
    with pytest.raises(OSError, match=r"symbolic|ELOOP|Too many"):
        folder.open("b")
    link = tmp_path / "link"
    link.symlink_to(folder.path)
    with pytest.raises(FolderError, match="link"):
        packed_folder(link, max_bytes=100).open("a")


def test_two_processes_may_write_the_same_file_at_the_same_time(folder):
    # Two processes write the same model: each writes a temporary file until it is complete.
    store(folder, "a", 10)
    store(folder, "a", 20)
    assert (folder.path / f"a{ENDING}").stat().st_size == 20
    assert names(folder) == ["a"]


def test_deleting_a_missing_packed_file_is_not_an_error(folder):
    folder.drop("a")
    store(folder, "a", 10)
    folder.drop("a")
    assert names(folder) == []
    assert isinstance(folder.path, Path)


def test_a_named_pipe_in_the_directory_is_rejected_without_waiting(folder):
    store(folder, "b", 8)
    os.mkfifo(folder.path / f"a{ENDING}")
    signal.alarm(10)  # without a writer, opening a pipe waits forever
    try:
        with pytest.raises(FolderError, match="unexpected type"):
            folder.open("a")
    finally:
        signal.alarm(0)


def test_other_objects_in_the_directory_do_not_prevent_a_write(folder):
    store(folder, "a", 40)
    (folder.path / f"link{ENDING}").symlink_to("missing")
    (folder.path / f"directory{ENDING}").mkdir()
    os.utime(folder.path / f"directory{ENDING}", ns=(0, 0))  # the first one to be deleted
    store(folder, "b", folder.max_bytes)
    assert set(names(folder)) == {"b", "directory"}


def test_numbers_of_the_index_that_are_not_finite_are_rejected(tmp_path):
    index = b'{"key": 1, "size": 1e999, "entries": []}'
    header = struct.pack("<16s4I", MAGIC, 1, len(index), zlib.crc32(index), 0)
    (tmp_path / "one").write_bytes(header + index)
    with pytest.raises(PackedFileError, match="cannot be parsed"):
        read(tmp_path / "one")


VERIFYING_AT_EXIT = """
import sys, time
from dovetail_cpu.packed_cache import packed_file, prefetch

class SlowChecksums:
    crc32 = staticmethod(lambda form: time.sleep(1000))

with open(sys.argv[1], "rb") as file:
    mapped = packed_file.map_packed(file.fileno())
packed_file.zlib = SlowChecksums
prefetch.PackedPrefetch(mapped, num_threads=3)
"""


@pytest.mark.costly
def test_the_exit_of_the_interpreter_does_not_wait_for_checksums(path):
    """An engine that fails to start does not take its prefetched weights."""
    subprocess.run([sys.executable, "-c", VERIFYING_AT_EXIT, path], check=True, timeout=300)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_an_error_of_any_thread_ends_the_verification(path, num_threads, monkeypatch):
    def fail_for_a(form):
        if len(form) == len(FORMS["a"]):
            raise MemoryError
        return zlib.crc32(form)

    monkeypatch.setattr(packed_file, "zlib", SimpleNamespace(crc32=fail_for_a))
    with path.open("rb") as file, pytest.raises(MemoryError):
        read_packed(file.fileno(), KEY, num_threads=num_threads)


def test_prefetched_weights_are_not_used_if_the_verification_has_no_memory(path, monkeypatch):
    def refuse(*arguments, **keywords):
        raise MemoryError

    monkeypatch.setattr(PackedFile, "verify", refuse)
    with path.open("rb") as file:
        prefetch = PackedPrefetch(map_packed(file.fileno()), num_threads=1)
        assert prefetch.take(file.fileno()) is None


def test_a_path_that_cannot_exist_is_rejected_with_the_option_or_the_variable(monkeypatch):
    for path, reason in (
        ("~no-such-user/x", "home directory .* not known"),
        ("a\0b", "null character"),
        ("~a\0b/x", "null character"),
    ):
        with pytest.raises(ConfigError, match=f"packed_cache=.*{reason}"):
            chosen_folder(CPUWorkerOptions(packed_cache=path))
    monkeypatch.setenv(CACHE_VARIABLE, "~no-such-user/x")
    with pytest.raises(ConfigError, match=f"{CACHE_VARIABLE}=.*home directory .* not known"):
        chosen_folder(CPUWorkerOptions())


def test_a_user_without_home_directory_has_no_cache_by_default(monkeypatch):
    def refuse(path):
        raise RuntimeError("Could not determine home directory.")

    for name in (CACHE_VARIABLE, "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "expanduser", refuse)
    assert chosen_folder(CPUWorkerOptions()) is None
