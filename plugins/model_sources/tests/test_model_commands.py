"""Tests of `dovetail pull` and `dovetail models`."""

import hashlib
import io
import json
import os
import sys

import pytest

from dovetail.cli import main
from dovetail.cli.terminal import show_downloads
from dovetail.config.model_sources import downloads
from dovetail_model_sources.sources import SmolLM2Source

GGUF = b"GGUF" + bytes(range(256)) * 64
TINY = "pypi:tiny-model==1.0"


@pytest.fixture
def tiny(write_wheel, cache, capsys):
    """Pull a model, and return its path."""
    write_wheel({"tiny/one.gguf": GGUF})
    assert main(["pull", TINY]) == 0
    printed = capsys.readouterr()
    path = cache / "pypi/tiny-model==1.0/model/one.gguf"
    assert printed.out == f"{path}\n"
    assert printed.err == "Downloading tiny-model 1.0 from the package index.\n"
    return path


def listed(capsys, *options):
    code = main(["models", "--json", *options])
    return code, {model["name"]: model for model in json.loads(capsys.readouterr().out)}


@pytest.mark.costly
def test_a_pulled_model_is_listed_with_size_format_and_license(tiny, capsys):
    code, models = listed(capsys)
    assert code == 0
    assert models[TINY] == {
        "name": TINY,
        "num_bytes": len(GGUF),
        "format": "gguf",
        "license": "MIT",
        "path": str(tiny),
        "checked": "",
    }
    main(["models"])
    (row,) = [line for line in capsys.readouterr().out.splitlines() if TINY in line]
    assert row.split() == [TINY, "0.0", "MB", "gguf", "MIT", str(tiny)]


@pytest.mark.costly
def test_a_second_pull_prints_only_the_path(tiny, capsys):
    assert main(["pull", TINY]) == 0
    assert capsys.readouterr() == (f"{tiny}\n", "")


@pytest.mark.costly
def test_the_verify_command_finds_a_changed_file(tiny, capsys):
    code, models = listed(capsys, "--verify")
    assert (code, models[TINY]["checked"]) == (0, "ok")
    tiny.write_bytes(GGUF[:-1] + b"?")
    code, models = listed(capsys, "--verify")
    assert (code, models[TINY]["checked"]) == (1, "changed: one.gguf")


@pytest.fixture
def cached(cache):
    """Write a model into the cache as a download does, and return its file."""
    folder = cache / "pypi/tiny-model==1.0"
    path = folder / "model/one.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(GGUF)
    record = {
        "main": "one.gguf",
        "wheel_sha256": "0" * 64,
        "license": "MIT",
        "files": {"one.gguf": {"bytes": len(GGUF), "sha256": hashlib.sha256(GGUF).hexdigest()}},
    }
    (folder / "source.json").write_text(json.dumps(record))
    return path


@pytest.mark.parametrize("options", [(), ("--verify",)])
def test_a_truncated_model_is_listed_as_changed_and_can_be_removed(options, cached, cache, capsys):
    assert listed(capsys, "--verify")[1][TINY]["checked"] == "ok"
    cached.write_bytes(GGUF[:-1000])
    code, models = listed(capsys, *options)
    assert (code, models[TINY]["checked"]) == (1, "changed: one.gguf")
    assert models[TINY]["path"] == str(cached)
    assert main(["models", *options]) == 1
    assert "changed: one.gguf" in capsys.readouterr().out
    assert main(["models", "--remove", TINY]) == 0
    assert list((cache / "pypi").iterdir()) == []


@pytest.mark.parametrize("damage", ["{", "{}", '{"files": {}}', None])
def test_a_model_with_a_damaged_record_is_listed_and_can_be_removed(damage, cached, cache, capsys):
    record = cached.parents[1] / "source.json"
    record.unlink() if damage is None else record.write_text(damage)
    code, models = listed(capsys, "--verify")
    assert (code, models[TINY]["checked"]) == (1, "changed: source.json")
    assert main(["models", "--remove", TINY]) == 0
    assert list((cache / "pypi").iterdir()) == []


def test_a_model_without_its_file_can_be_removed_by_its_short_name(cached, cache, capsys):
    folder = cached.parents[1].rename(cache / f"pypi/{SmolLM2Source.reference.requirement}")
    (folder / "model/one.gguf").unlink()
    (cache / "pypi/notes==old stuff").mkdir()
    assert listed(capsys, "--verify")[1]["smollm2"]["checked"] == "changed: one.gguf"
    assert main(["models", "--remove", "smollm2"]) == 0
    assert [path.name for path in (cache / "pypi").iterdir()] == ["notes==old stuff"]


@pytest.mark.costly
def test_the_remove_command_deletes_the_model(tiny, cache, capsys):
    assert main(["models", "--remove", TINY]) == 0
    assert capsys.readouterr().out == f"Removed {TINY}: 0.0 MB.\n"
    assert list((cache / "pypi").iterdir()) == []
    assert TINY not in listed(capsys)[1]
    assert main(["models", "--remove", TINY]) == 2
    assert "is not a downloaded model" in capsys.readouterr().err


def test_a_hub_model_is_pulled_listed_verified_and_removed(
    hub, in_process, cache, hub_cache_folder, capsys
):
    hub.files = {
        "config.json": b"{}",
        "README.md": b"---\nlicense: mit\n---\n",
        "model.safetensors": GGUF,
    }
    assert main(["pull", "acme/tiny", "--revision", "v1"]) == 0
    path = capsys.readouterr().out.rstrip("\n")
    assert path.startswith(f"{hub_cache_folder}/models--acme--tiny/snapshots/")
    code, models = listed(capsys, "--verify")
    assert code == 0
    assert models["acme/tiny@v1"] == {
        "name": "acme/tiny@v1",
        "num_bytes": sum(map(len, hub.files.values())),
        "format": "safetensors",
        "license": "mit",
        "path": path,
        "checked": "ok",
    }
    with open(f"{path}/model.safetensors", "wb") as stream:
        stream.write(GGUF[:-1] + b"?")
    code, models = listed(capsys, "--verify")
    assert (code, models["acme/tiny@v1"]["checked"]) == (1, "changed: model.safetensors")
    assert main(["models", "--remove", "acme/tiny"]) == 2
    assert "Did you mean 'acme/tiny@v1'?" in capsys.readouterr().err
    assert main(["models", "--remove", "acme/tiny@v1"]) == 0
    assert "Removed acme/tiny@v1" in capsys.readouterr().out
    assert list(hub_cache_folder.glob("models--*")) == []


def test_a_hub_model_whose_contents_are_missing_is_listed_and_can_be_removed(
    hub, in_process, cache, hub_cache_folder, capsys
):
    hub.files = {"config.json": b"{}", "model.safetensors": GGUF, "q4.gguf": GGUF[:-1]}
    assert main(["pull", "acme/tiny"]) == 0
    assert main(["pull", "acme/tiny:q4.gguf"]) == 0
    paths = dict(
        zip(("acme/tiny", "acme/tiny:q4.gguf"), capsys.readouterr().out.split(), strict=True)
    )
    snapshot = hub_cache_folder / "models--acme--tiny/snapshots"
    for name in ("model.safetensors", "q4.gguf"):
        next(snapshot.glob(f"*/{name}")).resolve().unlink()
    code, models = listed(capsys)
    assert code == 1
    for name, changed in (("acme/tiny:q4.gguf", "q4.gguf"), ("acme/tiny", "model.safetensors")):
        assert models[name]["checked"] == f"changed: {changed}"
        assert models[name]["path"] == paths[name]
        assert models[name]["format"] == changed.rpartition(".")[2]
        assert main(["models", "--remove", name]) == 0
        capsys.readouterr()
        assert name not in listed(capsys)[1]
    assert list(hub_cache_folder.glob("models--*")) == []


def test_the_error_for_an_unknown_source_names_it_and_the_installed_sources(cache, capsys):
    assert main(["pull", "smolm2"]) == 2
    message = capsys.readouterr().err
    assert "Did you mean 'smollm2'" in message
    assert "pypi" in message


@pytest.mark.costly
def test_a_failed_pull_prints_at_most_three_lines(wheels, cache, capsys):
    assert main(["pull", "pypi:absent-model==1.0"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[1] == (
        "dovetail: The package index has no wheel of absent-model==1.0 for this Python and machine."
    )
    assert len(lines) <= 4


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self):
        return True


def test_on_a_terminal_each_line_of_progress_replaces_the_previous_line(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("COLUMNS", "30")
    with show_downloads():
        downloads.info("first")
        downloads.info("second [####    ] 4.5 of 9.0 MB, and more than the width")
    downloads.info("after the command")
    up = "\x1b[1A\x1b[K"
    assert sys.stderr.getvalue() == f"first\n{up}second [####    ] 4.5 of 9.0 \n"


def test_architectures_are_listed_with_their_implementation_and_tasks_and_formats_and_tests(capsys):
    assert main(["models", "--architectures", "--json"]) == 0
    rows = {row["architecture"]: row for row in json.loads(capsys.readouterr().out)}
    if not rows:
        pytest.skip("no plugin with models is installed")
    assert rows["LlamaForCausalLM"]["tasks"] == ["generate", "embed"]
    assert rows["BertModel"]["tasks"] == ["embed", "score"]
    assert rows["BertForSequenceClassification"]["tasks"] == ["classify", "score"]
    llama = rows["LlamaForCausalLM"]
    assert llama["distribution"].startswith("dovetail-models ")
    assert llama["implementation"] == "native"
    assert llama["formats"] == ["safetensors", "gguf"]
    assert rows["OPTForCausalLM"]["formats"] == ["safetensors"]
    assert llama["tested"].startswith("test_engine_parity.py")
    if arcee := rows.get("ArceeForCausalLM"):  # transformers is installed
        assert (arcee["implementation"], arcee["tasks"]) == ("transformers", ["generate"])
        assert arcee["tested"] == "test_fallback_parity.py"
        assert rows["MixtralForCausalLM"]["implementation"] == "native"
    assert "TransformersForCausalLM" not in rows
    assert main(["models", "--architectures"]) == 0
    assert "LlamaForCausalLM" in capsys.readouterr().out


@pytest.mark.parametrize("option", [["--verify"], ["--remove", "demo"]])
def test_options_about_files_cannot_be_combined_with_architectures(option, capsys):
    assert main(["models", "--architectures", *option]) == 2
    assert "--architectures cannot be combined" in capsys.readouterr().err


@pytest.mark.costly
def test_a_cache_whose_path_is_not_utf_8_is_usable(
    hub, in_process, cache, tmp_path, monkeypatch, capsysbinary
):
    folder = os.fsencode(tmp_path) + b"/caf\xe9"
    monkeypatch.setenv("HF_HUB_CACHE", os.fsdecode(folder))
    hub.files = {"config.json": b"{}", "model.safetensors": GGUF}
    assert main(["pull", "acme/tiny"]) == 0
    path = capsysbinary.readouterr().out.rstrip(b"\n")
    assert path.startswith(folder)
    assert os.path.isdir(path)
    assert main(["models", "--json"]) == 0
    models = json.loads(capsysbinary.readouterr().out)
    assert os.fsdecode(path) in [model["path"] for model in models]
    assert main(["models"]) == 0
    assert b"acme/tiny" in capsysbinary.readouterr().out
