"""Downloads from the hub that send no data for a time are not stopped while they make progress."""

import fcntl
import hashlib
import threading
import time

import pytest

from dovetail.errors import ModelError
from dovetail_model_sources import hub_cache, hub_download, hub_files
from dovetail_model_sources.sources import HubSource

STALL_S, STEP_S, NUM_STEPS = 1.0, 0.2, 8
"""A phase of NUM_STEPS * STEP_S takes longer than a download may stall."""


@pytest.fixture(autouse=True)
def short_limits(monkeypatch):
    monkeypatch.setattr(hub_download, "STALL_S", STALL_S)
    monkeypatch.setattr(hub_files, "_SYNC_INTERVAL_S", STEP_S)
    monkeypatch.setattr(hub_files, "_LOCK_INTERVAL_S", STEP_S)


def fetch(make):
    return make(HubSource).fetch("acme/tiny")


def test_a_slow_disk_does_not_stop_a_download(single, make, monkeypatch):
    def sync(descriptor):
        calls.append(descriptor)
        if len(calls) == 1:
            time.sleep(NUM_STEPS * STEP_S)

    calls = []
    monkeypatch.setattr(hub_files.os, "fsync", sync)
    assert (fetch(make) / "model.safetensors").is_file()


def test_a_disk_that_never_finishes_stops_the_download(single, make, monkeypatch):
    released = threading.Event()
    monkeypatch.setattr(hub_files, "_MAX_SYNC_S", 2 * STEP_S)
    monkeypatch.setattr(hub_files.os, "fsync", lambda descriptor: released.wait(NUM_STEPS))
    threading.Timer(STALL_S + 4 * STEP_S, released.set).start()
    with pytest.raises(ModelError, match="sent almost no data"):
        fetch(make)


def test_a_slow_checksum_does_not_stop_a_download(single, make, monkeypatch):
    class SlowHash:
        def __init__(self, content=b""):
            self.hash = real(content)

        def update(self, content):
            time.sleep(STEP_S)
            self.hash.update(content)

        def hexdigest(self):
            return self.hash.hexdigest()

    real = hashlib.sha256
    size = -(-len(single.files["model.safetensors"]) // NUM_STEPS)
    monkeypatch.setattr(hub_cache, "_CHUNK_BYTES", size)
    monkeypatch.setattr(hub_cache, "_PROGRESS_BYTES", size)
    monkeypatch.setattr(hub_cache.hashlib, "sha256", SlowHash)
    assert (fetch(make) / "model.safetensors").is_file()


def test_slow_requests_of_metadata_do_not_stop_a_download(single, make, monkeypatch):
    def look_up(*arguments, **options):
        time.sleep(STEP_S)
        return real(*arguments, **options)

    real = hub_files.Repository.look_up
    monkeypatch.setattr(hub_files.Repository, "look_up", look_up)
    assert (fetch(make) / "model.safetensors").is_file()


def test_a_download_waits_for_another_process(single, make, hub_cache_folder):
    digest = hashlib.sha256(single.files["model.safetensors"]).hexdigest()
    blobs = hub_cache_folder / "models--acme--tiny/blobs"
    blobs.mkdir(parents=True)
    with (blobs / f"{digest}.part").open("ab") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        threading.Timer(NUM_STEPS * STEP_S, fcntl.flock, (stream, fcntl.LOCK_UN)).start()
        assert (fetch(make) / "model.safetensors").is_file()


def test_the_error_for_a_file_above_50_gb_states_the_command_of_another_client(
    single, rejected, monkeypatch
):
    monkeypatch.setattr(hub_files, "MAX_HTTP_BYTES", 500_000)
    message = rejected()
    assert "model.safetensors has 0.0 GB" in message
    assert message.endswith("\nhf download acme/tiny model.safetensors --revision main")
    assert "model.safetensors" not in single.downloads()
