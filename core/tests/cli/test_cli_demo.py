"""The command `dovetail demo`, its random checkpoint and the example script."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dovetail.cli import main
from dovetail.cli.demo_questions import demo_subject
from dovetail.cli.random_checkpoint import write_random_checkpoint
from dovetail.config import ModelDirectory
from dovetail.tokenizers.huggingface import HuggingFaceTokenizer

EXAMPLES = Path(__file__).parents[3] / "examples"
TASKS = """
from types import SimpleNamespace

def draw(word):
    def from_seed(rng, *, held_out):
        assert held_out
        return f"the {word}", "right"
    return from_seed

def task(word, verdict):
    return SimpleNamespace(name=word, draw=draw(word), check=lambda prompt, text: verdict)

TASKS = {"good": task("sea", True), "bad": task("bird", False)}
"""


@pytest.fixture(autouse=True)
def one_timed_round(monkeypatch) -> None:
    monkeypatch.setattr("dovetail.cli.demo_run.NUM_ROUNDS", 1)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_checkpoint(tmp_path_factory.mktemp("random") / "model")


@pytest.fixture
def no_demo_model(monkeypatch) -> None:
    monkeypatch.setattr("dovetail.cli.demo_questions.find_model", lambda *_, **__: None)


def imported_modules() -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] == "dovetail_demo_model"]


@pytest.fixture
def demo_model(checkpoint: Path, monkeypatch, tmp_path: Path) -> Iterator[None]:
    """Install a package named like the demo model, with tasks and random weights."""
    package = tmp_path / "dovetail_demo_model"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "tasks.py").write_text(TASKS)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in imported_modules():
        monkeypatch.delitem(sys.modules, name)
    for module in ("dovetail.cli.demo_questions", "dovetail.config.model_directory"):
        monkeypatch.setattr(f"{module}.find_model", lambda *_, **__: checkpoint)
    yield
    for name in imported_modules():
        del sys.modules[name]


@pytest.mark.costly
def test_the_demo_gives_the_same_outputs_after_one_plugin_is_replaced(
    no_demo_model, capsys, caplog
) -> None:
    assert main(["demo"]) == 0
    # Only the first run may warn: the demo itself chose the plugins of the others.
    assert caplog.text.count("A seeded request") <= 1
    output = capsys.readouterr().out
    for words in (
        "random weights",
        "the sea is",
        "tokens/s",
        "nothing ",
        "scheduler_cls = priority",
        "attention_backend = dovetail_attn_",
        "all 8 are equal",
        "after a warm-up round",
        "scheduler priority: The core scheduler with the priority policy.",
        "dovetail-sched-fcfs",
        "named in config.json",
    ):
        assert words in output
    # The engine loaded and probed other platforms, too.
    (row,) = [line for line in output.splitlines() if line.startswith("platform ")]
    assert row.split()[1:3] == ["cpu", "dovetail-cpu"]


@pytest.mark.costly
def test_the_demo_model_runs_its_tasks_and_its_answers_are_graded(demo_model, capsys) -> None:
    part = "dovetail_sched_priority:PriorityPolicy"
    assert main(["demo", "--scheduler-cls", part]) == 0
    output = capsys.readouterr().out
    for words in (
        "the sea",
        "the bird",
        "✓ ",
        "✗ ",
        "1 of 2 answers are correct",
        f"scheduler_cls = {part}",
    ):
        assert words in output
    assert "all 2 are equal" in output
    assert "attention_backend" not in output  # the run uses the requested plugin only


PART = ("--scheduler-cls", "priority")


@pytest.mark.costly
def test_the_demo_asks_other_models_simple_questions(checkpoint, capsys) -> None:
    assert main(["demo", "--model", str(checkpoint), *PART]) == 0
    output = capsys.readouterr().out
    assert "Name the capital of France." in output
    assert " of 8 answers are correct" in output
    assert "all 8 are equal" in output


@pytest.mark.costly
def test_a_model_without_a_chat_template_continues_prompts(tmp_path, capsys) -> None:
    model = write_random_checkpoint(tmp_path / "model")
    path = model / "tokenizer_config.json"
    settings = json.loads(path.read_text("utf-8"))
    del settings["chat_template"]
    path.write_text(json.dumps(settings), "utf-8")
    assert main(["demo", "--model", str(model), *PART]) == 0
    output = capsys.readouterr().out
    assert "the sea is" in output
    assert "capital" not in output
    assert "answers are correct" not in output


def test_an_unknown_plugin_is_reported_before_an_engine_starts(no_demo_model, capsys) -> None:
    assert main(["demo", "--scheduler-cls", "priorty"]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert "'priority'" in output.err and len(output.err.splitlines()) <= 3


def test_the_demo_deletes_its_files(no_demo_model) -> None:
    with demo_subject(None) as subject:
        assert ModelDirectory.open(subject.model).architecture == "LlamaForCausalLM"
    assert not Path(subject.model).exists()


def test_the_random_checkpoint_is_the_same_for_the_same_seed(checkpoint, tmp_path) -> None:
    again = write_random_checkpoint(tmp_path / "again")
    other = write_random_checkpoint(tmp_path / "other", seed=1)
    names = sorted(file.name for file in checkpoint.iterdir())
    assert all((again / name).read_bytes() == (checkpoint / name).read_bytes() for name in names)
    weights = "model.safetensors"
    assert (other / weights).read_bytes() != (checkpoint / weights).read_bytes()


def test_the_random_checkpoint_generates_words(checkpoint) -> None:
    tokenizer = HuggingFaceTokenizer.from_directory(checkpoint)
    ids = tokenizer.encode("the sea is")
    assert len(ids) == 3 and tokenizer.decode(ids) == "the sea is"
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "the sea"}])
    assert tokenizer.encode(chat)[0] in tokenizer.special_token_ids


def test_the_example_script_writes_a_checkpoint(monkeypatch, capsys, tmp_path) -> None:
    folder = tmp_path / "made"
    monkeypatch.setattr(sys, "argv", ["make_checkpoint.py", str(folder), "--seed", "3"])
    runpy.run_path(str(EXAMPLES / "make_checkpoint.py"), run_name="__main__")
    assert capsys.readouterr().out.strip() == str(folder)
    assert ModelDirectory.open(folder).config["vocab_size"] > 100
