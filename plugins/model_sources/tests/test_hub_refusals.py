"""A hub that rejects, fails, or is hostile."""

import json

import pytest

from dovetail.errors import ModelError
from dovetail_model_sources import hub_cache, hub_download
from dovetail_model_sources.download import OFFLINE_VARIABLE
from dovetail_model_sources.sources import HubSource


def blobs(hub_cache_folder):
    return sorted(path.name for path in hub_cache_folder.rglob("blobs/*"))


@pytest.mark.parametrize("variable", [OFFLINE_VARIABLE, "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_offline_mode_starts_no_download(rejected, single, monkeypatch, variable):
    monkeypatch.setenv(variable, "1")
    message = rejected()
    assert f"{variable} forbids downloads" in message
    assert not single.requests


def test_a_missing_package_is_reported_with_the_command_that_installs_it(
    rejected, single, monkeypatch
):
    monkeypatch.setattr(hub_download.importlib.util, "find_spec", lambda name: None)
    assert "pip install 'dovetail-model-sources[hub]'" in rejected()


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [
        ("http://127.0.0.1:9", "cannot be reached"),
        ("http://no-such-host.invalid", "cannot be reached"),
        ("ftp://example.org", "HF_ENDPOINT='ftp://example.org'"),
    ],
)
def test_the_error_for_an_unreachable_hub_gives_the_cause(
    rejected, hub, monkeypatch, hub_cache_folder, endpoint, expected
):
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    assert expected in rejected()
    assert not hub_cache_folder.exists()


@pytest.mark.parametrize(
    ("status", "headers", "expected"),
    [
        (401, {"X-Error-Code": "RepoNotFound"}, "no such model, or it is private"),
        (401, {"X-Error-Message": "Invalid credentials"}, "rejects the token"),
        (403, {"X-Error-Code": "GatedRepo"}, "Accept its conditions at"),
        (404, {"X-Error-Code": "RepoNotFound"}, "no such model"),
        (404, {"X-Error-Code": "RevisionNotFound"}, "no revision 'main'"),
        (404, {"X-Error-Code": "EntryNotFound"}, "no file config.json"),
        (404, {}, "no such model"),
        (429, {}, "Try again later"),
        (500, {}, "status 500"),
        (503, {}, "status 503"),
    ],
)
def test_the_error_explains_the_http_status_of_the_hub(
    rejected, single, hub_cache_folder, status, headers, expected
):
    single.status["config.json"] = (status, headers)
    assert expected in rejected()
    assert blobs(hub_cache_folder) == []


def test_an_error_status_of_the_storage_host_fails_the_download(
    rejected,
    single,
):
    single.storage_status = 403
    assert "cannot be downloaded" in rejected()


def test_a_repository_with_pickle_files_only_is_rejected(rejected, hub, hub_cache_folder):
    hub.files = {"config.json": b"{}", "pytorch_model.bin": b"pickle"}
    assert "only pickle files" in rejected()
    assert blobs(hub_cache_folder) == []


def test_the_error_for_a_repository_without_weights_shows_how_to_name_a_gguf_file(
    rejected,
    hub,
):
    hub.files = {"config.json": b"{}"}
    assert "acme/tiny:NAME.gguf" in rejected()


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_contents_with_a_wrong_checksum_are_deleted(rejected, single, make, hub_cache_folder, name):
    content = single.files[name]
    single.bodies[name] = content[:-1] + b"?"
    assert f"{name} has a wrong checksum" in rejected()
    assert not [blob for blob in blobs(hub_cache_folder) if blob.endswith(".part")]
    single.bodies.clear()
    assert (make(HubSource).fetch("acme/tiny") / name).read_bytes() == content


def test_contents_that_are_too_short_or_too_long_are_rejected(
    rejected,
    single,
):
    single.bodies["tokenizer.json"] = b"{"
    assert "damaged" in rejected()
    single.bodies["tokenizer.json"] = b"{}" * 1000
    assert "is larger than the 2 bytes" in rejected()


def test_compressed_contents_that_expand_too_far_are_rejected(
    rejected,
    single,
):
    single.zipped.add("tokenizer.json")
    single.bodies["tokenizer.json"] = b" " * 50_000_000
    assert "is larger than" in rejected()


def test_a_partial_download_with_wrong_contents_is_deleted(
    rejected, single, make, hub_cache_folder
):
    single.status["model.safetensors"] = (500, {})
    single.files["model.safetensors.index.json"] = b'{"weight_map": {"a": "model.safetensors"}}'
    del single.status["model.safetensors"]
    path = make(HubSource).fetch("acme/tiny")
    blob = (path / "model.safetensors").resolve()
    blob.with_name(f"{blob.name}.part").write_bytes(b"other contents")
    blob.unlink()
    assert "wrong checksum" in rejected()
    assert (make(HubSource).fetch("acme/tiny") / "model.safetensors").is_file()


def test_a_hub_that_stops_sending_data_is_reported(rejected, real_child, single, monkeypatch):
    monkeypatch.setattr(hub_download, "STALL_S", 2.0)
    single.stall = {"model.safetensors"}
    assert "sent almost no data for 2 s" in rejected()


@pytest.mark.parametrize(
    ("header", "value", "expected"),
    [
        ("ETag", '"../../../escape"', ": the ETag"),
        ("ETag", '".."', ": the ETag"),
        ("ETag", "", ": the ETag"),
        ("X-Repo-Commit", "../../escape", ": the commit"),
        ("X-Repo-Commit", "", ": the commit"),
        ("X-Linked-Size", "99999999999999", "the limit is"),
    ],
)
def test_hostile_headers_are_rejected(
    rejected, single, hub_cache_folder, tmp_path, header, value, expected
):
    single.headers["config.json"] = {header: value}
    assert expected in rejected()
    assert not list(tmp_path.rglob("escape*"))


@pytest.mark.parametrize(
    "index",
    [
        b'{"weight_map": {"a": "../../../escape.safetensors"}}',
        b'{"weight_map": {"a": "/etc/x.safetensors"}}',
        b'{"weight_map": {"a": "pytorch_model.bin"}}',
        b'{"weight_map": {"a": 7}}',
        b'{"weight_map": {}}',
        b"[]",
        b"{",
        json.dumps({"weight_map": {f"{n}": f"{n}.safetensors" for n in range(1001)}}).encode(),
    ],
)
def test_a_hostile_index_is_rejected(rejected, sharded, hub_cache_folder, tmp_path, index):
    sharded.files["model.safetensors.index.json"] = index
    assert "index.json" in rejected()
    assert not list(tmp_path.rglob("escape*"))
    assert not [name for name in sharded.downloads() if name.endswith(".bin")]


def test_a_missing_shard_on_the_hub_is_reported(
    rejected,
    sharded,
):
    del sharded.files["model-00002-of-00002.safetensors"]
    assert "no file" in rejected()


def test_a_config_that_is_too_large_is_rejected(
    rejected,
    single,
):
    single.files["config.json"] = b" " * (17 << 20)
    assert "the limit is" in rejected()
    assert single.downloads() == []


def test_a_full_disk_is_reported_before_the_download(
    rejected,
    single,
):
    single.headers["model.safetensors"] = {"X-Linked-Size": str(1 << 40)}
    message = rejected()
    assert "no space left" in message
    assert "HF_HUB_CACHE" in message
    assert single.downloads() == []


def test_a_cache_that_cannot_be_written_is_reported(rejected, single, hub_cache_folder):
    hub_cache_folder.parent.mkdir(parents=True, exist_ok=True)
    hub_cache_folder.write_text("a file")
    assert "cannot be changed" in rejected()


@pytest.mark.parametrize(
    "argument",
    [
        "acme/tiny/more", "acme/../tiny", "acme/ti--ny", "-acme/tiny", "acme/tiny@../x",
        "acme/tiny@", "acme/tiny:x.bin", "acme/tiny:../x.gguf", "acme/tiny:t-00009-of-00003.gguf",
        "acme/" + "x" * 600, "acme/ti\nny",
    ],
)  # fmt: skip
def test_an_invalid_reference_is_rejected(rejected, single, make, argument):
    for method in (make(HubSource).find, make(HubSource).fetch):
        with pytest.raises(ModelError, match="is not the name of"):
            method(argument)
    assert not single.requests


@pytest.mark.parametrize("variable", ["HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"])
def test_the_hub_cache_of_an_unknown_user_is_an_empty_cache(variable, monkeypatch):
    for name in ("HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, "~no-such-user/x")
    assert "~no-such-user" in str(hub_cache.hub_cache_dir())
    assert list(hub_cache.snapshots(hub_cache.hub_cache_dir())) == []
