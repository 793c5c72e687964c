"""Plugins in an engine: they receive the user's options, and their failures are reported."""

import inspect
import logging

import pytest

from dovetail import LLM, SamplingParams
from dovetail.errors import PluginError, PluginLoadError
from dovetail.plugins import PluginRegistry
from dovetail_devkit.contexts import SMALL_ENGINE, write_fake_config

PARTS = """
from pydantic import BaseModel
from dovetail.executors.uniproc import UniprocExecutor
from dovetail.interfaces import Policy
from dovetail.scheduling import Scheduler
from dovetail_devkit.fakes.platform import FakePlatform
from dovetail_devkit.fakes.tokenizer import ByteTokenizer
from dovetail_devkit.fakes.worker import FakeWorker

SEEN = {}

class Options(BaseModel):
    level: int = 1

class MyPolicy(Policy):
    def __init__(self, options=None):
        SEEN["policy"] = options

class MyPlatform(FakePlatform):
    def __init__(self, options=None):
        SEEN["platform"] = options

class MyScheduler(Scheduler):
    def __init__(self, context):
        super().__init__(context)
        SEEN["scheduler"] = context.options

class MyExecutor(UniprocExecutor):
    def __init__(self, context):
        SEEN["executor"] = context.options
        super().__init__(context)

class MyWorker(FakeWorker):
    def __init__(self, context):
        super().__init__(context)
        SEEN["worker"] = context.options

class MyTokenizer(ByteTokenizer):
    @classmethod
    def from_directory(cls, path, options=None):
        SEEN["tokenizer"] = options
        return super().from_directory(path)
"""
FAKES = {
    "platform": "dovetail_devkit.fakes.platform:FakePlatform",
    "worker_cls": "dovetail_devkit.fakes.worker:FakeWorker",
    "scheduler_cls": "dovetail.scheduling:Scheduler",
    "skip_tokenizer_init": True,
}
ENGINE = {**SMALL_ENGINE, **FAKES}
FIELDS = {
    "policy": "scheduler_cls",
    "platform": "platform",
    "scheduler": "scheduler_cls",
    "executor": "executor_backend",
    "worker": "worker_cls",
    "tokenizer": "tokenizer_mode",
}
PROMPT = {"prompt_token_ids": [1, 2, 3]}


@pytest.fixture
def model(tmp_path):
    return write_fake_config(tmp_path, vocab_size=300)


@pytest.fixture
def start(model):
    """Start an engine with fake plugins that is shut down after the test."""
    created = []

    def build(**args):
        created.append(LLM(model, **{**ENGINE, **args}))
        return created[-1]

    yield build
    for llm in created:
        llm.shutdown()


def tokens(llm, count=4):
    params = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)
    (output,) = llm.generate([PROMPT], params, use_tqdm=False)
    return list(output.outputs[0].token_ids)


def entry(kind, name, **more):
    lines = [f"{key} = {value}" for key, value in more.items()]
    return "\n".join(["[[plugin]]", f'kind = "{kind}"', f'name = "{name}"', *lines, ""])


# --- user options ------------------------------------------------------------------------


@pytest.mark.costly
@pytest.mark.parametrize("kind", FIELDS)
def test_plugin_options_are_passed_to_the_plugin(plugin_site, start, kind):
    entries = {kind: {"mine": f".parts:My{kind.capitalize()}"}}
    manifest = entry(kind, "mine", options='"acme.parts:Options"')
    plugin_site.add("acme", entries, manifest=manifest, parts=PARTS)
    args = {FIELDS[kind]: "mine", "skip_tokenizer_init": kind != "tokenizer"}
    llm = start(**args, plugin_options={"mine": {"level": 7}})
    import acme.parts

    assert acme.parts.SEEN[kind] == {"level": 7}
    assert len(tokens(llm)) == 4
    (resolution,) = [r for r in llm.llm_engine.plugins.resolutions if r.name == "mine"]
    assert (resolution.kind, resolution.options) == (kind, {"level": 7})
    start(**args)
    assert acme.parts.SEEN[kind] == {"level": 1}


def test_the_users_plugin_rules_apply_in_an_engine(plugin_site, start):
    plugin_site.add("acme", {"worker": {"mine": ".parts:MyWorker"}}, parts=PARTS)
    assert start(worker_cls="mine")
    for rule in ({"plugins_deny": ("worker:*@acme",)}, {"no_plugins": True}):
        with pytest.raises(PluginError, match=r"worker 'mine@acme' was requested, but it is den"):
            start(worker_cls="mine", **rule)
    path = plugin_site.path / "afternoon.py"
    path.write_text(PARTS)
    with pytest.raises(PluginError, match="--trust-local-code"):
        start(worker_cls=f"{path}:MyWorker")
    assert len(tokens(start(worker_cls=f"{path}:MyWorker", trust_local_code=True))) == 4


# --- reports -------------------------------------------------------------------------------


def test_the_error_of_an_explicitly_selected_plugin_contains_its_cause(plugin_site, start):
    plugin_site.add("acme", {"policy": {"bad": ".parts:Bad"}}, parts="1 / 0\n")
    for reference in ("bad", "bad@acme"):
        with pytest.raises(PluginLoadError) as failure:
            start(scheduler_cls=reference)
        assert isinstance(failure.value.__cause__, ZeroDivisionError)


def test_a_plugin_that_prints_on_import_works_and_is_logged(plugin_site, start, capsys):
    entries = {"policy": {"loud": ".parts:MyPolicy"}}
    plugin_site.add("acme", entries, parts=f"print('hello')\n{PARTS}")
    llm = start(scheduler_cls="loud")
    notes = [note for resolution in llm.llm_engine.plugins.resolutions for note in resolution.notes]
    assert "Importing acme printed 'hello'." in notes
    assert capsys.readouterr().out == ""


def test_a_failed_automatic_plugin_is_skipped_and_the_engine_works(plugin_site, start, caplog):
    for name, rank, parts in (("bad", 9, "raise RuntimeError('no trunk')\n"), ("good", 8, PARTS)):
        entries = {"worker": {name: ".parts:MyWorker"}}
        manifest = entry("worker", name, rank=rank)
        plugin_site.add(f"dovetail-{name}", entries, manifest=manifest, parts=parts)
    with caplog.at_level(logging.WARNING):
        llm = start(worker_cls="auto")
    (warning,) = [
        record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING
    ]
    assert warning.startswith(
        "The worker bad@dovetail-bad is skipped in automatic selection: Cannot load"
    )
    assert llm.llm_engine.plugins.set_aside == (warning,)
    assert tokens(llm) == tokens(start())
    with pytest.raises(PluginLoadError, match="no trunk"):
        start(worker_cls="auto", plugins_strict=True)


def test_config_changes_of_a_platform_are_logged_with_name_and_reason(start):
    from dovetail.interfaces import ConfigPatch
    from dovetail_devkit.fakes.platform import FakePlatform

    class PlatformWithDefaults(FakePlatform):
        def defaults(self, config):
            changes = {
                "cache.gpu_memory_utilization": (0.5, "memory is shared"),
                "model.max_model_len": (32, "it is small"),
                "scheduler.max_num_seqs": (2, "the user said 4"),
            }
            return ConfigPatch(changes=changes)

    message = {c.field: c for c in start(platform=PlatformWithDefaults).llm_engine.config.explain()}
    change = message["cache.gpu_memory_utilization"]
    assert (change.before, change.after) == (None, 0.5)
    assert change.reason == "platform fake: memory is shared"
    assert "scheduler.max_num_seqs" not in message and "model.max_model_len" not in message


# --- calls in a step ----------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [False, True])
def test_steps_do_not_call_the_plugin_registry(start, monkeypatch, ahead):
    calls = []

    def counting(name, method):
        def call(*args, **kwargs):
            calls.append(name)
            return method(*args, **kwargs)

        return call

    for name, method in inspect.getmembers(PluginRegistry, inspect.isfunction):
        monkeypatch.setattr(PluginRegistry, name, counting(name, method))
    llm = start(async_scheduling=ahead, max_model_len=64)
    assert {"load", "resolve", "options_of", "bind_platform"} <= set(calls)
    engine, params = llm.llm_engine, SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
    calls.clear()
    engine.add_request("one", PROMPT, params)
    for _ in range(50):
        engine.step()
    assert engine.has_unfinished_requests() and calls == []
