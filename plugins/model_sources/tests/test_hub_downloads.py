"""Downloads from a fake hub on loopback, and models in the cache of huggingface_hub."""

import signal
import subprocess
import sys
import time

import pytest

from dovetail.config.model_sources import find_model
from dovetail.plugins import PluginRegistry
from dovetail_devkit import load_suite
from dovetail_model_sources import hub_cache
from dovetail_model_sources.download import OFFLINE_VARIABLE
from dovetail_model_sources.hub_reference import parse_hub_reference
from dovetail_model_sources.sources import HubSource

COMMIT = "a" * 40
WEIGHTS = bytes(range(256)) * 2000
CARD = b"---\nlanguage: en\nlicense: apache-2.0\n---\n# Tiny\n"
SMALL = {
    "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "README.md": CARD,
}
UNNEEDED = {"pytorch_model.bin": b"pickle", "flax_model.msgpack": b"flax", "code.py": b"raise"}
FETCH = """
import sys
from pathlib import Path
from dovetail.interfaces import ModelSourceContext
from dovetail_model_sources.sources import HubSource
print(HubSource(ModelSourceContext(cache_dir=Path("/absent"))).fetch(sys.argv[1]))
"""


def test_the_source_meets_its_contract(single, hub_cache_folder):
    load_suite("model_source")(HubSource, arguments=["acme/tiny"])


def test_only_the_needed_files_of_a_model_are_downloaded(
    real_child, single, make, hub_cache_folder, lines
):
    path = make(HubSource).fetch("acme/tiny")
    assert path == hub_cache_folder / "models--acme--tiny" / "snapshots" / COMMIT
    assert {file.name: file.read_bytes() for file in path.iterdir()} == {
        **SMALL,
        "model.safetensors": WEIGHTS,
    }
    assert single.downloads()[-1] == "model.safetensors"
    assert not UNNEEDED.keys() & {name for *_, name, _ in single.requests} - {"pytorch_model.bin"}
    assert (path.parents[1] / "refs/main").read_text() == COMMIT
    assert lines[0] == f"Downloading acme/tiny from {single.endpoint}."
    assert "[####################]" in lines[-2]
    assert lines[-1].startswith("Downloaded acme/tiny: 0.5 MB")
    count = len(single.requests)
    assert make(HubSource).fetch("acme/tiny") == make(HubSource).find("acme/tiny") == path
    assert len(single.requests) == count


def test_only_the_shards_in_the_index_are_downloaded(sharded, make):
    path = make(HubSource).fetch("acme/tiny")
    assert (path / "model-00002-of-00002.safetensors").read_bytes() == WEIGHTS[:5000]
    assert "consolidated.safetensors" not in sharded.downloads()
    assert make(HubSource).find("acme/tiny") == path


def test_a_gguf_file_is_downloaded_by_its_name(hub, make):
    hub.files = {"tiny-q4.gguf": b"GGUF4", "tiny-q8.gguf": b"GGUF8"}
    hub.large = set(hub.files)
    path = make(HubSource).fetch("acme/tiny:tiny-q8.gguf")
    assert path.read_bytes() == b"GGUF8"
    assert hub.downloads() == ["tiny-q8.gguf"]
    assert make(HubSource).find("acme/tiny:tiny-q4.gguf") is None
    (listed,) = make(HubSource).local_models()
    assert listed.name == "acme/tiny:tiny-q8.gguf"


def test_all_parts_of_a_split_gguf_model_are_downloaded(hub, make):
    hub.files = {f"t-0000{part}-of-00003.gguf": b"GGUF%d" % part for part in (1, 2, 3)}
    path = make(HubSource).fetch("acme/tiny:t-00002-of-00003.gguf")
    assert path.name == "t-00001-of-00003.gguf"
    assert sorted(file.name for file in path.parent.iterdir()) == sorted(hub.files)
    (path.parent / "t-00003-of-00003.gguf").unlink()
    assert make(HubSource).find("acme/tiny:t-00001-of-00003.gguf") is None


@pytest.mark.parametrize("revision", ["v1", "refs/pr/2", COMMIT])
def test_a_revision_selects_a_commit(single, make, revision):
    path = make(HubSource).fetch(f"acme/tiny@{revision}")
    assert path.name == COMMIT
    assert make(HubSource).find(f"acme/tiny@{revision}") == path
    assert make(HubSource).find("acme/tiny") is None


def test_the_hub_name_and_the_revision_option_select_the_source(
    single, make, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    path = find_model("acme/tiny", PluginRegistry(), revision="v1")
    assert path == make(HubSource).find("acme/tiny@v1")
    assert find_model("hub:acme/tiny@v1", PluginRegistry()) == path
    assert find_model("acme/tiny", PluginRegistry(), fetch=False) is None
    (tmp_path / "acme").mkdir()
    assert find_model("acme/tiny", PluginRegistry()) is None


def test_a_model_in_the_cache_is_used_offline_without_the_package(single, make, monkeypatch):
    path = make(HubSource).fetch("acme/tiny")
    monkeypatch.setenv(OFFLINE_VARIABLE, "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert make(HubSource).fetch("acme/tiny") == path


def test_the_token_is_sent_to_the_hub_only(rejected, single, make, monkeypatch):
    single.token = "hf_secret"
    assert "private" in rejected()
    monkeypatch.setenv("HF_TOKEN", "wrong")
    message = rejected()
    assert "rejects the token" in message
    assert "wrong" not in message
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    single.requests.clear()
    make(HubSource).fetch("acme/tiny")
    hosts = {host for host, _, _, headers in single.requests if "Authorization" in headers}
    assert hosts == {"hub"}
    assert any(host == "storage" for host, *_ in single.requests)


def test_a_download_continues_after_the_connection_was_closed(single, make):
    single.cut["model.safetensors"] = [100_000]
    path = make(HubSource).fetch("acme/tiny")
    assert (path / "model.safetensors").read_bytes() == WEIGHTS
    ranges = [h["Range"] for *_, name, h in single.requests if "Range" in h]
    assert ranges == ["bytes=100000-"]


@pytest.mark.costly
def test_the_next_download_continues_a_killed_download(real_child, single, make, hub_cache_folder):
    single.stall = {"model.safetensors"}
    process = subprocess.Popen([sys.executable, "-c", FETCH, "acme/tiny"], stdout=subprocess.PIPE)

    def partial_bytes():
        return [path.stat().st_size for path in hub_cache_folder.rglob("*.part")]

    # The client buffers at most one chunk of 10 MB, so that the part may still be empty.
    wait_until(lambda: any(name == "model.safetensors" for name in single.downloads()))
    process.send_signal(signal.SIGKILL)
    process.communicate()
    single.released.set()
    assert make(HubSource).find("acme/tiny") is None
    single.stall.clear()
    (part,) = hub_cache_folder.rglob("*.part")
    part.write_bytes(WEIGHTS[:1234])
    assert partial_bytes() == [1234]
    path = make(HubSource).fetch("acme/tiny")
    assert (path / "model.safetensors").read_bytes() == WEIGHTS
    assert any(headers.get("Range") == "bytes=1234-" for *_, headers in single.requests)
    assert partial_bytes() == []


@pytest.mark.slow
def test_processes_that_fetch_the_same_hub_model_download_it_once(single, make):
    command = [sys.executable, "-c", FETCH, "acme/tiny"]
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert {out.strip() for out, _ in outputs} == {str(make(HubSource).find("acme/tiny"))}, outputs
    assert single.downloads().count("model.safetensors") == 1


def test_a_model_downloaded_by_another_tool_is_found(make, hub_cache_folder):
    folder = hub_cache_folder / "models--acme--tiny"
    snapshot = folder / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs/main").write_text(COMMIT)
    (snapshot / "config.json").write_bytes(SMALL["config.json"])
    assert make(HubSource).find("acme/tiny") is None
    (snapshot / "model.safetensors").write_bytes(WEIGHTS)
    (snapshot / "README.md").write_bytes(CARD)
    assert make(HubSource).find("acme/tiny") == snapshot
    (listed,) = make(HubSource).local_models()
    assert (listed.name, listed.path, listed.license) == ("acme/tiny", snapshot, "apache-2.0")


def test_removing_a_model_keeps_its_other_revision(single, make, hub_cache_folder):
    first = make(HubSource).fetch("acme/tiny")
    single.commit = "b" * 40
    single.revisions = (*single.revisions, single.commit)
    single.files["config.json"] = b'{"architectures": ["MistralForCausalLM"]}'
    second = make(HubSource).fetch("acme/tiny@v1")
    assert {model.name for model in make(HubSource).local_models()} == {
        "acme/tiny",
        "acme/tiny@v1",
    }
    hub_cache.remove_model(first)
    assert not first.exists()
    assert hub_cache.find_changes(second) == []
    assert (second / "model.safetensors").read_bytes() == WEIGHTS
    hub_cache.remove_model(second)
    assert list(hub_cache_folder.glob("models--*")) == []


def test_references_are_parsed_into_their_parts():
    parsed = parse_hub_reference("acme/tiny:q4.gguf@refs/pr/2")
    assert (parsed.repo, parsed.file, parsed.revision) == ("acme/tiny", "q4.gguf", "refs/pr/2")
    assert parsed.title == "acme/tiny:q4.gguf@refs/pr/2"


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"HF_HUB_CACHE": "/a", "HF_HOME": "/b"}, "/a"),
        ({"HF_HOME": "/b", "XDG_CACHE_HOME": "/c"}, "/b/hub"),
        ({"XDG_CACHE_HOME": "/c"}, "/c/huggingface/hub"),
    ],
)
def test_the_cache_directory_is_the_one_that_huggingface_hub_uses(monkeypatch, variables, expected):
    for name in ("HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert str(hub_cache.hub_cache_dir()) == expected
    code = "import huggingface_hub.constants as c; print(c.HF_HUB_CACHE)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == expected


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
