"""Every plugin can be replaced by name, and the engine uses the replacement on every path."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dovetail import LLM, SamplingParams

PARTS = Path(__file__).with_name("swapped_parts.py")
PROMPTS = [[5, 6, 7, 8, 9, 10], [50], [30, 31, 32] * 5]
PARAMS = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
NUM_STEPS = 6
NUM_LAYERS = 2
NUM_RUNS = NUM_STEPS + 1  # the warm-up runs the model once without attention

# Maps an option to: the class, the method that it counts, its number of calls, and a method of the
# default plugin.
SWAPS = {
    "scheduler_cls": (
        "MyScheduler",
        "schedule",
        NUM_STEPS,
        "dovetail_sched_fcfs:FCFSScheduler.__init__",
    ),
    "worker_cls": (
        "MyWorker",
        "execute_model",
        NUM_STEPS,
        "dovetail_cpu.worker:CPUWorker.__init__",
    ),
    "executor_backend": (
        "MyExecutor",
        "executor",
        NUM_STEPS,
        "dovetail.executors.uniproc:UniprocExecutor.execute_model",
    ),
    "attention_backend": (
        "MyAttention",
        "attention",
        NUM_STEPS * NUM_LAYERS,
        "dovetail_attn_torch.layer:TorchAttentionLayer.forward",
    ),
    "ops": (
        "MyOps",
        "norm",
        NUM_RUNS * (2 * NUM_LAYERS + 1),
        "dovetail_torch.layers.torch_ops:TorchOps.rms_norm",
    ),
    "linear_method": (
        "MyLinear",
        "linear",
        NUM_RUNS * (4 * NUM_LAYERS + 1),
        "dovetail_cpu.onednn_linear:OneDNNLinearMethod.apply",
    ),
    "load_format": (
        "MyLoader",
        "load",
        1,
        "dovetail_torch.weights.safetensors_loader:SafetensorsLoader.load",
    ),
    "tokenizer_mode": (
        "MyTokenizer",
        "encode",
        1,
        "dovetail.tokenizers.huggingface:HuggingFaceTokenizer.encode",
    ),
    "platform": ("MyPlatform", "activate", 1, "dovetail_cpu.platform:CPUPlatform.runtime"),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return a directory on sys.path with the plugins, as in a user's PYTHONPATH."""
    shutil.copy(PARTS, tmp_path / "loose_parts.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("loose_parts", None)


@pytest.fixture
def parts(folder):
    return importlib.import_module("loose_parts")


@pytest.fixture
def defaults(monkeypatch):
    """Count the calls of the default plugin of each option."""
    calls = dict.fromkeys(SWAPS, 0)

    def watch(field, target):
        module, _, path = target.partition(":")
        owner, method = path.split(".")
        cls = getattr(importlib.import_module(module), owner)
        original = getattr(cls, method)

        def counted(*arguments, **named):
            calls[field] += 1
            return original(*arguments, **named)

        monkeypatch.setattr(cls, method, counted)

    for field, (_, _, _, target) in SWAPS.items():
        watch(field, target)
    return calls


@pytest.fixture(scope="module")
def expected(llm):
    return tokens(llm)


def tokens(llm):
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS)]


def test_the_default_plugins_are_used_by_default(model_dir, options, parts, defaults):
    with LLM(model_dir, **options) as llm:
        tokens(llm)
        llm.generate("text", PARAMS)
    assert all(defaults.values()), defaults
    assert not parts.CALLS


@pytest.mark.costly
@pytest.mark.sampled(6)
@pytest.mark.parametrize("form", ["loose_parts:{}", "loose_parts.{}", "class"])
@pytest.mark.parametrize("field", SWAPS)
def test_a_replacement_plugin_is_used_in_all_code_paths(
    model_dir, options, parts, defaults, expected, field, form
):
    name, counter, times, _ = SWAPS[field]
    part = getattr(parts, name) if form == "class" else form.format(name)
    with LLM(model_dir, **options, **{field: part}) as llm:
        assert tokens(llm) == expected
        counted = parts.CALLS[counter]
        if field == "tokenizer_mode":
            llm.generate("text", PARAMS)
            counted = parts.CALLS[counter]
    assert counted == times
    assert defaults.pop(field) == 0
    if field == "platform":
        assert parts.CALLS["prefer"]
    used = {other: count for other, count in defaults.items() if other != "tokenizer_mode"}
    assert all(used.values()), used  # the default plugins serve all other kinds


def test_all_plugins_can_be_replaced_together(model_dir, options, parts, defaults, expected):
    swaps = {field: f"loose_parts:{name}" for field, (name, *_) in SWAPS.items()}
    with LLM(model_dir, **options, **swaps) as llm:
        assert tokens(llm) == expected
        llm.generate("text", SamplingParams(max_tokens=1))
        resolved = {resolution.name for resolution in llm.llm_engine.plugins.resolutions}
    assert not any(defaults.values()), defaults
    assert {name for name, *_ in SWAPS.values()} - {"MyTokenizer"} <= resolved


@pytest.mark.costly
@pytest.mark.parametrize("form", ["loose_parts:MyPolicy", "class"])
def test_an_engine_accepts_a_policy_as_scheduler_cls(model_dir, options, parts, expected, form):
    part = parts.MyPolicy if form == "class" else form
    options["max_num_seqs"] = 1
    with LLM(model_dir, scheduler_cls=part, **options) as llm:
        order = []
        engine = llm.llm_engine
        for number, prompt in enumerate(PROMPTS):
            engine.add_request(str(number), prompt, PARAMS)
        while engine.has_unfinished_requests():
            order += [out.request_id for out in engine.step() if out.finished]
        assert order == ["2", "1", "0"]
        assert tokens(llm) == expected
    assert parts.CALLS["rank"] == 2 * len(PROMPTS)


def test_a_plugin_can_be_replaced_through_the_alias_of_its_option(
    model_dir, options, parts, expected
):
    names = {
        "scheduling_policy": "loose_parts:MyScheduler",
        "distributed_executor_backend": "loose_parts:MyExecutor",
        "quantization": "loose_parts:MyLinear",
    }
    with LLM(model_dir, **options, **names) as llm:
        assert tokens(llm) == expected
    assert parts.CALLS["schedule"] == parts.CALLS["executor"] == NUM_STEPS
    assert parts.CALLS["linear"]


@pytest.fixture
def installed(folder):
    """The plugins as an installed distribution: the module and a dist-info directory."""
    info = folder / "acme_parts-2.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-parts\nVersion: 2.0\n")
    (info / "entry_points.txt").write_text(
        "[dovetail.model]\nMineForCausalLM = loose_parts:MyModel\n"
        "[dovetail.scheduler]\nmine = loose_parts:MyScheduler\n"
        "[dovetail.ops]\ntorch = loose_parts:MyOps\n"
    )
    importlib.invalidate_caches()
    return importlib.import_module("loose_parts")


def test_an_installed_model_is_found_by_its_architecture(
    model_dir, options, installed, expected, tmp_path
):
    copy = shutil.copytree(model_dir, tmp_path / "model")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"architectures": ["MineForCausalLM"]}))
    options["ops"] = "torch@dovetail-torch"  # two distributions now have a plugin of that name
    with LLM(copy, **options) as llm:
        assert tokens(llm) == expected
    assert installed.CALLS["forward"] == NUM_RUNS


def test_an_installed_plugin_is_found_by_name(model_dir, options, installed, expected):
    with LLM(model_dir, scheduler_cls="mine", ops="torch@acme-parts", **options) as llm:
        assert tokens(llm) == expected
    assert installed.CALLS["schedule"] == NUM_STEPS and installed.CALLS["norm"]


SCRIPT = """
import json, sys
from dovetail import LLM, SamplingParams

if __name__ == "__main__":
    model, options, prompts = json.loads(sys.argv[1])
    with LLM(model, **options) as llm:
        params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
        outputs = llm.generate(prompts, params)
    import loose_parts
    print(json.dumps([[out.outputs[0].token_ids for out in outputs], loose_parts.CALLS]))
"""


@pytest.mark.costly
def test_a_plugin_module_on_pythonpath_needs_no_distribution(
    model_dir, options, tmp_path, expected
):
    shutil.copy(PARTS, tmp_path / "loose_parts.py")
    swaps = {field: f"loose_parts:{name}" for field, (name, *_) in SWAPS.items()}
    arguments = json.dumps([str(model_dir), options | swaps, PROMPTS])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, arguments],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    results, calls = json.loads(done.stdout.splitlines()[-1])
    assert results == expected
    counted = {name: calls.get(counter) for name, counter, _, _ in SWAPS.values()}
    times = {name: times for name, _, times, _ in SWAPS.values()} | {"MyTokenizer": None}
    assert counted == times
