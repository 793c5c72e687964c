"""`explain` names the plugins without batch invariance, like the warning at startup."""

from __future__ import annotations

import json
import logging
import re

import pytest

from dovetail import LLM, EngineArgs
from dovetail.cli import main
from dovetail.engine.choice import explain_choice
from dovetail.errors import DovetailError
from dovetail_devkit.contexts import SMALL_ENGINE
from dovetail_devkit.tiny_model import write_tiny_llama

WARNING = "A seeded request may get different tokens"
KINDS = ("attention", "linear_method", "ops")
CASES = [
    {"dtype": "bfloat16"},
    {"dtype": "float16"},
    {"dtype": "float32"},
    {"dtype": "bfloat16", "attention_backend": "torch"},
    {"dtype": "bfloat16", "linear_method": "torch", "ops": "torch"},
    {"dtype": "bfloat16", "linear_method": "onednn"},
    {"dtype": "bfloat16", "linear_method": "int8"},
    {"dtype": "bfloat16", "batch_invariant": True},
    {"dtype": "float32", "batch_invariant": True},
    {"dtype": "bfloat16", "batch_invariant": True, "linear_method": "torch"},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("model"))


def arguments(values):
    return {**SMALL_ENGINE, "skip_tokenizer_init": True, "load_format": "dummy", **values}


def warned_kinds(model, options, caplog):
    """Return the plugin kinds that the warning at startup names, or None if the engine does not
    start."""
    caplog.clear()
    try:
        with caplog.at_level(logging.WARNING):
            LLM(model, **options).shutdown()
    except DovetailError as error:
        assert "batch_invariant" in str(error)
        return None
    warnings = [line for line in caplog.messages if WARNING in line]
    words = {"attention": "attention backend", "linear_method": "linear method", "ops": "ops"}
    return {
        kind
        for kind, word in words.items()
        if any(re.search(rf"\b{word} \w+", line) for line in warnings)
    }


@pytest.mark.costly
@pytest.mark.parametrize("values", CASES, ids=lambda values: "-".join(map(str, values.values())))
def test_explain_names_the_plugins_that_the_engine_warns_about_at_startup(model, values, caplog):
    options = arguments(values)
    args = EngineArgs(model=model, **options)
    explained = {kind: explain_choice(kind, args) for kind in KINDS}
    warned = warned_kinds(model, options, caplog)
    if warned is None:
        assert any(item.error for item in explained.values())
        return
    for kind, item in explained.items():
        (taken,) = item.chosen
        assert taken.batch_invariant is (kind not in warned), (kind, taken)
        missing = [text for text in taken.reasons if "it is not batch-invariant" in text]
        assert bool(missing) is (kind in warned)
        assert all(values["dtype"] in text for text in missing)


@pytest.mark.costly
@pytest.mark.parametrize("kind", KINDS)
def test_explain_states_batch_invariance_for_each_candidate(kind, model, capsys):
    options = ["--dtype", "bfloat16", "--model", str(model), "--skip-tokenizer-init"]
    assert main(["plugins", "explain", kind, "--json", *options]) == 0
    by_name = {item["name"]: item for item in json.loads(capsys.readouterr().out)["verdicts"]}
    promised = {name: item["batch_invariant"] for name, item in by_name.items()}
    assert promised["torch"] is False
    assert [name for name, promise in promised.items() if promise]
    picked = {"attention": "attention-backend"}.get(kind, kind.replace("_", "-"))
    assert main(["plugins", "explain", kind, f"--{picked}", "torch", *options]) == 0
    output = capsys.readouterr().out
    assert "the tokens of a seeded request may depend" in output.splitlines()[1]


def test_explain_without_a_model_needs_only_a_dtype(capsys):
    assert main(["plugins", "explain", "attention", "--json", "--dtype", "float16"]) == 0
    output = json.loads(capsys.readouterr().out)
    verdicts = {item["name"]: item for item in output["verdicts"]}
    assert output["chosen"] == ["torch"]
    assert verdicts["cpu"]["state"] == "rejected" and "float16" in verdicts["cpu"]["reasons"][0]


def test_explain_mentions_batch_invariance_only_for_kinds_that_can_guarantee_it():
    (taken,) = explain_choice("worker").chosen
    assert taken.batch_invariant is None
