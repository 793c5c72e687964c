"""Plugins created by `dovetail plugins new` run in an engine, with options and cache groups."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
import tomllib

import pytest

from dovetail import LLM, SamplingParams
from dovetail.plugin_kinds import KINDS, Cardinality
from dovetail_devkit.scaffold import BLUEPRINTS, write_package
from end_to_end.checkpoints import OPTIONS, make_checkpoint

PROMPTS = [list(range(5, 45)), list(range(60, 90)), [7, 8, 9] * 11]
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
COMPILING = {"compile_backend", "graph_pass"}  # used with a compile level, in torch only
WITHOUT_OPTIONS = {"command", "worker_extension"}
SERVER_ONLY = {"http_routes"}  # `serve` creates them, not an engine; see the tests of the server
WITH_OPTIONS = """

# Appended by the test: the plugin takes an option and records the options that its class gets.
from pydantic import BaseModel


class Knobs(globals().get("Options", BaseModel), extra="forbid"):
    knob: int = 1


def _watched(make):
    def wrapper(*args, **kwargs):
        SEEN.append(dict(kwargs.pop("options", None) or getattr(args[-1], "options", {{}})))
        return make(*args, **kwargs)

    return wrapper


SEEN = []
Options = {cls}.options_model = Knobs
if "{kind}" == "attention":
    {cls}.create_layer = staticmethod(_watched({cls}.create_layer))
elif "{kind}" == "kv_connector":
    {cls}.create_worker_side = staticmethod(_watched({cls}.create_worker_side))
elif "{kind}" == "tokenizer":
    {cls}.from_directory = staticmethod(_watched({cls}.from_directory))
else:
    {cls}.__init__ = _watched({cls}.__init__)
"""
WORKER = """
from dataclasses import replace
from pydantic import BaseModel
from dovetail_cpu.worker import CPUWorker


class Knobs(BaseModel, extra="forbid"):
    knob: int = 1


class OptionWorker(CPUWorker):
    options_model = Knobs

    def __init__(self, context):
        super().__init__(replace(context, options={}))
        self.given = dict(context.options)

    def get_options(self):
        return self.given
"""


@pytest.fixture
def begin(tmp_path, monkeypatch):
    """Return `begin(kind, appended="")`, which installs a new package and returns its module."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))
    before = set(sys.modules)

    def install(kind, appended=""):
        name = "BegunForCausalLM" if kind == "model" else f"begun_{kind}"
        created = write_package(kind, name, tmp_path)
        project = tomllib.loads((created.folder / "pyproject.toml").read_text())["project"]
        (source,) = (created.folder / "src").iterdir()
        package = shutil.copytree(source, site / source.name)
        target = project["entry-points"][f"dovetail.{kind}"][name]
        module, _, cls = target.partition(":")
        file = site / f"{module.replace('.', '/')}.py"
        file.write_text(file.read_text() + appended.format(kind=kind, cls=cls))
        info = site / f"{package.name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Name: {project['name']}\nVersion: 1.0\n")
        lines = [
            f"[{group}]\n{item} = {path}\n"
            for group, points in project["entry-points"].items()
            for item, path in points.items()
        ]
        (info / "entry_points.txt").write_text("".join(lines))
        importlib.invalidate_caches()
        return name, importlib.import_module(module)

    yield install
    for name in set(sys.modules) - before:
        if name.partition(".")[0].startswith("begun") or name == "option_worker":
            del sys.modules[name]


def answers(model, **options):
    with LLM(model, **{**OPTIONS, **options}) as llm:
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        if options.keys() & {"tool_parser", "reasoning_parser"}:
            tools = [{"type": "function", "function": {"name": "f"}}]
            arguments = tools if "tool_parser" in options else None
            llm.chat([{"role": "user", "content": "Hi"}], GREEDY, tools=arguments, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.costly
@pytest.mark.sampled(8)
@pytest.mark.parametrize("kind", sorted(set(BLUEPRINTS) - WITHOUT_OPTIONS - SERVER_ONLY))
def test_a_new_plugin_receives_its_option(kind, begin, model_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some plugins write files
    name, module = begin(kind, WITH_OPTIONS)
    kwargs = {"plugin_options": {f"{kind}:{name}": {"knob": 7}}}
    if kind == "model":
        model_dir = shutil.copytree(model_dir, tmp_path / "model")
        config = json.loads((model_dir / "config.json").read_text())
        (model_dir / "config.json").write_text(json.dumps(config | {"architectures": [name]}))
    elif kind == "model_source":
        shutil.copytree(model_dir, tmp_path / "models" / "one")
        monkeypatch.setenv(module.VARIABLE, str(tmp_path / "models"))
        model_dir = f"{name}:one"
    elif kind == "model_format":
        file = tmp_path / f"one.{name}"
        file.write_text((model_dir / "config.json").read_text())
        kwargs["tokenizer"] = str(model_dir)
        model_dir = file
    else:
        option = KINDS[kind].field.rpartition(".")[2]
        if kind in COMPILING:
            kwargs |= {"compile_level": "once", "compile_backend": "eager", "ops": "torch"}
            kwargs["linear_method"] = "torch"
        kwargs[option] = (name,) if KINDS[kind].cardinality is Cardinality.MANY else name
    assert all(answers(model_dir, **kwargs))
    assert module.SEEN and all(seen["knob"] == 7 for seen in module.SEEN)


def test_a_new_executor_passes_options_to_the_worker(begin, model_dir, tmp_path):
    name, _ = begin("executor")
    (tmp_path / "site" / "option_worker.py").write_text(WORKER)
    worker = "option_worker:OptionWorker"
    kwargs = {"worker_cls": worker, "plugin_options": {worker: {"knob": 7}}}
    for executor in ("uniproc", name):
        with LLM(model_dir, **OPTIONS, executor_backend=executor, **kwargs) as llm:
            assert llm.llm_engine.collective_rpc("get_options") == [{"knob": 7}]


@pytest.fixture(scope="module")
def two_groups(tmp_path_factory):
    """Return a model with a sliding window in one of two layers: two KV-cache groups."""
    sizes = {"use_sliding_window": True, "sliding_window": 11, "max_window_layers": 1}
    return make_checkpoint(tmp_path_factory.mktemp("windows"), "Qwen2", **sizes)


def test_a_new_scheduler_gives_each_kv_cache_group_its_own_blocks(begin, two_groups):
    expected = answers(two_groups)
    assert answers(two_groups, scheduler_cls=begin("scheduler")[0]) == expected
    assert len({tuple(item) for item in expected}) == len(PROMPTS)
