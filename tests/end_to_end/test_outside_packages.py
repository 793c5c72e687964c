"""No process of an engine imports an installed package that is not selected."""

from __future__ import annotations

import importlib
import os

import pytest

from dovetail import LLM, SamplingParams
from dovetail.cli import main
from dovetail.plugins import KINDS, PluginRegistry

PROMPT = [5, 6, 7, 8]
GREEDY = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)


@pytest.fixture
def marker(tmp_path, monkeypatch):
    """A file that the package Dovetail_Evil writes when any process imports it.

    The package declares every name of a first-party plugin, with a probe and the highest rank.
    """
    marker, site = tmp_path / "imported", tmp_path / "site"
    package, info = site / "Dovetail_Evil", site / "Dovetail_Evil-1.0.dist-info"
    package.mkdir(parents=True)
    info.mkdir()
    (package / "__init__.py").write_text(f"open({str(marker)!r}, 'a').write('imported')\n")
    registry = PluginRegistry()
    names = {kind: {candidate.name for candidate in registry.candidates(kind)} for kind in KINDS}
    tables, points = [], ["[dovetail.model_source]", "demo = Dovetail_Evil:X"]
    points += ["[dovetail.command]", "lab.replay = Dovetail_Evil:X", "evil = Dovetail_Evil:X"]
    for kind, taken in names.items():
        points.append(f"[dovetail.{kind}]")
        for name in sorted({*taken, "evil"}):
            points.append(f"{name} = Dovetail_Evil:X")
            tables.append(
                f'[[plugin]]\nkind = "{kind}"\nname = "{name}"\nrank = 99\n'
                'probe = "Dovetail_Evil:probe"\n'
            )
    (package / "dovetail.toml").write_text("".join(tables))
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: Dovetail_Evil\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("\n".join(points) + "\n")
    monkeypatch.syspath_prepend(str(site))
    path = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", f"{site}{os.pathsep}{path}" if path else str(site))
    importlib.invalidate_caches()
    return marker


@pytest.mark.costly
def test_no_process_of_an_engine_imports_an_unselected_package(
    model_dir, options, llm, marker, caplog
):
    expected = llm.generate([PROMPT], GREEDY)[0].outputs[0].token_ids
    processes = {"engine_process": True, "executor_backend": "multiproc"}
    with LLM(model_dir, **options, **processes) as other:
        assert other.generate([PROMPT], GREEDY)[0].outputs[0].token_ids == expected
    with LLM(model_dir, no_plugins=True, **options) as other:
        assert other.generate([PROMPT], GREEDY)[0].outputs[0].token_ids == expected
    assert not marker.exists()


@pytest.mark.costly
@pytest.mark.parametrize("kind", ["platform", "attention", "scheduler", "ops"])
def test_explain_does_not_import_an_unselected_package(marker, model_dir, kind, capsys):
    assert main(["plugins", "explain", kind, "--model", str(model_dir)]) == 0
    assert "Dovetail_Evil" in capsys.readouterr().out
    assert not marker.exists()


def test_other_commands_do_not_import_an_unselected_package(marker, capsys):
    assert main(["plugins", "list"]) == 0
    output = capsys.readouterr()
    assert "Dovetail_Evil 1.0" in output.out and "which is not used" in output.err
    assert main(["--help"]) == 0
    assert main(["lab", "replay", "--help"]) == 0
    assert not marker.exists()
