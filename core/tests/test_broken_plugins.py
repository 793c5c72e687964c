"""Broken plugins: the error names the plugin and a remedy, and nothing else is affected.

A valid plugin is installed with each broken plugin. It still loads and works in an engine.
"""

import sys
from dataclasses import dataclass, field

import pytest

from dovetail import LLM, SamplingParams
from dovetail.errors import (
    ConfigError,
    ContractError,
    EngineDeadError,
    PluginError,
    PluginLoadError,
    PluginNotFoundError,
)
from dovetail_devkit.contexts import SMALL_ENGINE, write_fake_config

HEALTHY = """
from dovetail.interfaces import Policy

class LastFirst(Policy):
    def rank(self, request, view):
        return -request.sequence
"""
TOP = """
import sys
from dovetail.interfaces import Platform, PlatformInfo, Policy, Probe, WorkerBase
from dovetail.scheduling import Scheduler
from dovetail_devkit.fakes.platform import FakePlatform
from dovetail_devkit.fakes.worker import FakeWorker
"""
FAKES = {
    "platform": "dovetail_devkit.fakes.platform:FakePlatform",
    "worker_cls": "dovetail_devkit.fakes.worker:FakeWorker",
    "scheduler_cls": "dovetail.scheduling:Scheduler",
    "skip_tokenizer_init": True,
}
ENGINE = {**SMALL_ENGINE, **FAKES}
GREEDY = SamplingParams(max_tokens=4, temperature=0)
PROMPT = {"prompt_token_ids": [1, 2, 3]}
FIELDS = {"platform": "platform", "worker": "worker_cls", "scheduler": "scheduler_cls"}


@dataclass(kw_only=True)
class Broken:
    """A distribution `acme` with the `bad` plugin of class Bad, and the expected error.

    words: parts of the error message. entry: the declared target. args: engine options.
    others: additional distributions that declare `bad`.
    """

    id: str
    error: type
    words: tuple
    source: str = "class Bad(Policy):\n    pass\n"
    kind: str = "policy"
    entry: str = ".parts:Bad"
    manifest: str | None = None
    args: dict = field(default_factory=dict)
    others: tuple = ()

    def install(self, site):
        site.add("healthy", {"policy": {"good": ".parts:LastFirst"}}, parts=HEALTHY)
        for name in ("acme", *self.others):
            manifest = self.manifest if name == "acme" else None
            entries = {self.kind: {"bad": self.entry}}
            site.add(name, entries, manifest=manifest, parts=TOP + self.source)

    def use(self, model):
        """Start an engine with the plugin and run a prompt."""
        index = FIELDS.get(self.kind, "scheduler_cls")
        llm = LLM(model, **{**ENGINE, index: "bad", **self.args})
        try:
            return llm.generate([PROMPT], GREEDY, use_tqdm=False)
        finally:
            llm.shutdown()


def keys(**arguments):
    lines = ["[[plugin]]", 'kind = "policy"', 'name = "bad"']
    return "\n".join([*lines, *(f"{key} = {value}" for key, value in arguments.items())])


MODEL = "from pydantic import BaseModel\nclass Model(BaseModel):\n    weight: int = 1\n"
TAKES = MODEL + "class Bad(Policy):\n    def __init__(self, options=None):\n        pass\n"
OPTIONS = keys(options='"acme.parts:Model"')

BROKEN = [
    # --- the plugin cannot be imported
    Broken(
        id="raises_on_import",
        source="raise RuntimeError('no license')\n",
        error=PluginLoadError,
        words=("'bad' of acme 1.0", "RuntimeError: no license"),
    ),
    Broken(
        id="exits_on_import",
        source="sys.exit(3)\n",
        error=PluginLoadError,
        words=("'bad' of acme 1.0", "SystemExit: 3"),
    ),
    Broken(
        id="syntax_error",
        source="class Bad(:\n",
        error=PluginLoadError,
        words=("'bad' of acme 1.0", "SyntaxError"),
    ),
    Broken(
        id="missing_dependency",
        source="import library_that_is_gone\n",
        error=PluginLoadError,
        words=("Install 'library_that_is_gone', which the plugin needs",),
    ),
    Broken(
        id="missing_module",
        entry=".gone:Bad",
        error=PluginLoadError,
        words=("names module 'acme.gone'", "reinstall the distribution"),
    ),
    Broken(
        id="missing_attribute",
        entry=".parts:Bda",
        error=PluginLoadError,
        words=("no attribute 'Bda'. Did you mean 'Bad'?", "declares a class that does not exist"),
    ),
    Broken(
        id="entry_point_without_a_class",
        entry=".parts",
        error=PluginNotFoundError,
        words=("no scheduler plugin 'bad'", "Write a name, name@distribution"),
    ),
    # --- the plugin violates its contract
    Broken(
        id="not_a_class",
        source="Bad = 3\n",
        error=ContractError,
        words=("A policy must be a class", "3 is an int", "Specify a class"),
    ),
    Broken(
        id="wrong_signature",
        source="class Bad(Policy):\n    def rank(self, request):\n        return 0\n",
        error=ContractError,
        words=("contract of a policy", "rank: the method does not take 'view'"),
    ),
    Broken(
        id="missing_methods",
        kind="scheduler",
        source="class Bad:\n    def __init__(self, context):\n        pass\n",
        error=ContractError,
        words=("contract of a scheduler", "method schedule(self) is missing", "add_request"),
    ),
    Broken(
        id="wrong_api_in_the_manifest",
        manifest=keys(api='">=7,<8"'),
        error=ContractError,
        words=("requires version >=7,<8 of the policy contract", "Install a version of the plugin"),
    ),
    Broken(
        id="wrong_version_on_the_class",
        source="class Bad(Policy):\n    CONTRACT_VERSION = '7.0'\n",
        error=ContractError,
        words=("requires contract version 7.0, which is newer",),
    ),
    Broken(
        id="lies_about_its_kind",
        source="class Bad(Policy):\n    CONTRACT = 'worker'\n",
        error=ContractError,
        words=("declares CONTRACT = 'worker', but is used as a policy",),
    ),
    Broken(
        id="lies_about_capabilities",
        kind="worker",
        source="class Bad(FakeWorker):\n    provides = frozenset({'sleep'})\n",
        error=ContractError,
        words=(
            "claims capabilities without their methods",
            "it claims 'sleep': method wake_up",
            "remove the ids from",
        ),
    ),
    Broken(
        id="needs_what_is_not_there",
        manifest=keys(needs='["dtype.float4"]'),
        error=PluginError,
        words=("needs dtype.float4, which neither the core nor the platform 'fake'", "Choose"),
    ),
    # --- the manifest is invalid
    Broken(
        id="broken_manifest",
        manifest="[[plugin]\n",
        error=PluginLoadError,
        words=("the manifest of acme 1.0 is broken", "cannot be read", "Fix the manifest"),
    ),
    Broken(
        id="manifest_of_an_unknown_kind",
        manifest='[[plugin]]\nkind = "polcy"\nname = "bad"\n',
        error=PluginLoadError,
        words=("unknown kind. Did you mean 'policy'?", "Fix the manifest, or"),
    ),
    # --- the name is ambiguous or denied
    Broken(
        id="duplicate_name",
        others=("rival",),
        error=PluginError,
        words=("acme 1.0 (acme.parts:Bad), rival 1.0", "bad@acme or bad@rival, deny one with"),
    ),
    Broken(
        id="shadows_without_consent",
        others=("dovetail-built-in",),
        manifest=keys(replaces='["policy:bad@dovetail-built-in"]'),
        error=PluginError,
        words=("acme can replace the plugin of the same name", "plugins_allow=['policy:bad@acme']"),
    ),
    Broken(
        id="denied",
        args={"plugins_deny": ["*:*@acme"]},
        error=PluginError,
        words=("denied by the rule '*:*@acme' of plugins_deny", "Change the rule"),
    ),
    # --- the options are invalid
    Broken(
        id="bad_options",
        source=TAKES,
        manifest=OPTIONS,
        args={"plugin_options": {"bad": {"weight": "heavy"}}},
        error=ConfigError,
        words=("options of the policy 'bad' of acme 1.0 are invalid", "weight='heavy'"),
    ),
    Broken(
        id="unknown_option",
        source=TAKES,
        manifest=OPTIONS,
        args={"plugin_options": {"bad": {"wait": 1}}},
        error=ConfigError,
        words=("no option 'wait'. Did you mean 'weight'?", "Options: weight"),
    ),
    Broken(
        id="options_of_nobody",
        args={"plugin_options": {"bda": {}}},
        error=ConfigError,
        words=("no plugin 'bda'. Did you mean 'bad'?", "Use a plugin's name"),
    ),
    Broken(
        id="takes_no_options_but_names_a_model",
        source=MODEL + "class Bad(Policy):\n    pass\n",
        manifest=OPTIONS,
        error=PluginLoadError,
        words=("its constructor failed: TypeError", "options"),
    ),
    # --- the constructor or a method fails at startup
    Broken(
        id="raises_on_construction",
        kind="scheduler",
        source="class Bad(Scheduler):\n    def __init__(self, context):\n        {}['seats']\n",
        error=PluginLoadError,
        words=("scheduler acme.parts:Bad", "KeyError: 'seats', in acme.parts:Bad.__init__", "Fix"),
    ),
    Broken(
        id="exits_in_its_constructor",
        kind="worker",
        source="class Bad(FakeWorker):\n    def __init__(self, context):\n        sys.exit(1)\n",
        error=PluginLoadError,
        words=("worker acme.parts:Bad", "SystemExit: 1", "choose another plugin"),
    ),
    Broken(
        id="tries_to_change_the_config",
        kind="worker",
        source=(
            "class Bad(FakeWorker):\n"
            "    def __init__(self, context):\n"
            "        context.config.max_num_seqs = 1\n"
        ),
        error=PluginLoadError,
        words=("worker acme.parts:Bad", "its constructor failed", "ValidationError"),
    ),
    Broken(
        id="tries_to_change_the_options",
        kind="worker",
        source=(
            "class Bad(FakeWorker):\n"
            "    def __init__(self, context):\n"
            "        context.config.model.hf_config['x'] = 1\n"
        ),
        error=PluginLoadError,
        words=("worker acme.parts:Bad", "TypeError: this mapping is frozen"),
    ),
    Broken(
        id="raises_in_its_probe",
        kind="platform",
        source=(
            "class Bad(FakePlatform):\n"
            "    @classmethod\n"
            "    def probe(cls):\n"
            "        raise OSError('driver')\n"
        ),
        error=PluginLoadError,
        words=("probe of the platform 'bad' failed", "OSError: driver", "request another plugin"),
    ),
    Broken(
        id="raises_when_capabilities_are_read",
        kind="platform",
        source="class Bad(FakePlatform):\n    def capabilities(self):\n        return 1 / 0\n",
        error=PluginLoadError,
        words=(
            "platform 'fake' failed when the engine called it for its capabilities",
            "ZeroDivisionError",
        ),
    ),
    Broken(
        id="defaults_without_a_reason",
        kind="platform",
        source=(
            "from dovetail.interfaces import ConfigPatch\n"
            "class Bad(FakePlatform):\n"
            "    def defaults(self, config):\n"
            "        return ConfigPatch(changes={'cache.gpu_memory_utilization': (0.5, '')})\n"
        ),
        error=ContractError,
        words=(
            "platform 'fake' sets the default of cache.gpu_memory_utilization to",
            "it must be a tuple (value, reason)",
        ),
    ),
    # --- the plugin fails while the engine runs
    Broken(
        id="raises_when_a_step_is_settled",
        kind="scheduler",
        source="class Bad(Scheduler):\n    def update_from_output(self, *step):\n        1 / 0\n",
        error=EngineDeadError,
        words=(
            "ZeroDivisionError",
            "in acme.parts:Bad.update_from_output",
            "Create a new engine with another",
        ),
    ),
    Broken(
        id="raises_when_it_schedules",
        kind="scheduler",
        source="class Bad(Scheduler):\n    def schedule(self):\n        return self.none\n",
        error=EngineDeadError,
        words=("AttributeError", "in acme.parts:Bad.schedule", "Create a new engine with another"),
    ),
    Broken(
        id="raises_in_a_step",
        kind="worker",
        source="class Bad(FakeWorker):\n    def execute_model(self, plan):\n        1 / 0\n",
        error=EngineDeadError,
        words=("a step failed", "ZeroDivisionError"),
    ),
]


@pytest.fixture
def model(tmp_path):
    return write_fake_config(tmp_path)


def answer(model, **args):
    llm = LLM(model, **{**ENGINE, **args})
    try:
        (output,) = llm.generate([PROMPT], GREEDY, use_tqdm=False)
        return output.outputs[0].token_ids
    finally:
        llm.shutdown()


@pytest.mark.parametrize("case", BROKEN, ids=lambda case: case.id)
def test_the_error_for_a_broken_plugin_names_it_and_other_plugins_still_work(
    plugin_site, model, case
):
    case.install(plugin_site)
    with pytest.raises(case.error) as rejection:
        case.use(model)
    assert isinstance(rejection.value, case.error)
    for part in case.words:
        assert part in str(rejection.value), str(rejection.value)
    if case.error is PluginLoadError and "import" in case.id:
        assert not [name for name in sys.modules if name.partition(".")[0] == "acme"]
    registry = plugin_site.registry()
    assert registry.load("policy", "good").__name__ == "LastFirst"
    healthy = answer(model, scheduler_cls="good")
    assert healthy == answer(model) and len(healthy) == 4


@pytest.mark.parametrize(
    "hook", ["rank(self, request, view)", "on_output(self, request, num_tokens, view)"]
)
def test_a_policy_that_fails_while_it_runs_is_replaced(plugin_site, model, hook, caplog):
    source = f"class Bad(Policy):\n    def {hook}:\n        1 / 0\n"
    Broken(id="policy", source=source, error=EngineDeadError, words=()).install(plugin_site)
    assert answer(model, scheduler_cls="bad") == answer(model)
    assert [record.levelname for record in caplog.records].count("ERROR") == 1


def test_at_least_30_broken_plugins_are_tested():
    assert len({case.id for case in BROKEN}) == len(BROKEN) >= 30
