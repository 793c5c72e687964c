"""`dovetail plugins show`: its output and imports."""

from __future__ import annotations

import json
import sys

import pytest

from dovetail.cli import main
from dovetail.cli.plugins_table import print_table
from dovetail.plugins.contracts.checks import contract_version

SOURCE = """
from typing import ClassVar
from pydantic import BaseModel
from dovetail.interfaces import Policy

print("hello")

class Options(BaseModel):
    model_config = {"extra": "forbid"}
    kinds: ClassVar[int] = 3
    patience: int = 7
    name: str

class Mine(Policy):
    static_rank = False

class Wrong:
    pass
"""
MANIFEST = """
[[plugin]]
kind = "policy"
name = "shown"
api = ">=0.1,<1"
needs = ["paged_kv_cache"]
options = "shown_mod:Options"
rank = 4
replaces = ["policy:fcfs@dovetail-sched-fcfs"]
"""


@pytest.fixture
def site(tmp_path, monkeypatch):
    package = tmp_path / "shown_mod"
    package.mkdir()
    (package / "__init__.py").write_text(SOURCE)
    (package / "dovetail.toml").write_text(MANIFEST)
    info = tmp_path / "shown_dist-2.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shown-dist\nVersion: 2.5\n")
    (info / "entry_points.txt").write_text(
        "[dovetail.policy]\nshown = shown_mod:Mine\nwrong = shown_mod:Wrong\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("shown_mod", None)


def rows(text):
    return dict(line.split(maxsplit=1) for line in text.splitlines() if len(line.split()) > 1)


def test_all_details_are_shown_without_importing_the_plugin(site, capsys):
    assert main(["plugins", "show", "policy:shown"]) == 0
    output = capsys.readouterr().out
    assert "shown_mod" not in sys.modules
    shown = rows(output)
    assert shown["class"].strip() == "shown_mod:Mine"
    assert shown["distribution"].strip() == "shown-dist 2.5"
    assert shown["source"].strip() == str(site / "shown_mod/__init__.py")
    assert f"contains the core's version {contract_version('policy')}" in shown["api"]
    assert shown["needs"].strip() == "paged_kv_cache"
    assert shown["rank"].strip() == "4"
    assert shown["roles"].strip() == "engine, frontend, worker"
    assert "policy:fcfs@dovetail-sched-fcfs, if plugins_allow" in shown["replaces"]
    assert "shown_mod:Options" in output
    assert "patience: int = 7" in output and "name: str (required)" in output
    assert "kinds" not in output and "model_config" not in output


def test_the_load_option_adds_the_declarations_of_the_class(site, capsys):
    # The class is valid, but its constructor needs an option.
    (site / "shown_mod/dovetail.toml").write_text("")
    assert main(["plugins", "show", "policy:shown@shown-dist", "--load"]) == 0
    shown = rows(capsys.readouterr().out)
    assert "implements its contract" in shown["loaded"]
    assert shown["static_rank"].strip() == "False"
    assert "printed 'hello'" in shown["note"]
    assert "none; default values apply" in shown["manifest"]


def test_the_json_option_prints_one_object(site, capsys):
    assert main(["plugins", "show", "policy:shown", "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert output["plugin"]["description"]["entry"]["rank"] == 4
    assert output["plugin"]["options"][0] == {"name": "patience", "type": "int", "default": "7"}
    assert output["loaded"] is None


def test_a_plugin_that_violates_its_contract_is_reported(site, capsys):
    assert main(["plugins", "show", "policy:wrong", "--load", "--json"]) == 1
    output = capsys.readouterr()
    assert "does not meet the contract" in json.loads(output.out)["problem"]
    assert "does not meet the contract" in output.err


def test_a_plugin_given_by_class_path_is_shown(capsys):
    path = "dovetail_devkit.fakes.policy:FakePolicy"
    assert main(["plugins", "show", f"policy:{path}"]) == 0
    shown = rows(capsys.readouterr().out)
    assert shown["source"].strip().endswith("dovetail_devkit/fakes/policy.py")
    assert "named by its class" in shown["distribution"]


@pytest.mark.parametrize(
    ("plugin", "output"),
    [
        ("shown", "Write policy:shown"),
        ("polcy:shown", "Did you mean 'policy'"),
        ("policy:shwn", "Did you mean 'shown'"),
        ("shwn", "KIND:NAME, such as policy:fcfs. Did you mean 'shown'?"),
        ("policy:", "KIND:NAME"),
        ("nobody", "KIND:NAME"),
    ],
)
def test_an_invalid_reference_is_reported_with_the_expected_form(site, plugin, output, capsys):
    assert main(["plugins", "show", plugin]) == 2
    error = capsys.readouterr().err
    assert output in " ".join(error.split()) and len(error.splitlines()) <= 3


def test_an_options_class_without_source_is_shown_by_name_only(site, capsys):
    (site / "shown_mod/dovetail.toml").write_text(MANIFEST.replace("shown_mod:Opt", "gone:Opt"))
    assert main(["plugins", "show", "policy:shown"]) == 0
    assert "gone:Options (use --load to read its fields)" in capsys.readouterr().out


def test_lines_of_a_table_with_an_empty_column_are_not_wrapped_in_a_pipe(capsys):
    name = "layers.2.self_attn.q_proj"
    print_table(("layer", "type", ""), [(name, "Q4_K", ""), ("short", "Q4_K", "")])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines] == [
        ["layer", "type"],
        [name, "Q4_K"],
        ["short", "Q4_K"],
    ]
