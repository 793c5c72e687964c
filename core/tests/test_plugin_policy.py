"""Plugin selection: the user's rules, precedence and replacement."""

import sys

import pytest

from dovetail.config import EngineArgs
from dovetail.errors import ConfigError, PluginError
from dovetail.interfaces import Policy
from dovetail.plugins import PluginPolicy
from dovetail.plugins.selection import choose, choose_platform
from dovetail_devkit.contexts import write_fake_config
from dovetail_devkit.fakes.platform import FakePlatform

PARTS = """
from dovetail.interfaces import Platform, PlatformInfo, Policy, Probe

class Fair(Policy):
    pass

class Half(Policy):
    rank = None

class Box(Platform):
    info = PlatformInfo(name="box", device_type="box")
    @classmethod
    def probe(cls):
        return Probe(usable=True)
    def capabilities(self):
        return frozenset({"box.lid"})
    def total_memory_bytes(self, local_rank=0):
        return 1
"""


def entry(name, kind="policy", **more):
    lines = [f"{key} = {value}" for key, value in more.items()]
    return "\n".join(["[[plugin]]", f'kind = "{kind}"', f'name = "{name}"', *lines, ""])


def order(registry, *preferred):
    return [item.reference for item in registry.automatic("policy", preferred)]


def install(site, *names, **more):
    """Install distributions that each declare a policy of the same name.

    more: maps the name of a distribution to keys of its manifest.
    """
    for name in names:
        manifest = entry(name, **more[name]) if name in more else None
        site.add(name, {"policy": {name: ".parts:Fair"}}, manifest=manifest, parts=PARTS)


# --- rules --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "matches"),
    [
        ("policy:fair@acme", True),
        ("policy:*@acme", True),
        ("*:*@ac*", True),
        ("*:fair@*", True),
        ("policy:fair@ACME", True),
        ("policy:fair@acme-two", False),
        ("scheduler:fair@acme", False),
        ("policy:unfair@acme", False),
    ],
)
def test_a_plugin_rule_is_a_glob_pattern_of_kind_name_and_distribution(rule, matches):
    allowing, denying = PluginPolicy(allow=(rule,)), PluginPolicy(deny=(rule,))
    assert allowing.consents("policy", "fair", "acme") is matches
    message = denying.denial("policy", "fair", "acme", first_party=False)
    assert (message == f"the rule {rule!r} of plugins_deny") is matches


def test_distribution_names_in_plugin_rules_are_normalized():
    policy = PluginPolicy(deny=("*:*@My_Dist.x",))
    assert policy.denial("ops", "o", "my-dist-x", first_party=True)


@pytest.mark.parametrize("rule", ["acme", "policy:fair", "fair@acme", ":a@b", "policy:@b", "a:b@"])
def test_the_error_for_an_invalid_plugin_rule_names_the_option(tmp_path, rule):
    for option in ("plugins_allow", "plugins_deny"):
        with pytest.raises(
            ConfigError, match=rf"{option}: '.*' is not a valid rule\. Write kind:name@"
        ):
            EngineArgs(write_fake_config(tmp_path), **{option: [rule]}).create_engine_config()


def test_the_error_for_a_rule_with_an_unknown_kind_suggests_the_nearest_kind():
    with pytest.raises(ConfigError, match=r"unknown kind 'polcy'\. Did you mean 'policy'\?"):
        PluginPolicy(deny=("polcy:*@acme",))
    with pytest.raises(ConfigError, match="must be a list of rules"):
        from dovetail.config import PluginsConfig

        PluginsConfig(plugins_allow="policy:*@acme")


def test_engine_options_set_the_plugin_rules(tmp_path):
    kwargs = {
        "plugins_allow": ["policy:*@acme"],
        "plugins_deny": ("ops:*@*",),
        "no_plugins": True,
        "plugins_strict": True,
        "trust_local_code": True,
    }
    config = EngineArgs(write_fake_config(tmp_path), **kwargs).create_engine_config()
    assert PluginPolicy.of(config.plugins) == PluginPolicy(
        allow=("policy:*@acme",),
        deny=("ops:*@*",),
        no_plugins=True,
        strict=True,
        trust_local_code=True,
    )
    assert PluginPolicy.of(EngineArgs(tmp_path).create_engine_config().plugins) == PluginPolicy()
    with pytest.raises(AttributeError):
        PluginPolicy.of(config.plugins).strict = False


def test_plugin_rules_can_be_given_as_command_line_flags():
    from cyclopts import App

    from dovetail.cli.engine_options import EngineOptions, engine_args

    app, seen = App(result_action="return_value"), []

    @app.default
    def run(*, options: EngineOptions) -> None:
        seen.append(engine_args(options))

    words = "--plugins-deny policy:*@acme --plugins-deny ops:*@* --no-plugins --trust-local-code"
    app(["--options.model", "m", *words.replace("--", "--options.").split()])
    assert seen[0].plugins_deny == ("policy:*@acme", "ops:*@*") and seen[0].plugins_allow == ()
    assert seen[0].no_plugins and seen[0].trust_local_code and not seen[0].plugins_strict


# --- denial -------------------------------------------------------------------------------------


def test_the_error_for_a_denied_plugin_names_the_rule(plugin_site):
    install(plugin_site, "acme")
    registry = plugin_site.registry(policy=PluginPolicy(deny=("*:*@acme",)))
    for reference in ("acme", "acme@acme", "acme.parts:Fair", "acme.parts.Fair", "acme.parts:Half"):
        with pytest.raises(PluginError, match=r"denied by the rule '\*:\*@acme' of plugins_deny"):
            registry.load("policy", reference)
    assert "acme" not in sys.modules
    assert [candidate.name for candidate in registry.candidates("policy")] == ["acme"]


def test_a_denied_class_is_also_denied_as_an_object(plugin_site):
    install(plugin_site, "acme")
    fair = plugin_site.registry().load("policy", "acme")
    with pytest.raises(PluginError, match="no_plugins, which permits only first-party plugins"):
        plugin_site.registry(policy=PluginPolicy(no_plugins=True)).load("policy", fair)


def test_no_plugins_allows_first_party_plugins_only(plugin_site):
    install(plugin_site, "acme", "dovetail-a")
    registry = plugin_site.registry(policy=PluginPolicy(no_plugins=True, allow=("*:*@acme",)))
    assert order(registry, "acme", "dovetail-a") == ["dovetail-a@dovetail-a"]
    assert registry.load("policy", "dovetail-a").__name__ == "Fair"
    assert registry.load("policy", "dovetail.interfaces.policy:Policy") is Policy
    with pytest.raises(PluginError, match="no_plugins"):
        registry.load("policy", "acme")
    path = plugin_site.path / "afternoon.py"
    path.write_text(PARTS)
    trusting = PluginPolicy(no_plugins=True, trust_local_code=True)
    with pytest.raises(PluginError, match="no_plugins"):
        plugin_site.registry(policy=trusting).load("policy", f"{path}:Fair")


def test_plugins_deny_takes_precedence_over_plugins_allow(plugin_site):
    install(plugin_site, "acme")
    registry = plugin_site.registry(policy=PluginPolicy(allow=("*:*@*",), deny=("policy:*@acme",)))
    assert order(registry, "acme") == []


def test_a_denied_plugin_does_not_make_a_name_ambiguous(plugin_site):
    for name in ("acme", "rival"):
        plugin_site.add(name, {"policy": {"fair": ".parts:Fair"}}, parts=PARTS)
    with pytest.raises(PluginError, match=r"fair@acme or fair@rival, deny one with plugins_deny"):
        plugin_site.registry().resolve("policy", "fair")
    registry = plugin_site.registry(policy=PluginPolicy(deny=("*:*@rival",)))
    assert registry.resolve("policy", "fair").distribution == "acme"


# --- precedence ---------------------------------------------------------------------------------


def test_plugin_candidates_are_ordered_by_preference_rank_first_party_status_and_name(plugin_site):
    install(
        plugin_site,
        *("zeta", "acme", "aardvark", "dovetail-b", "dovetail-a", "dovetail-low"),
        **{"zeta": {"rank": 5}, "dovetail-low": {"rank": -1}},
    )
    registry = plugin_site.registry(policy=PluginPolicy(allow=("*:*@*",)))
    assert order(registry, "acme", "not-installed") == [
        "acme@acme",
        "zeta@zeta",
        "dovetail-a@dovetail-a",
        "dovetail-b@dovetail-b",
        "aardvark@aardvark",
        "dovetail-low@dovetail-low",
    ]
    assert sys.modules.keys().isdisjoint({"acme", "zeta", "dovetail_a"})


def test_a_third_party_plugin_is_a_candidate_if_preferred_or_allowed(plugin_site):
    install(plugin_site, "acme", "dovetail-a", acme={"rank": 100})
    assert order(plugin_site.registry()) == ["dovetail-a@dovetail-a"]
    assert order(plugin_site.registry(), "acme") == ["acme@acme", "dovetail-a@dovetail-a"]
    allowed = plugin_site.registry(policy=PluginPolicy(allow=("policy:acme@acme",)))
    assert order(allowed) == ["acme@acme", "dovetail-a@dovetail-a"]
    assert choose(allowed, FakePlatform(), "policy", "dovetail-a").__module__ == "dovetail_a.parts"


def test_two_automatic_candidates_of_the_same_name_are_an_error_that_lists_both(plugin_site):
    for name in ("acme", "rival", "other"):
        plugin_site.add(name, {"policy": {"fair": ".parts:Fair"}}, parts=PARTS)
    allow = ("*:*@acme", "*:*@rival")
    allowed = plugin_site.registry(policy=PluginPolicy(allow=allow))
    for preferred in ((), ("fair",)):
        with pytest.raises(PluginError, match=r"acme 1\.0 .*rival 1\.0"):
            allowed.automatic("policy", preferred)
    only = plugin_site.registry(policy=PluginPolicy(allow=allow, deny=("*:*@rival",)))
    assert order(only) == ["fair@acme"]


def test_the_rank_in_the_manifest_decides_between_platforms(plugin_site):
    for name, rank in (("dovetail-a", 1), ("dovetail-b", 2)):
        manifest = entry(name, kind="platform", rank=rank)
        targets = {"platform": {name: ".parts:Box"}}
        plugin_site.add(name, targets, manifest=manifest, parts=PARTS)
    platform = choose_platform(plugin_site.registry(), "auto")
    assert type(platform).__module__ == "dovetail_b.parts"


# --- replacing ----------------------------------------------------------------------------------

REPLACES = {"replaces": '["policy:fair@dovetail-a"]'}
CONSENT = PluginPolicy(allow=("policy:*@acme",))


def built_in_and_rival(site, rival="fair"):
    site.add("dovetail-a", {"policy": {"fair": ".parts:Fair"}}, parts=PARTS)
    manifest = entry(rival, **REPLACES)
    site.add("acme", {"policy": {rival: ".parts:Fair"}}, manifest=manifest, parts=PARTS)


def test_a_built_in_plugin_is_replaced_only_if_the_user_allows_it(plugin_site):
    built_in_and_rival(plugin_site)
    kept = plugin_site.registry().resolve("policy", "fair")
    assert kept.distribution == "dovetail-a" and "'fair@acme'" in kept.notes[0]
    registry = plugin_site.registry(policy=CONSENT)
    resolution = registry.resolve("policy", "fair")
    assert resolution.distribution == "acme"
    assert resolution.notes == ("It replaces fair@dovetail-a, as plugins_allow permits.",)
    assert registry.resolve("policy", "fair@dovetail-a").distribution == "dovetail-a"
    assert registry.resolve("policy", "dovetail_a.parts:Fair").distribution == "dovetail-a"
    assert order(registry) == order(registry, "fair") == ["fair@acme"]


def test_a_plugin_with_a_different_name_can_replace_a_built_in_plugin(plugin_site):
    built_in_and_rival(plugin_site, rival="turbo")
    assert plugin_site.registry().resolve("policy", "fair").distribution == "dovetail-a"
    registry = plugin_site.registry(policy=CONSENT)
    assert registry.resolve("policy", "fair").name == "turbo"
    assert order(registry, "fair") == ["turbo@acme"]


def test_a_denied_plugin_does_not_replace_other_plugins(plugin_site):
    built_in_and_rival(plugin_site)
    policy = PluginPolicy(allow=CONSENT.allow, deny=CONSENT.allow)
    assert (
        plugin_site.registry(policy=policy).resolve("policy", "fair").distribution == "dovetail-a"
    )


def test_a_plugin_with_a_broken_manifest_has_no_rank_and_replaces_no_plugin(plugin_site):
    plugin_site.add("dovetail-a", {"policy": {"fair": ".parts:Fair"}}, parts=PARTS)
    manifest = entry("turbo", rank=9, **REPLACES) + entry("polished", rank="'x'")
    entries = {"policy": {"turbo": ".parts:Fair", "polished": ".parts:Fair"}}
    plugin_site.add("acme", entries, manifest=manifest, parts=PARTS)
    registry = plugin_site.registry(policy=CONSENT)
    assert registry.resolve("policy", "fair").distribution == "dovetail-a"
    assert order(registry)[0] == "fair@dovetail-a"


def test_two_replacements_of_one_plugin_are_an_error(plugin_site):
    built_in_and_rival(plugin_site)
    manifest = entry("fair", **REPLACES)
    targets = {"policy": {"fair": ".parts:Fair"}}
    plugin_site.add("rival", targets, manifest=manifest, parts=PARTS)
    registry = plugin_site.registry(policy=PluginPolicy(allow=("*:*@*",)))
    with pytest.raises(PluginError, match=r"Write fair@acme or fair@rival"):
        registry.resolve("policy", "fair")
