"""`explain` selects the same plugin as the engine, for every kind of plugin."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from importlib.metadata import distributions

import pytest

from dovetail.errors import PluginError
from dovetail.interfaces import AttentionRequirements
from dovetail.plugins import PluginPolicy, PluginRegistry
from dovetail.plugins.selection import (
    FAILED,
    NOT_TRIED,
    REJECTED,
    SELECTED,
    USABLE,
    Criteria,
    choose,
    choose_attention,
    choose_platform,
    choose_scheduler,
    evaluate,
    explain,
)

PARTS = """
from dovetail.interfaces import (
    AttentionBackend, AttentionCapabilities, Ops, Platform, PlatformInfo, Policy, Probe,
)
from dovetail.scheduling import Scheduler

def yes():
    return Probe(usable=True)

def no():
    return Probe(usable=False, reasons=("no such chip", "no driver"))

def crash():
    raise OSError("the driver crashed")

class GoodPlatform(Platform):
    info = PlatformInfo(name="box", device_type="box")
    likes = {}
    @classmethod
    def probe(cls):
        return yes()
    def capabilities(self):
        return frozenset()
    def total_memory_bytes(self, local_rank=0):
        return 0
    def prefer(self, kind):
        return self.likes.get(kind, ())

class RankedPlatform(GoodPlatform):
    rank = 2

class ShyPlatform(RankedPlatform):
    automatic = False

class AbsentPlatform(RankedPlatform):
    @classmethod
    def probe(cls):
        return no()

class GoodOps(Ops):
    def rms_norm(self, x_TD, weight_D, eps): ...
    def add_rms_norm(self, x_TD, residual_TD, weight_D, eps): ...
    def rotary_embedding(self, q_THS, k_TKS, positions_T, cos_sin_PS): ...
    def silu_and_mul(self, x_T2D): ...

class OtherOps(GoodOps): device_types = frozenset({"other"})

class GoodAttention(AttentionBackend):
    name = "good"
    capabilities = AttentionCapabilities(dtypes=frozenset({"float32"}))
    @staticmethod
    def kv_cache_shape(num_blocks, spec): ...
    @staticmethod
    def create_builder(context): ...
    @staticmethod
    def create_layer(context): ...

class NarrowAttention(GoodAttention):
    capabilities = AttentionCapabilities(dtypes=frozenset({"float16"}), block_size_multiple=64)

class GoodPolicy(Policy): pass

class GoodScheduler(Scheduler): pass

class NotAPlugin: pass
"""
CLASSES = {
    "platform": ["GoodPlatform", "RankedPlatform", "ShyPlatform", "AbsentPlatform"],
    "ops": ["GoodOps", "OtherOps"],
    "attention": ["GoodAttention", "NarrowAttention"],
    "policy": ["GoodPolicy"],
    "scheduler": ["GoodScheduler"],
}
NAMES = ["a", "b", "nobody", *(f"{letter}{n}" for letter in "abcd" for n in range(4))]
ASK = AttentionRequirements(
    device_type="box",
    dtype="float32",
    kv_cache_dtype="float32",
    head_size=8,
    num_heads=2,
    num_kv_heads=1,
    block_size=16,
)


class FakeDistributions:
    """A directory on sys.path with fake distributions."""

    def __init__(self, folder, count_as_member):
        self.folder, self.count_as_member = folder, count_as_member
        self.parts = f"{folder.name.replace('-', '_')}_parts"
        (folder / f"{self.parts}.py").write_text(PARTS)

    def install(self, distribution, plugins, manifest=""):
        """Add a distribution. plugins: tuples of kind, name and class."""
        package = f"{self.parts}_{distribution.replace('-', '_')}"
        (self.folder / package).mkdir()
        if distribution.startswith("dovetail-"):
            self.count_as_member(distribution, package)
        # Each plugin has its own class, which identifies the selected one.
        classes = [
            f"class {kind}_{name}({cls}):\n    pass\n"
            for kind, name, cls in plugins
            if cls != "Missing"
        ]
        source = f"from {self.parts} import *\n{''.join(classes)}"
        (self.folder / package / "__init__.py").write_text(source)
        if manifest:
            (self.folder / package / "dovetail.toml").write_text(
                manifest.replace("PACKAGE", package)
            )
        info = self.folder / f"{distribution.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        metadata = f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n"
        (info / "METADATA").write_text(metadata)
        lines = [f"[dovetail.{k}]\n{name} = {package}:{k}_{name}\n" for k, name, _ in plugins]
        (info / "entry_points.txt").write_text("".join(lines))

    def registry(self, **policy):
        return PluginRegistry(
            policy=PluginPolicy(**policy), distributions=distributions(path=[str(self.folder)])
        )


@pytest.fixture
def world(tmp_path, monkeypatch, count_as_member):
    monkeypatch.syspath_prepend(str(tmp_path))
    created = FakeDistributions(tmp_path, count_as_member)
    yield created
    for name in [name for name in sys.modules if name.startswith(created.parts)]:
        del sys.modules[name]


def entry(kind, name, **values):
    lines = [f"{key} = {value!r}".replace("'", '"') for key, value in values.items()]
    return "\n".join(["[[plugin]]", f'kind = "{kind}"', f'name = "{name}"', *lines, ""])


def states(explanation):
    return {verdict.name: verdict.state for verdict in explanation.verdicts}


def reasons(explanation, name):
    (actual,) = [verdict for verdict in explanation.verdicts if verdict.name == name]
    return "; ".join((actual.standing, *actual.reasons))


# --- random plugins -----------------------------------------------------------------------------


def random_world(world, rng):
    """Install distributions with valid and invalid plugins. Return all names."""
    names = set()
    kind = rng.choice(["platform", "platform", "platform", "attention", "attention", *CLASSES])
    for number in range(rng.randint(1, 4)):
        own = rng.random() < 0.7
        distribution = f"{'dovetail-' if own else ''}d{number}"
        plugins, manifest = {}, []
        for _ in range(rng.randint(1, 5)):
            # Most names are distinct, because a name of two plugins is ambiguous.
            name = rng.choice("abcd") + (str(number) if rng.random() < 0.97 else "")
            plugins[kind, name] = rng.choice([*CLASSES[kind] * 6, "NotAPlugin", "Missing"])
        for kind, name in plugins:
            values = {}
            if rng.random() < 0.4:
                values["rank"] = rng.randint(-1, 3)
            if rng.random() < 0.15:
                values["probe"] = f"PACKAGE:{rng.choice(['yes', 'no', 'no', 'crash'])}"
            if rng.random() < 0.2:
                values["replaces"] = [f"{kind}:a{(n := rng.randint(0, 3))}@dovetail-d{n}"]
            if rng.random() < 0.05:
                values["api"] = ">=7"
            manifest.append(entry(kind, name, **values))
        if rng.random() < 0.05:
            manifest.append("nonsense = true\n")
        world.install(
            distribution, [(*key, cls) for key, cls in plugins.items()], "\n".join(manifest)
        )
        names |= set(plugins)
    return sorted(names)


def random_policy(rng):
    return {
        "allow": tuple(f"*:*@d{n}" for n in range(4) if rng.random() < 0.3),
        "deny": (f"*:{rng.choice('abcd')}*@*",) if rng.random() < 0.2 else (),
        "no_plugins": rng.random() < 0.1,
        "strict": rng.random() < 0.2,
    }


def random_criteria(world, kind, installed, rng):
    """Return random criteria of a user and a platform for one kind of plugin."""
    platform = __import__(world.parts).GoodPlatform()
    platform.likes = {kind: tuple(rng.sample(NAMES, rng.randint(0, 3)))}
    names = [name for its_kind, name in installed if its_kind == kind]
    choices = ["auto", "auto", "auto", rng.choice(names), f"{world.parts}:GoodOps"]
    if kind in ("scheduler", "policy"):
        choices = names
    return Criteria(
        references=(rng.choice(choices),),
        requirements=ASK if kind == "attention" else None,
        platform=None if kind == "platform" else platform,
    )


def selected(registry, kind, criteria):
    """Return the class that an engine uses, or the error that its start raises."""
    (reference,) = criteria.references
    try:
        if kind == "platform":
            return type(choose_platform(registry, reference))
        if kind == "attention":
            return choose_attention(registry, criteria.platform, reference, ASK)
        if kind in ("scheduler", "policy"):
            resolution = choose_scheduler(registry, reference)
            return resolution[kind == "policy"]
        return choose(registry, criteria.platform, kind, reference)
    except PluginError as error:
        return str(error)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("seed", range(60))
def test_the_explained_plugin_is_selected_and_each_rejection_has_a_reason(world, seed):
    rng = random.Random(seed)
    installed = random_world(world, rng)
    policy = random_policy(rng)
    for kind in sorted({kind for kind, _ in installed}):
        criteria = random_criteria(world, kind, installed, rng)
        registry = world.registry(**policy)
        explanation = explain(registry, kind, criteria)
        result = selected(world.registry(**policy), kind, criteria)
        winners = [item.cls for item in explanation.chosen]
        if isinstance(result, str):
            assert not winners and result == explanation.error
        else:
            assert winners == [result] * (result is not None) and not explanation.error
        for verdict in explanation.verdicts:
            assert verdict.state == SELECTED or (all(verdict.reasons) and verdict.reasons)
            assert verdict.rule or verdict.state in (SELECTED, USABLE)
        listed = [(verdict.name, verdict.distribution) for verdict in explanation.verdicts]
        everyone = {
            (candidate.name, candidate.distribution) for candidate in registry.candidates(kind)
        }
        assert len(listed) == len(set(listed)) and set(listed) >= everyone
        assert not registry.set_aside or all("broken" in item for item in registry.set_aside)


@pytest.mark.parametrize("seed", range(20))
def test_candidates_after_the_selected_candidate_are_not_checked(world, seed):
    rng = random.Random(seed)
    installed = random_world(world, rng)
    for kind in sorted({kind for kind, _ in installed} - {"platform"}):
        criteria = replace(random_criteria(world, kind, installed, rng), references=("auto",))
        lazy, eager = world.registry(), world.registry()
        seen = []
        for verdict in evaluate(lazy, kind, criteria):
            seen.append(verdict)
            if verdict.state == SELECTED or verdict.is_fatal:
                break
        every = list(evaluate(eager, kind, criteria))
        assert [item.facts() for item in seen] == [item.facts() for item in every[: len(seen)]]
        assert len(lazy.resolutions) <= len(seen)
        assert [item.state for item in every].count(SELECTED) <= 1


# --- reasons ----------------------------------------------------------------------------------


def test_every_candidate_is_listed_in_order_with_its_reason(world):
    world.install(
        "dovetail-a",
        [
            ("attention", "narrow", "NarrowAttention"),
            ("attention", "good", "GoodAttention"),
            ("attention", "spare", "GoodAttention"),
            ("attention", "absent", "GoodAttention"),
            ("attention", "gone", "Missing"),
        ],
        entry("attention", "absent", probe="PACKAGE:no", rank=9),
    )
    world.install("acme", [("attention", "mine", "GoodAttention")])
    world.install("rude", [("attention", "rude", "GoodAttention")])
    registry = world.registry(deny=("*:*@rude",))
    platform = __import__(world.parts).GoodPlatform()
    platform.likes = {"attention": ("gone", "narrow", "good")}
    criteria = Criteria(references=("auto",), requirements=ASK, platform=platform)
    explanation = explain(registry, "attention", criteria)
    assert states(explanation) == {
        "gone": FAILED,
        "narrow": REJECTED,
        "good": SELECTED,
        "absent": REJECTED,
        "spare": USABLE,
        "mine": NOT_TRIED,
        "rude": NOT_TRIED,
    }
    assert [verdict.place for verdict in explanation.verdicts] == [1, 2, 3, 4, 5, 0, 0]
    assert "preferred by the platform box" in reasons(explanation, "good")
    assert "dtype float32 is not supported; supported: float16" in reasons(explanation, "narrow")
    assert "multiples of 64" in reasons(explanation, "narrow")
    assert "no such chip; no driver" in reasons(explanation, "absent")
    assert "good has precedence" in reasons(explanation, "spare")
    assert "has no attribute 'attention_gone'" in reasons(explanation, "gone")
    assert "plugins_allow=attention:mine@acme" in reasons(explanation, "mine")
    assert "'*:*@rude'" in reasons(explanation, "rude")


def test_plugins_that_cannot_be_selected_are_not_imported(world):
    world.install("dovetail-a", [("ops", "good", "GoodOps")])
    world.install("acme", [("ops", "mine", "GoodOps")])
    explain(world.registry(), "ops", Criteria(references=("auto",)))
    explain(world.registry(), "ops", Criteria(references=("good",)))
    assert f"{world.parts}_acme" not in sys.modules


def test_the_explanation_of_a_replaced_plugin_names_the_replacement(world):
    world.install("dovetail-a", [("ops", "good", "GoodOps")])
    replaces = entry("ops", "mine", replaces=["ops:good@dovetail-a"])
    world.install("acme", [("ops", "mine", "GoodOps")], replaces)
    registry = world.registry(allow=("ops:*@acme",))
    explanation = explain(registry, "ops", Criteria(references=("auto",)))
    assert states(explanation) == {"mine": SELECTED, "good": NOT_TRIED}
    assert "replaced by mine@acme" in reasons(explanation, "good")
    assert "allowed by plugins_allow" in reasons(explanation, "mine")


def test_no_platform_is_selected_if_a_probe_fails(world):
    world.install(
        "dovetail-a",
        [("platform", "good", "GoodPlatform"), ("platform", "odd", "GoodPlatform")],
        entry("platform", "odd", probe="PACKAGE:crash"),
    )
    explanation = explain(world.registry(), "platform", Criteria(references=("auto",)))
    assert not explanation.chosen
    assert "the driver crashed" in explanation.error
    assert states(explanation) == {"good": USABLE, "odd": FAILED}


def test_explain_reports_an_ambiguous_plugin_name_as_rejected(world):
    for owner in ("acme", "bolt"):
        world.install(owner, [("policy", "twin", "GoodPolicy"), ("ops", "twin", "GoodOps")])
    for kind in ("policy", "ops"):
        explanation = explain(world.registry(), kind, Criteria(references=("twin",)))
        assert "twin@acme or twin@bolt" in explanation.error
        assert states(explanation) == {"twin": REJECTED}
