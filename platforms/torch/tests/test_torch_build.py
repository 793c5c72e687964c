"""The properties of a torch build, read from its files, equal those that torch reports."""

import importlib
import sys

import pytest
import torch

from dovetail_torch.accelerator.torch_build import TorchBuild, read_torch_build

STATED = """
from typing import Optional
__all__ = ['__version__', 'cuda']
__version__ = '9.8.7+x1'
cuda: Optional[str] = '13.0'
hip: Optional[str] = None
"""


@pytest.mark.parametrize("field", ["cuda", "hip", "xpu", "git_version", "no_such_field"])
def test_the_torch_build_read_from_files_equals_the_one_that_torch_reports(field):
    due = getattr(torch.version, field, None) or ""
    assert read_torch_build(field) == TorchBuild(version=str(torch.__version__), toolkit=due)


@pytest.mark.parametrize(
    ("text", "version", "toolkit"),
    [(STATED, "9.8.7+x1", "13.0"), ("this is not a module", "", ""), (None, "", "")],
)
def test_versions_of_the_torch_build_are_empty_if_its_version_file_is_damaged_or_missing(
    text, version, toolkit, tmp_path, monkeypatch
):
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('it must not be imported')")
    if text is not None:
        (package / "version.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch")
    importlib.invalidate_caches()
    assert read_torch_build("cuda") == TorchBuild(version=version, toolkit=toolkit)
    assert read_torch_build("hip").toolkit == ""
    assert "torch" not in sys.modules
