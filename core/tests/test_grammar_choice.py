"""Broken plugins do not prevent the automatic selection of grammars and parsers."""

import sys
from types import SimpleNamespace

import pytest

from dovetail.config import EngineArgs
from dovetail.config.resolve import resolve
from dovetail.engine.choice import explain_choice
from dovetail.engine.messages.parsers import choose_parser
from dovetail.errors import PluginLoadError
from dovetail.plugins import PluginRegistry
from dovetail.plugins.selection import choose_platform
from dovetail_devkit.tiny_model import write_tiny_llama


@pytest.fixture
def broken(tmp_path, monkeypatch, count_as_member):
    """Install plugins that are tried first and cannot be loaded."""
    folder = tmp_path / "site"
    info = folder / "dovetail_a-1.0.dist-info"
    info.mkdir(parents=True)
    (folder / "acme_parts.py").write_text("")
    count_as_member("dovetail-a", "acme_parts")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: dovetail-a\nVersion: 1.0\n")
    kinds = ("grammar", "tool_parser", "reasoning_parser")
    points = [f"[dovetail.{kind}]\nbroken = acme_parts:Missing\n" for kind in kinds]
    (info / "entry_points.txt").write_text("".join(points))
    monkeypatch.syspath_prepend(str(folder))
    yield
    sys.modules.pop("acme_parts", None)


def resolved(folder):
    requested = EngineArgs(model=write_tiny_llama(folder)).create_engine_config()
    registry = PluginRegistry()
    return resolve(requested, choose_platform(registry, "auto"), registry), registry


def test_a_grammar_plugin_that_cannot_be_loaded_is_skipped(broken, tmp_path):
    config, registry = resolved(tmp_path)
    assert config.extensions.grammar_backend == "llguidance@dovetail-structured-output"
    assert any("grammar broken@dovetail-a is skipped" in item for item in registry.set_aside)
    explanation = explain_choice("grammar", EngineArgs(model=str(tmp_path)))
    assert not explanation.error
    assert [(item.name, item.state) for item in explanation.verdicts[:2]] == [
        ("broken", "failed"),
        ("llguidance", "selected"),
    ]


@pytest.mark.parametrize(
    ("kind", "mark"), [("tool_parser", "[func_name1("), ("reasoning_parser", "</think>")]
)
def test_a_parser_that_cannot_be_loaded_is_skipped(broken, tmp_path, kind, mark):
    pytest.importorskip("dovetail_parsers")
    config, registry = resolved(tmp_path)
    tokenizer = SimpleNamespace(chat_templates={"default": f"text {mark} text"})
    parser = choose_parser(kind, config, registry, tokenizer)
    assert parser is not None and mark in parser.why
    assert any(f"{kind} broken@dovetail-a is skipped" in item for item in registry.set_aside)


def test_with_plugins_strict_the_error_of_the_broken_plugin_is_raised(broken, tmp_path):
    with pytest.raises(PluginLoadError, match="Missing"):
        explain_choice("grammar", EngineArgs(model=write_tiny_llama(tmp_path), plugins_strict=True))
