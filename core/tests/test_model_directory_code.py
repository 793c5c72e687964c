"""A model directory can only name installed models and never selects code."""

import json
import sys

import pytest

from dovetail import LLM
from dovetail.config import EngineArgs, ModelDirectory
from dovetail.errors import ModelError
from dovetail_devkit.contexts import SMALL_ENGINE, write_fake_config

CREATES_FILE = "from pathlib import Path\nPath({place!r}).touch()\nclass M: ...\n"
NAMES = [
    "evil:M",
    " evil:M",
    "evil.M",
    "evil:Outer.M",
    "./evil.py:M",
    "evil.py:M",
    "{folder}/evil.py:M",
    "~/evil.py:M",
    "os:system",
    "os.path.join",
    "LlamaForCausalLM@evil",
    "LlamaForCausalLM@",
    "evil:M\n",
    "evil\uff1aM",
    "../evil",
    "M" * 10_000,
]


@pytest.fixture
def evil(tmp_path, monkeypatch):
    """A working directory on the import path. Importing its module creates a file."""
    mark = tmp_path / "imported"
    (tmp_path / "evil.py").write_text(CREATES_FILE.format(place=str(mark)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield mark
    sys.modules.pop("evil", None)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("path", [0, 1])
def test_a_config_that_names_code_is_rejected_without_an_import(evil, tmp_path, name, path):
    names = ["LlamaForCausalLM", name.format(folder=tmp_path)][1 - path :]
    write_fake_config(tmp_path, architectures=names)
    with pytest.raises(ModelError) as caught:
        LLM(tmp_path, trust_local_code=True, **SMALL_ENGINE)
    message = str(caught.value)
    assert (
        str(tmp_path / "config.json") in message and "can only name an installed model" in message
    )
    assert "LlamaForCausalLM" in message.split("Installed: ")[1] and len(message) < 1000
    assert not evil.exists() and "evil" not in sys.modules


def test_other_config_fields_that_name_code_are_ignored(evil, tmp_path):
    write_fake_config(
        tmp_path,
        auto_map={"AutoModel": "evil.M"},
        tokenizer_class="evil.M",
        custom_pipelines={"text": {"impl": "evil.M"}},
        model_type="evil.M",
        attn_implementation="evil:M",
    )
    names = {"tokenizer_class": "evil.M", "auto_map": {"AutoTokenizer": ["evil.M", None]}}
    for file in ("tokenizer_config.json", "processor_config.json", "preprocessor_config.json"):
        (tmp_path / file).write_text(json.dumps(names))
    config = EngineArgs(tmp_path).create_engine_config()
    assert config.model.architecture == "FakeModel"
    assert not evil.exists() and "evil" not in sys.modules


@pytest.mark.parametrize("method", ["evil.M", "evil:M", "./evil.py:M"])
def test_a_quantization_method_that_names_code_is_not_imported(evil, tmp_path, method):
    write_fake_config(tmp_path, quantization_config={"quant_method": method, "bits": 4})
    with pytest.raises(ModelError, match=r"config\.json"):
        LLM(tmp_path, trust_local_code=True, skip_tokenizer_init=True, **SMALL_ENGINE)
    assert not evil.exists() and "evil" not in sys.modules


def test_a_class_named_by_the_user_overrides_the_config(evil, tmp_path):
    write_fake_config(tmp_path, architectures=["other:M"])
    opened = ModelDirectory.open(tmp_path, hf_overrides={"architectures": ["evil:M"]})
    assert opened.architecture == "evil:M"
    with pytest.raises(ModelError, match="other:M"):
        ModelDirectory.open(tmp_path, hf_overrides={"vocab_size": 5})
