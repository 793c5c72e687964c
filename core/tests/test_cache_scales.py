"""The KV-cache scales of a resolved configuration."""

from pathlib import Path

import pytest

from dovetail.errors import ConfigError
from dovetail_devkit.contexts import make_config, write_fake_config


@pytest.mark.parametrize(
    ("dtype", "arguments", "expected"),
    [
        ("auto", None, None),
        ("int8", None, "token"),
        ("fp8", None, "token"),
        ("fp8", "layer", "layer"),
        ("fp8_e5m2", None, "layer"),
    ],
)
def test_the_kv_cache_scales_depend_on_the_dtype_of_the_cache(
    tmp_path: Path, dtype: str, arguments: str | None, expected: str | None
) -> None:
    model = write_fake_config(tmp_path)
    config = make_config(model, kv_cache_dtype=dtype, kv_cache_scales=arguments)
    assert config.cache.kv_cache_scales == expected


@pytest.mark.parametrize(
    ("dtype", "arguments", "usable"),
    [("int8", "layer", "'token'"), ("fp8_e5m2", "token", "'layer'"), ("auto", "token", "None")],
)
def test_scales_that_the_cache_does_not_support_are_rejected(
    tmp_path: Path, dtype: str, arguments: str, usable: str
) -> None:
    model = write_fake_config(tmp_path)
    with pytest.raises(ConfigError, match=f"kv_cache_scales='{arguments}'.*; use {usable}"):
        make_config(model, kv_cache_dtype=dtype, kv_cache_scales=arguments)
