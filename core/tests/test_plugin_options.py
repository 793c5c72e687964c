"""Plugin options are checked with the plugin's options model and passed to it."""

import sys

import pytest

from dovetail import LLM
from dovetail.errors import ConfigError, ContractError
from dovetail.interfaces import Policy, SchedulerInterface
from dovetail.plugins import PluginRegistry
from dovetail.plugins.construction import construct
from dovetail.plugins.selection import choose
from dovetail_devkit import FAKES
from dovetail_devkit.contexts import SMALL_ENGINE, write_fake_config
from dovetail_devkit.fakes.platform import FakePlatform

FAKE_PARTS = {
    "platform": FAKES["platform"],
    "worker_cls": FAKES["worker"],
    "skip_tokenizer_init": True,
}
PARTS = """
from dovetail.interfaces import Policy
from dovetail.scheduling import Scheduler

class Fair(Policy):
    def __init__(self, options=None):
        self.options = options

class Whole(Scheduler):
    pass
"""
MODEL = """
from pydantic import BaseModel, Field

class FairOptions(BaseModel):
    weight: float = Field(default=1.0, ge=0)
    tenants: list[str] = []
    window_s: int = 60
"""
MANIFEST = """
[[plugin]]
kind = "policy"
name = "fair"
options = "acme.model:FairOptions"
[[plugin]]
kind = "scheduler"
name = "whole"
"""
ENTRIES = {"policy": {"fair": ".parts:Fair"}, "scheduler": {"whole": ".parts:Whole"}}


@pytest.fixture
def acme(plugin_site):
    """Return a registry with a policy and the given options of this policy."""
    plugin_site.add("acme", ENTRIES, manifest=MANIFEST, parts=PARTS, model=MODEL)
    return lambda **arguments: plugin_site.registry(options=arguments)


def rejection(registry, reference="fair", kind="policy", error=ConfigError):
    with pytest.raises(error) as caught:
        registry.load(kind, reference)
    return str(caught.value)


def test_plugin_options_are_checked_filled_with_defaults_frozen_and_recorded(acme):
    kwargs = {"weight": 2, "tenants": ["a"]}
    registry = acme(fair=kwargs)
    fair = registry.load("policy", "fair")
    options = registry.options_of("policy", fair)
    assert options == {"weight": 2.0, "tenants": ("a",), "window_s": 60}
    assert type(options["weight"]) is float
    with pytest.raises(TypeError, match="frozen"):
        options["weight"] = 3
    assert registry.resolutions[0].options == options
    assert construct("policy", fair, options=options).options == options


@pytest.mark.parametrize("key", ["fair", "policy:fair", "acme.parts:Fair"])
def test_plugin_options_can_be_given_under_any_name_of_the_plugin(acme, key):
    registry = acme(**{key: {"window_s": 5}})
    registry.check_option_names([])
    fair = registry.load("policy", "fair")
    assert registry.options_of("policy", fair)["window_s"] == 5


def test_a_plugin_without_given_options_uses_the_defaults(acme):
    registry = acme()
    fair = registry.load("policy", "fair")
    assert registry.options_of("policy", fair) == {"weight": 1.0, "tenants": (), "window_s": 60}
    assert registry.options_of("policy", Policy) == registry.options_of("policy", None) == {}


def test_an_unknown_plugin_option_is_reported_with_the_nearest_name(acme):
    message = rejection(acme(fair={"wieght": 2}))
    assert "the policy 'fair' of acme 1.0 has no option 'wieght'. Did you mean 'weight'?" in message
    assert "Options: weight, tenants, window_s." in message


def test_an_invalid_option_value_is_reported_with_the_remedy(acme):
    message = rejection(acme(fair={"weight": -1, "window_s": "soon"}))
    assert "options of the policy 'fair' of acme 1.0 are invalid" in message
    assert "weight=-1: Input should be greater than or equal to 0" in message
    assert "window_s='soon': " in message


def test_an_unknown_plugin_is_reported_with_the_nearest_name(acme):
    registry = acme(fiar={"weight": 2})
    with pytest.raises(ConfigError, match=r"no plugin 'fiar'\. Did you mean 'fair'\?"):
        registry.check_option_names([])
    assert "acme" not in sys.modules


def test_a_plugin_selected_by_class_can_have_options(acme):
    registry = acme(Fair={}, **{"acme.other:Fair": {}})
    with pytest.raises(ConfigError, match="no plugin 'Fair'"):
        registry.check_option_names([])
    registry.check_option_names([("policy", "acme.other:Fair")])


def test_plugin_options_must_be_a_mapping(acme):
    with pytest.raises(ConfigError, match="'fair' is 3; write its options as a mapping"):
        acme(fair=3).check_option_names([])
    with pytest.raises(ConfigError, match="'fair' has the option 1, which is not a string"):
        acme(fair={1: 2}).check_option_names([])


def test_plugin_options_that_are_nested_too_deeply_are_rejected(acme):
    nested = []
    for _ in range(sys.getrecursionlimit()):
        nested = [nested]
    with pytest.raises(ConfigError, match="plugin_options: the options are nested too deeply"):
        acme(fair={"weight": nested})


def test_plugin_options_given_under_two_names_of_one_plugin_are_rejected(acme):
    message = rejection(acme(**{"fair": {"weight": 1}, "policy:fair": {"weight": 2}}))
    assert "'fair' and 'policy:fair' name the same plugin; use only one key" in message


def test_options_of_a_plugin_without_options_are_rejected(acme):
    message = rejection(acme(whole={"x": 1}), "whole", "scheduler")
    assert "the scheduler 'whole' of acme 1.0 takes no options, but {'x': 1} were given" in message


def test_options_for_a_name_of_two_kinds_must_be_qualified_if_both_have_options(plugin_site):
    entries = {"policy": {"fair": ".parts:Fair"}, "scheduler": {"fair": ".parts:Whole"}}
    manifest = MANIFEST.replace('"whole"', '"fair"')
    both = manifest + 'options = "acme.model:FairOptions"\n'
    plugin_site.add("acme", entries, manifest=both, parts=PARTS, model=MODEL)
    registry = plugin_site.registry(options={"fair": {"weight": 2}})
    with pytest.raises(ConfigError, match="write 'scheduler:fair' or 'policy:fair'"):
        registry.check_option_names([])
    registry = plugin_site.registry(options={"policy:fair": {"weight": 2}})
    registry.check_option_names([])
    fair, whole = (registry.load(kind, "fair") for kind in ("policy", "scheduler"))
    assert registry.options_of("policy", fair)["weight"] == 2.0
    assert registry.options_of("scheduler", whole)["weight"] == 1.0


def test_options_for_a_name_of_two_kinds_go_to_the_kind_that_has_options(plugin_site):
    entries = {"policy": {"fair": ".parts:Fair"}, "scheduler": {"fair": ".parts:Whole"}}
    manifest = MANIFEST.replace('"whole"', '"fair"')
    plugin_site.add("acme", entries, manifest=manifest, parts=PARTS, model=MODEL)
    registry = plugin_site.registry(options={"fair": {"weight": 2}})
    registry.check_option_names([])
    whole = registry.load("scheduler", "fair")
    assert issubclass(whole, SchedulerInterface)
    assert registry.options_of("scheduler", whole) == {}


def test_a_class_can_declare_its_options_model():
    from pydantic import BaseModel

    class Options(BaseModel):
        depth: int = 1

    class PolicyWithOptions(Policy):
        options_model = Options

    name = PolicyWithOptions.__qualname__
    registry = PluginRegistry(distributions=[], options={name: {"depth": 4}})
    assert registry.options_of("policy", registry.load("policy", PolicyWithOptions)) == {"depth": 4}
    registry = PluginRegistry(distributions=[], options={name: {"death": 4}})
    assert "Did you mean 'depth'?" in rejection(registry, PolicyWithOptions)


def test_without_an_options_model_options_are_passed_by_the_context_only():
    class PolicyWithOptions(Policy):
        pass

    registry = PluginRegistry(
        distributions=[], options={PolicyWithOptions.__qualname__: {"depth": 4}}
    )
    assert "takes no options" in rejection(registry, PolicyWithOptions)

    from dovetail.scheduling import Scheduler

    class Whole(Scheduler):
        pass

    registry = PluginRegistry(distributions=[], options={Whole.__qualname__: {"depth": 4}})
    assert registry.options_of("scheduler", registry.load("scheduler", Whole)) == {"depth": 4}


@pytest.mark.parametrize(
    ("model", "message"),
    [("int", "not a pydantic model"), ("Gone", "has no attribute 'Gone'"), ("3", "")],
)
def test_an_invalid_options_model_is_reported_as_a_plugin_error(plugin_site, model, message):
    manifest = f'[[plugin]]\nkind = "policy"\nname = "fair"\noptions = "acme.model:{model}"\n'
    entries = {"policy": {"fair": ".parts:Fair"}}
    source = "int = int\n"
    plugin_site.add("acme", entries, manifest=manifest, parts=PARTS, model=source)
    error = ContractError if model == "int" else ImportError
    assert message in rejection(plugin_site.registry(), error=error)


def test_options_of_an_installed_plugin_that_is_not_selected_are_rejected(plugin_site):
    parts = "from dovetail_devkit.fakes.ops import FakeOps\nclass Alpha(FakeOps): pass\n"
    entries = {"ops": {"alpha": ".parts:Alpha", "beta": ".parts:Alpha"}}
    plugin_site.add("dovetail-a", entries, parts=parts)
    for key in ("beta", "ops:beta"):
        registry = plugin_site.registry(options={key: {"tile": 4}})
        registry.check_option_names([])
        with pytest.raises(
            ConfigError, match=rf"'{key}' has options, but the ops in use is 'alpha'"
        ):
            choose(registry, FakePlatform(), "ops", "auto")
        with pytest.raises(ConfigError, match="or select the plugin with ops"):
            choose(registry, FakePlatform(), "ops", "alpha")


@pytest.mark.parametrize(
    ("key", "chosen", "message"),
    [
        ("jsonl", {}, "'jsonl' has options, but"),
        (
            "stat_logger:jsonl",
            {},
            "no stat_logger plugin is in use. Remove 'stat_logger:jsonl' from",
        ),
        ("priority", {"scheduler_cls": "fcfs"}, "the policy in use is 'fcfs'.*with scheduler_cls"),
        ("ByteTokenizer", {}, "there is no plugin 'ByteTokenizer'"),
    ],
)
def test_an_engine_rejects_options_of_plugins_that_it_does_not_use(tmp_path, key, chosen, message):
    options = {**SMALL_ENGINE, **FAKE_PARTS, **chosen, "plugin_options": {key: {"path": "x"}}}
    with pytest.raises(ConfigError, match=f"plugin_options: .*{message}"):
        LLM(write_fake_config(tmp_path), **options)
