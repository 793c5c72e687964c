"""Third-party packages run with only the core, without torch, and import only public names."""

import ast
import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from wheels.clean_environment import PIP, make_environment

ROOT = Path(__file__).resolve().parents[2]
BIGRAM = Path(__file__).with_name("bigram")
TURNS = Path(__file__).with_name("turns")
PUBLISHED = frozenset(
    {
        "dovetail",
        "dovetail.errors",
        "dovetail.interfaces",
        "dovetail.plan",
        "dovetail.request",
        "dovetail.result",
        "dovetail.rows",
    }
)
VOCAB = 50
PROMPTS = [[1, 2, 3], [7], list(range(20))]
NUM_TOKENS = 8

SCRIPT = """
import importlib.util, json, sys
from dovetail import LLM, SamplingParams

if __name__ == "__main__":
    model, prompts, num_tokens = json.loads(sys.argv[1])
    llm = LLM(
        model=model,
        platform="bigram",
        worker_cls="bigram",
        scheduler_cls="bigram_dovetail:RoundRobinScheduler",
        skip_tokenizer_init=True,
    )
    params = SamplingParams(max_tokens=num_tokens, temperature=0, detokenize=False)
    outputs = llm.generate(prompts, params)
    print(json.dumps({
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "torch": importlib.util.find_spec("torch") is not None,
        "loaded": [name for name in ("torch", "transformers") if name in sys.modules],
    }))
"""

POLICY_SCRIPT = """
import json, sys
from dovetail import LLM, SamplingParams
from dovetail_devkit import load_suite
from turns_dovetail import TurnsPolicy

if __name__ == "__main__":
    model, prompts, num_tokens = json.loads(sys.argv[1])
    load_suite("policy")(TurnsPolicy, num_programs=6)
    llm = LLM(
        model=model,
        platform="bigram",
        worker_cls="bigram",
        scheduler_cls="turns",
        max_num_seqs=1,
        skip_tokenizer_init=True,
    )
    params = SamplingParams(max_tokens=num_tokens, temperature=0, detokenize=False)
    outputs = llm.generate(prompts, params)
    ends = [output.metrics.finished_ns for output in outputs]
    print(json.dumps({
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "order": sorted(range(len(ends)), key=lambda place: ends[place]),
    }))
"""


def run(*command, **variables):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    done = subprocess.run(
        list(map(str, command)),
        env={**environment, **variables},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """Return the interpreter of an environment with the core and these packages, without torch."""
    folder = tmp_path_factory.mktemp("outside")
    options = ("--no-deps", "--no-build-isolation", "--wheel-dir", folder)
    run(*PIP, "wheel", "-q", ROOT / "core", ROOT / "plugins/devkit", BIGRAM, TURNS, *options)
    return make_environment(folder / "environment", folder.glob("*.whl"))


@pytest.fixture(scope="module")
def table():
    return np.random.default_rng(3).normal(size=(VOCAB, VOCAB)).astype(np.float32)


@pytest.fixture
def model(tmp_path, table):
    np.save(tmp_path / "bigram.npy", table)
    config = {"architectures": ["Bigram"], "vocab_size": VOCAB, "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def walk(table, token, num_tokens):
    path = []
    for _ in range(num_tokens):
        token = int(max(range(VOCAB), key=lambda after: table[token, after]))
        path.append(token)
    return path


def test_a_third_party_package_generates_without_torch(python, model, table):
    arguments = json.dumps([str(model), PROMPTS, NUM_TOKENS])
    (model / "script.py").write_text(SCRIPT)
    lines = run(python, "-I", model / "script.py", arguments).splitlines()
    message = json.loads(lines[-1])
    assert message["tokens"] == [walk(table, prompt[-1], NUM_TOKENS) for prompt in PROMPTS]
    assert not message["torch"], (
        "torch is installed in the environment: the core or a package depends on it"
    )
    assert message["loaded"] == []


def test_a_third_party_policy_is_selected_by_name_and_used(python, model, table):
    prompts = [[token] * length for token, length in enumerate((2, 4, 6, 3, 5))]
    arguments = json.dumps([str(model), prompts, NUM_TOKENS])
    (model / "policy.py").write_text(POLICY_SCRIPT)
    message = json.loads(run(python, "-I", model / "policy.py", arguments).splitlines()[-1])
    assert message["tokens"] == [walk(table, prompt[-1], NUM_TOKENS) for prompt in prompts]
    assert message["order"] == [3, 0, 4, 1, 2]


def test_the_entry_points_of_a_third_party_package_are_found_by_name(python):
    program = (
        "from importlib.metadata import entry_points\n"
        "for kind in ('platform', 'worker', 'scheduler'):\n"
        "    print([e.load().__name__ for e in entry_points(group=f'dovetail.{kind}')])\n"
    )
    assert run(python, "-I", "-c", program).split() == [
        "['BigramPlatform']",
        "['BigramWorker']",
        "['RoundRobinScheduler']",
    ]


def test_the_third_party_packages_import_only_public_names():
    private = []
    for path in sorted([*BIGRAM.rglob("*.py"), *TURNS.rglob("*.py")]):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            own_value = [name for name in names if name.split(".")[0].startswith("dovetail")]
            private += [f"{path.name}: {name}" for name in own_value if name not in PUBLISHED]
            if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
                own = isinstance(node.value, ast.Name) and node.value.id == "self"
                private += [] if own else [f"{path.name}: .{node.attr}"]
    assert not private, f"publish these names, or do not import them: {private}"
