"""The compile level: its default, and the options that require it or conflict with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dovetail.config import RequestedConfig
from dovetail.config.resolve import resolve
from dovetail.errors import ConfigError
from dovetail.interfaces.requested_config import RequestedModel
from dovetail_devkit.fakes.platform import FakePlatform


def requested(**options: Any) -> RequestedConfig:
    """Make a requested configuration. The name of an option is "section__field"."""
    groups: dict[str, dict[str, Any]] = {}
    for path, value in options.items():
        group, field = path.split("__")
        groups.setdefault(group, {})[field] = value
    model = {
        "model": "tiny",
        "model_dir": Path("/m/tiny"),
        "tokenizer_dir": Path("/m/tiny"),
        "architecture": "LlamaForCausalLM",
        "hf_config": {"max_position_embeddings": 64, "dtype": "float32"},
        "served_model_name": "tiny",
        **groups.pop("model", {}),
    }
    return RequestedConfig(model=RequestedModel(**model), **groups)


def rejection(config: RequestedConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(config, FakePlatform())
    return str(caught.value)


def test_the_model_is_not_compiled_by_default() -> None:
    resolved = resolve(requested(), FakePlatform())
    assert resolved.compute.compile_level == "none"
    assert resolved.compute.compile_cache is None
    (change,) = (item for item in resolved.explain() if item.field == "compute.compile_level")
    assert "the default" in change.reason


@pytest.mark.parametrize(
    "option",
    [
        {"compile_backend": "eager"},
        {"compile_passes": ("mine",)},
        {"compile_sizes": (1,)},
        {"compile_cache": "off"},
    ],
)
def test_an_option_of_compilation_without_a_level_is_rejected(option: dict[str, Any]) -> None:
    (name,) = option
    for level in (None, "none"):
        fields = {f"compute__{name}": option[name], "compute__compile_level": level}
        message = rejection(requested(**fields))
        assert f"{name}=" in message and "compile_level='none'" in message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model__enforce_eager", True),
        ("parallel__tensor_parallel_size", 2),
        ("cache__cpu_offload_gb", 0.5),
        ("compute__batch_invariant", True),
        ("compute__compile_sizes", (4,)),
    ],
)
def test_an_option_that_conflicts_with_compilation_is_rejected(field: str, value: object) -> None:
    config = requested(**{field: value, "compute__compile_level": "as_is"})
    message = rejection(config)
    assert "compile_level='as_is'" in message and field.partition("__")[2] in message
