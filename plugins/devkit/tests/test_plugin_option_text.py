"""The option `--dovetail-plugin-options` of the pytest plugin."""

from types import SimpleNamespace

import pytest

from dovetail_devkit import pytest_plugin


@pytest.mark.parametrize("text", ["{", "[" * 20_000])
def test_text_that_is_not_json_is_a_usage_error(text):
    config = SimpleNamespace(getoption=lambda name: text)
    with pytest.raises(pytest.UsageError, match="is not valid JSON"):
        pytest_plugin._read_options(config)
