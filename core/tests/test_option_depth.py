"""Engine options with deeply nested values."""

from __future__ import annotations

from typing import Any

import pytest

from dovetail.config import EngineArgs
from dovetail.errors import ConfigError
from dovetail.value_checks import MAX_OPTION_DEPTH, exceeds_depth


def nested(depth: int) -> dict[str, Any]:
    value: Any = 1
    for level in range(depth):
        value = {"a": value} if (depth - level) % 2 else [value]
    assert isinstance(value, dict)
    return value


def test_only_values_deeper_than_the_limit_exceed_it():
    assert not exceeds_depth(nested(MAX_OPTION_DEPTH - 1))
    assert exceeds_depth(nested(MAX_OPTION_DEPTH + 1))
    assert not exceeds_depth([[1] * 100_000] * 3)


def test_a_value_that_contains_itself_exceeds_the_limit():
    value: dict[str, Any] = {}
    value["a"] = [value, value]
    assert exceeds_depth(value)


@pytest.mark.parametrize("option", ["hf_overrides", "override_generation_config"])
@pytest.mark.parametrize("depth", [MAX_OPTION_DEPTH + 1, 100_001])
def test_a_deeply_nested_option_is_rejected(option, depth):
    message = f"{option}=.* is nested more than {MAX_OPTION_DEPTH} levels deep"
    with pytest.raises(ConfigError, match=message):
        EngineArgs("demo", **{option: nested(depth)}).create_engine_config()
