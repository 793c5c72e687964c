"""While a plugin is imported, `inspect.getframeinfo` returns positions without source lines."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from dovetail.errors import PluginLoadError
from dovetail.plugins.loading import Origin, load_target, no_source_lines

PLUGIN = """
import inspect, sys
from inspect import getframeinfo
from dovetail.plugins.loading import no_source_lines

class Part:
    with no_source_lines():
        inner = inspect.getframeinfo(sys._getframe())
    position = inspect.getframeinfo(sys._getframe())
    lines = inspect.stack()[0].code_context
"""
IMPORT_TORCH = """
import inspect
from dovetail.plugins.loading import Origin, load_target
find = inspect.findsource
def find_unless_frame(value):
    assert not inspect.isframe(value), "source lines of a frame"
    return find(value)
inspect.findsource = find_unless_frame
load_target("torch:Tensor", Origin(reference="torch"))
"""


def test_imported_plugins_get_positions_without_source_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "plugin_with_position.py"
    file.write_text(PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)
    original = inspect.getframeinfo
    part = load_target("plugin_with_position:Part", Origin(reference="part"))
    position = vars(part)["position"]
    assert (position.filename, position.lineno, position.code_context) == (str(file), 9, None)
    assert vars(part)["inner"].code_context is None
    assert inspect.getframeinfo is original
    # A call that states the number of lines gets them, and so does every call after the import.
    assert vars(part)["lines"] == ["    lines = inspect.stack()[0].code_context\n"]
    kept = sys.modules["plugin_with_position"].getframeinfo
    assert kept(sys._getframe()).code_context == original(sys._getframe(), 1).code_context


def test_source_lines_are_available_after_an_import_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plugin_that_fails.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    original = inspect.getframeinfo
    with pytest.raises(PluginLoadError):
        load_target("plugin_that_fails:Part", Origin(reference="part"))
    assert inspect.getframeinfo is original


def test_a_function_of_another_library_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def other() -> None: ...

    with no_source_lines():
        monkeypatch.setattr(inspect, "getframeinfo", other)
    assert inspect.getframeinfo is other
    with no_source_lines():
        assert inspect.getframeinfo is other
    assert inspect.getframeinfo is other


@pytest.mark.costly
def test_the_import_of_torch_resolves_no_source_lines() -> None:
    """With source lines, `inspect` would resolve the paths of all modules, which takes 45 ms."""
    pytest.importorskip("torch")
    subprocess.run([sys.executable, "-c", IMPORT_TORCH], check=True)
