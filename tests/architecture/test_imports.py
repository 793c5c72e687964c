"""Tests the allowed imports of each module, and the time that imports take."""

import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from architecture.sources import ROOT, members

MAX_IMPORT_S = 0.15
NUM_RUNS = 5
HEAVY = ("torch", "numpy", "transformers", "pydantic", "tokenizers", "jinja2", "safetensors")

IMPORTS = f"""
import json, sys, time
wall, cpu = time.perf_counter(), time.process_time()
import dovetail
from dovetail import LLM, SamplingParams
wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
loaded = [name for name in {HEAVY!r} if name in sys.modules]
print(json.dumps([wall, cpu, loaded]))
"""


def run(*arguments, **variables):
    sources = os.pathsep.join(str(member / "src") for member in members())
    environment = {**os.environ, "PYTHONPATH": sources, **variables}
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def imports():
    """Return (wall seconds, CPU seconds, loaded heavy modules) of five new interpreters."""
    runs = [run("-c", IMPORTS) for _ in range(NUM_RUNS)]
    failed = [done.stderr for done in runs if done.returncode]
    assert not failed, failed[0]
    return [json.loads(done.stdout) for done in runs]


@pytest.mark.costly
def test_import_linter_finds_no_broken_contract():
    program = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports())"
    done = run("-c", program)
    # The output is long; its end names the broken contract and the lines to change.
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


def lint_layers(sources: Path) -> subprocess.CompletedProcess[str]:
    """Check the layers of a core with its sources in the directory `sources`."""
    program = (
        "import sys; from importlinter.cli import lint_imports; "
        f"sys.exit(lint_imports({str(ROOT / 'core/layers.toml')!r}, no_cache=True))"
    )
    return run("-c", program, PYTHONPATH=str(sources))


def test_modules_of_the_core_import_only_lower_layers():
    done = lint_layers(ROOT / "core/src")
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


def test_an_import_from_a_higher_layer_is_reported(tmp_path):
    shutil.copytree(ROOT / "core/src/dovetail", tmp_path / "dovetail")
    with open(tmp_path / "dovetail/kv_cache/sizing.py", "a", encoding="utf-8") as file:
        file.write("\nif __debug__:\n    from typing import TYPE_CHECKING\n")
        file.write("    if TYPE_CHECKING:\n        from dovetail.engine.core import EngineCore\n")
    done = lint_layers(tmp_path)
    assert done.returncode == 1
    assert "dovetail.kv_cache is not allowed to import dovetail.engine" in done.stdout


@pytest.mark.costly
def test_importing_the_public_names_loads_no_heavy_module(imports):
    loaded = imports[0][2]
    assert not loaded, f"`from dovetail import LLM, SamplingParams` loads {loaded}: import lazily"


@pytest.mark.clock
def test_importing_the_public_names_is_fast(imports, note):
    """The bound applies to CPU time: wall-clock time also counts other processes on the machine."""
    wall_s, cpu_s = (statistics.median(run[i] for run in imports) for i in (0, 1))
    note(f"import of LLM and SamplingParams: {wall_s:.3f} s, {cpu_s:.3f} s of CPU")
    assert cpu_s <= MAX_IMPORT_S, f"{cpu_s:.3f} s of CPU; see `python -X importtime -c ...`"


def test_interfaces_import_no_tensor_library():
    program = (
        "import sys\n"
        "for name in ('torch', 'numpy', 'transformers'):\n"
        "    sys.modules[name] = None\n"
        "import dovetail.interfaces, dovetail.plan, dovetail.rows, dovetail.result\n"
    )
    done = run("-c", program)
    assert done.returncode == 0, done.stderr
