"""Every Python example in the documents for users and researchers is executed.

The plugin author's guide has its own tests (test_plugin_pages.py and test_layers_page.py).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import dovetail
from dovetail import LLM

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    path.relative_to(ROOT).as_posix()
    for path in sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md")])
    if path.parent.name != "plugins"
]
_FENCE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Example:
    """How an example runs. names: defined before it runs. printed: strings that it prints."""

    names: dict[str, Any] = field(default_factory=dict)
    printed: tuple[str, ...] = ()


RUN = {
    ("README.md", 1): Example(printed=("Reverse: one, two →", "85")),
    ("README.md", 3): Example(),
    ("docs/lab/simulator.md", 0): Example(),
    ("docs/lab/tutorial.md", 0): Example(),
    ("docs/models.md", 0): Example(printed=("nearest: Find me a store in the capital of Italy",)),
    ("docs/schedulers.md", 0): Example(names={"LLM": LLM}),
    ("docs/schedulers.md", 1): Example(names={"SamplingParams": dovetail.SamplingParams}),
    ("docs/structured_output.md", 0): Example(printed=("name='", "age=")),
    ("docs/tools.md", 0): Example(printed=("1234 + 4321 = 5555.",)),
    ("docs/tools.md", 1): Example(names={"tokenizer": None, "tools": [], "pieces": ["a", "b"]}),
}
"""Examples that run here. Key: the page and the index of the example on it."""
ELSEWHERE = {
    ("README.md", 0): "tests/docs/test_readme_server.py",
    ("docs/async.md", 0): "tests/end_to_end/test_async_streams.py",
    ("docs/processes.md", 0): "core/tests/async_llm/test_async_attach.py",
    ("docs/server.md", 0): "tests/docs/test_server_examples.py",
    ("docs/schedulers/write_your_own.md", 0): "tests/docs/test_scheduler_pages.py",
    ("docs/schedulers/write_your_own.md", 1): "tests/docs/test_scheduler_pages.py",
}
"""Examples that another test executes, with the file of that test."""
COMPILED = {
    ("README.md", 2): "one line for each way to name a plugin; some plugins are fictitious",
    ("docs/cpu.md", 0): "int4 groups of 64 do not fit the demo model",
    ("docs/cpu.md", 1): "needs a file `model.gguf`",
    ("docs/device_memory.md", 0): "needs a GPU",
    ("docs/gguf.md", 0): "needs a file `model.gguf`",
    ("docs/gguf.md", 1): "needs a GGUF file of all-MiniLM-L6-v2",
    ("docs/quantization.md", 0): "needs a model in the directory `model`",
}
"""Examples that are only compiled, with the reason."""


def examples() -> dict[tuple[str, int], str]:
    return {
        (page, index): block
        for page in PAGES
        for index, block in enumerate(_FENCE.findall((ROOT / page).read_text("utf-8")))
    }


@pytest.fixture
def engines(monkeypatch):
    """Shut down the engines that an example does not shut down."""
    created: list[LLM] = []
    original = LLM.__init__

    def recorded(self: LLM, *args: Any, **kwargs: Any) -> None:
        created.append(self)
        original(self, *args, **kwargs)

    monkeypatch.setattr(LLM, "__init__", recorded)
    yield created
    for llm in created:
        llm.shutdown()


@pytest.mark.costly
@pytest.mark.sampled(4)
@pytest.mark.parametrize("key", RUN, ids=lambda key: f"{key[0]}-{key[1]}")
def test_an_example_of_a_page_runs(key, engines, capsys):
    example, code = RUN[key], examples()[key]
    names = {"__name__": "example", **example.names}
    if "llm." in code and "llm = " not in code and " as llm" not in code:
        names["llm"] = LLM("demo")
    exec(compile(code, key[0], "exec"), names)
    printed = capsys.readouterr().out
    assert [text for text in example.printed if text not in printed] == []


def test_every_example_is_executed_or_listed_with_a_reason():
    assert set(examples()) == {*RUN, *ELSEWHERE, *COMPILED}


@pytest.mark.parametrize("key", ELSEWHERE, ids=lambda key: f"{key[0]}-{key[1]}")
def test_the_test_of_an_example_names_its_page(key):
    page, test = Path(key[0]), ROOT / ELSEWHERE[key]
    assert page.stem.lower() in test.read_text("utf-8").lower()


@pytest.mark.parametrize("key", COMPILED, ids=lambda key: f"{key[0]}-{key[1]}")
def test_an_example_that_cannot_run_compiles(key):
    compile(examples()[key], key[0], "exec")
