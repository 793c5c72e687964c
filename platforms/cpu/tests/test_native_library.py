"""If native kernels cannot be used, probes, explanations and errors give the reason."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import dovetail_cpu_kernels
from dovetail.errors import PluginError
from dovetail.interfaces import Probe
from dovetail.plugins import PluginRegistry
from dovetail.plugins.selection import Criteria, choose, choose_platform, explain
from dovetail_cpu import native_library
from dovetail_cpu.native_library import find_library, probe_any, probe_fast

EXPLAIN = "from dovetail.cli import main; main()"


def pretend(monkeypatch, **info):
    status = SimpleNamespace(available=True, level="avx2", reason="", compiler="c++")
    vars(status).update(info)
    kernels = SimpleNamespace(status=lambda: status, library=lambda: "the library")
    monkeypatch.setitem(sys.modules, "dovetail_cpu_kernels", kernels)
    monkeypatch.delenv(native_library.LEVEL_VARIABLE, raising=False)


def test_native_kernels_of_a_supported_instruction_set_are_usable(monkeypatch):
    pretend(monkeypatch)
    for probe in (probe_any(), probe_fast()):
        assert probe.usable
        for requirement in ("bfloat16", "avx2", "one thread"):
            assert requirement in probe.reasons[0]
    assert find_library() == "the library"


def test_without_a_kernel_library_the_reason_is_reported(monkeypatch):
    pretend(monkeypatch, available=False, level="", reason="no C++ compiler: c++")
    for probe in (probe_any(), probe_fast()):
        assert probe == Probe(
            usable=False, reasons=("the native kernels are not available: no C++ compiler: c++",)
        )
    assert find_library() is None


def test_a_missing_package_is_reported(monkeypatch):
    monkeypatch.setitem(sys.modules, "dovetail_cpu_kernels", None)
    assert find_library() is None
    assert probe_fast().reasons == ("dovetail-cpu-kernels is not installed",)


def test_portable_kernels_are_used_only_if_the_user_selects_them(monkeypatch):
    pretend(monkeypatch, level="portable")
    assert probe_any().usable and not probe_fast().usable
    assert "slower than torch's" in probe_fast().reasons[0]
    monkeypatch.setenv(native_library.LEVEL_VARIABLE, "portable")
    assert probe_fast().usable


@pytest.mark.costly
@pytest.mark.sampled(4)
@pytest.mark.skipif(not probe_any().usable, reason="native kernels are not usable")
@pytest.mark.parametrize(("kind", "instead"), [("linear_method", "onednn"), ("attention", "torch")])
def test_explain_says_that_a_library_of_a_different_version_was_rejected(tmp_path, kind, instead):
    """The package was updated, and the library in its directory was not."""
    package = Path(dovetail_cpu_kernels.__file__).parent
    copied = Path(shutil.copytree(package, tmp_path / package.name))
    text = (copied / "library.py").read_text("utf-8")
    (copied / "library.py").write_text(re.sub(r"(?m)^ABI_VERSION = .*", "ABI_VERSION = 999", text))
    command = [sys.executable, "-c", EXPLAIN, "plugins", "explain", kind, "--json"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["chosen"] == [instead]
    rejected = [item for item in report["verdicts"] if "ABI version" in " ".join(item["reasons"])]
    assert rejected and all("reinstall dovetail-cpu-kernels" in str(item) for item in rejected)


@pytest.mark.parametrize(("kind", "instead"), [("linear_method", "onednn"), ("ops", "torch")])
def test_torch_replaces_unusable_native_kernels_and_explain_says_why(kind, instead, monkeypatch):
    pretend(monkeypatch, available=False, level="", reason="the compiler failed")
    registry = PluginRegistry()
    platform = choose_platform(registry, "cpu")
    chosen = choose(registry, platform, kind, "auto")
    criteria = Criteria(references=("auto",), platform=platform)
    report = explain(registry, kind, criteria)
    assert report.chosen[0].name == instead
    assert report.chosen[0].target.endswith(chosen.__name__)
    (native,) = [verdict for verdict in report.verdicts if verdict.name == "native"]
    assert "the compiler failed" in native.reasons[0]
    with pytest.raises(PluginError, match="the compiler failed"):
        choose(registry, platform, kind, "native")
