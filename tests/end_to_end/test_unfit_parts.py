"""Plugins that do not support a model are rejected before weights are read or a worker starts."""

import json

import pytest

from dovetail import LLM
from dovetail.config import EngineArgs
from dovetail.engine.choice import explain_choice
from dovetail.errors import ConfigError, PluginError
from dovetail.executors.multiproc.executor import MultiprocExecutor
from dovetail_devkit.fakes.attention import FakeAttentionBackend
from end_to_end.checkpoints import OPTIONS, SIZES


class RejectsAll(FakeAttentionBackend):
    """An attention backend that rejects the requirements of every model."""

    name = "sundays"

    @classmethod
    def refusals(cls, requirements):
        return [f"heads of {requirements.head_size} are too many"]


@pytest.fixture
def folder(tmp_path):
    """Return a model directory without weights, so that opening them would raise another error."""
    config = {"architectures": ["LlamaForCausalLM"], "vocab_size": 320, **SIZES}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize("quantization", ["torch", "onednn"])
def test_an_unsuitable_attention_backend_is_rejected_before_loading(folder, quantization):
    options = OPTIONS | {"skip_tokenizer_init": True, "dtype": "float32"}
    with pytest.raises(ConfigError) as caught:
        LLM(folder, **options, attention_backend=RejectsAll, quantization=quantization)
    assert isinstance(caught.value, PluginError)
    text = str(caught.value)
    assert "The attention 'RejectsAll' was requested" in text and "heads of 8 are too many" in text
    assert "Plugins that can be used here: torch" in text


def test_workers_do_not_start_with_an_unsuitable_attention_backend(folder, monkeypatch):
    created = []
    monkeypatch.setattr(MultiprocExecutor, "__init__", lambda *arguments: created.append(arguments))
    options = OPTIONS | {"skip_tokenizer_init": True, "dtype": "float32"}
    with pytest.raises(ConfigError, match="heads of 8 are too many"):
        LLM(
            folder,
            **options,
            attention_backend=RejectsAll,
            quantization="torch",
            executor_backend="multiproc",
        )
    assert not created


@pytest.mark.parametrize("size", [3, 8])
def test_workers_do_not_start_if_the_model_does_not_support_several_ranks(
    folder, size, monkeypatch
):
    created = []
    monkeypatch.setattr(MultiprocExecutor, "__init__", lambda *arguments: created.append(arguments))
    args = {"tensor_parallel_size": size, "platform": "cpu"}
    reason = f"tensor_parallel_size={size} is not possible: num_attention_heads=4 "
    with pytest.raises(ConfigError, match=reason):
        LLM(folder, **OPTIONS, skip_tokenizer_init=True, **args)
    with pytest.raises(ConfigError, match=reason):
        explain_choice("attention", EngineArgs(model=folder, **args))
    assert not created
