"""A resolved configuration is complete: no "auto", and None only where None is a valid value."""

import types
import typing
from collections.abc import Iterator

import pytest

from dovetail.config import EngineArgs, EngineConfig, RequestedConfig
from dovetail.config.resolve import resolve
from dovetail.errors import ConfigError
from dovetail.interfaces.config_fields import ConfigNode
from dovetail_devkit.fakes.platform import FakePlatform

CHOSEN_WHERE_LOADED = (
    "no plugin was requested: the process that loads it selects the first candidate that "
    "fits the loaded model; `PluginRegistry.resolutions` names it"
)
NONE_IS_A_VALUE = {
    "cache.kv_cache_memory_bytes": "no size in bytes was given: it is measured",
    "cache.kv_cache_scales": "the dtype of the cache has no scales",
    "cache.num_gpu_blocks_override": "the number of blocks follows from the memory",
    "compute.attention_backend": CHOSEN_WHERE_LOADED,
    "compute.compile_backend": CHOSEN_WHERE_LOADED,
    "compute.compile_cache": "the cache directory of the user who runs the worker",
    "compute.linear_method": CHOSEN_WHERE_LOADED,
    "compute.num_threads": "one thread per core of the worker process",
    "compute.ops": CHOSEN_WHERE_LOADED,
    "extensions.grammar_backend": "no grammars: such requests are rejected",
    "extensions.io_processor": "no IO processor",
    "extensions.kv_connector": "no KV connector",
    "extensions.reasoning_parser": "chosen by the chat template, where the tokenizer is loaded",
    "extensions.tool_parser": "chosen by the chat template, where the tokenizer is loaded",
    "extensions.worker_extension_cls": "no worker extension",
    "limits.max_prompt_chars": "follows from the tokenizer's longest token, read when needed",
    "observability.decision_log": "nothing is recorded",
    "parallel.worker_cls": CHOSEN_WHERE_LOADED,
}
"""The resolved fields that may be None, and the meaning of None."""


def fields_of(cls: type[ConfigNode], path: str = "") -> Iterator[tuple[str, object]]:
    """Yield "section.field" and its type for every field below `cls`."""
    for name, hint in typing.get_type_hints(cls).items():
        if name not in cls.model_fields:
            continue
        if isinstance(hint, type) and issubclass(hint, ConfigNode):
            yield from fields_of(hint, f"{path}{name}.")
        else:
            yield path + name, hint


def may_be_none(hint: object) -> bool:
    kinds = (typing.Union, types.UnionType)
    return typing.get_origin(hint) in kinds and type(None) in typing.get_args(hint)


def open_fields(cls: type[ConfigNode]) -> set[str]:
    return {path for path, hint in fields_of(cls) if may_be_none(hint)}


def auto_fields(cls: type[ConfigNode], path: str = "") -> set[str]:
    actual = set()
    for name, field in cls.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, ConfigNode):
            actual |= auto_fields(kind, f"{path}{name}.")
        elif field.default == "auto":
            actual.add(path + name)
    return actual


def test_each_resolved_field_that_may_be_none_is_listed_with_a_reason():
    assert open_fields(EngineConfig) == set(NONE_IS_A_VALUE)
    assert all(NONE_IS_A_VALUE.values())


def test_no_resolved_field_has_auto_as_its_default():
    assert auto_fields(EngineConfig) == set()
    assert "model.dtype" in auto_fields(RequestedConfig)


def test_an_optional_field_that_is_not_listed_is_reported():
    class Planted(EngineConfig):
        num_retries: int | None = None
        mode: str = "auto"

    assert open_fields(Planted) - set(NONE_IS_A_VALUE) == {"num_retries"}
    assert auto_fields(Planted) == {"mode"}


def test_every_value_of_a_resolved_configuration_is_set(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["A"], "vocab_size": 9}')
    config = resolve(EngineArgs(model=tmp_path).create_engine_config(), FakePlatform())
    values = {
        f"{section}.{name}": value
        for section, node in dict(config).items()
        if isinstance(node, ConfigNode)
        for name, value in dict(node).items()
    }
    assert "auto" not in values.values()
    assert {path for path, value in values.items() if value is None} <= set(NONE_IS_A_VALUE)


@pytest.mark.parametrize("reference", ["platform", "executor_backend", "worker_cls"])
def test_a_resolved_configuration_rejects_auto_as_a_plugin(tmp_path, reference):
    (tmp_path / "config.json").write_text('{"architectures": ["A"], "vocab_size": 9}')
    config = resolve(EngineArgs(model=tmp_path).create_engine_config(), FakePlatform())
    with pytest.raises(ConfigError, match=f"{reference}='auto' is not resolved"):
        type(config.parallel)(**{**dict(config.parallel), reference: "auto"})
