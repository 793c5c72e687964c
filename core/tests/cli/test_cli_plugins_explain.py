"""`dovetail plugins explain`: its output, exit codes and imports."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from dovetail.cli import main
from dovetail_devkit.tiny_model import write_tiny_llama

PLATFORM = ["--platform", "bigram_dovetail:BigramPlatform"]


def test_the_selected_plugin_is_listed_first_with_the_reason(capsys):
    assert main(["plugins", "explain", "scheduler", "--scheduler-cls", "priority"]) == 0
    headline, _, heading, first, *rest = capsys.readouterr().out.splitlines()
    assert headline == "scheduler on the platform cpu: priority (scheduler_cls names it)."
    assert heading.split() == ["scheduler", "distribution", "why"]
    assert first.split()[:3] == ["1", "selected", "priority"]
    (fcfs,) = [line for line in rest if " fcfs " in line]
    assert "priority is requested" in fcfs and fcfs.split()[:2] == ["–", "not"]


def test_attention_backends_are_checked_against_the_requirements_of_the_model(tmp_path, capsys):
    model = write_tiny_llama(tmp_path, architectures=["MistralForCausalLM"], sliding_window=5)
    arguments = ["--model", str(model), "--block-size", "32", "--platform", "cpu"]
    assert main(["plugins", "explain", "attention", *arguments]) == 0
    output = capsys.readouterr().out
    assert "Requirements: head size 8, 4 query heads over 2 key-value heads, float32" in output
    assert "blocks of 32" in output and "sliding_window" in output


def test_the_json_output_is_one_object_with_the_requirements(tmp_path, capsys):
    model = write_tiny_llama(tmp_path)
    arguments = ["--json", "--model", str(model), "--platform", "cpu"]
    assert main(["plugins", "explain", "attention", *arguments]) == 0
    output = json.loads(capsys.readouterr().out)
    assert output["requirements"]["head_size"] == 8
    assert output["requirements"]["features"] == []
    assert output["chosen"] == [v["name"] for v in output["verdicts"] if v["state"] == "selected"]
    assert output["error"] == ""


def test_a_plugin_kind_without_a_usable_plugin_is_an_error(capsys):
    assert main(["plugins", "explain", "ops", "--ops", "nobody", *PLATFORM]) == 1
    output = capsys.readouterr().out
    assert "no plugin can be used" in output
    assert "There is no ops plugin 'nobody'" in output


@pytest.mark.parametrize("kind", ["model_source", "model_format"])
def test_explain_names_the_option_that_selects_a_kind_without_its_own_option(kind, capsys):
    assert main(["plugins", "explain", kind]) == 0
    assert "the option model selects plugins of this kind" in capsys.readouterr().out


@pytest.mark.costly
@pytest.mark.parametrize(
    ("arguments", "output"),
    [
        (["shceduler"], "scheduler"),
        (["ops", "--model", "/nowhere/at/all"], "/nowhere/at/all"),
        (["ops", "--max-num-seqs", "0"], "max_num_seqs"),
        (["ops", "--platform", "nobody"], "nobody"),
        (["ops", "--max-num-seq", "3"], "--max-num-seqs"),
    ],
)
def test_invalid_arguments_are_reported_in_at_most_three_lines(arguments, output, capsys):
    assert main(["plugins", "explain", *arguments]) == 2
    error = capsys.readouterr().err
    assert output in error and len(error.splitlines()) <= 3


@pytest.mark.costly
def test_attention_requirements_are_computed_without_a_tensor_library(tmp_path):
    """Only loading a backend may import a tensor library."""
    write_tiny_llama(tmp_path)
    program = (
        "import sys\n"
        "for name in ('torch', 'numpy', 'transformers'): sys.modules[name] = None\n"
        "from dovetail.config import EngineArgs\n"
        "from dovetail.engine.choice import explain_choice\n"
        f"args = EngineArgs(model={str(tmp_path)!r}, platform='cpu')\n"
        "explanation = explain_choice('attention', args)\n"
        "required = explanation.criteria.requirements\n"
        "print(required.head_size, [v.state for v in explanation.verdicts])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=os.environ
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("8 [") and "selected" not in done.stdout
