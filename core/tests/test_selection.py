"""Selection of plugins from fake distributions in a temporary directory."""

import sys
from importlib.metadata import distributions

import pytest

from dovetail.errors import ContractError, PluginError, PluginLoadError, PluginNotFoundError
from dovetail.interfaces import AttentionRequirements
from dovetail.plugins import PluginRegistry
from dovetail.plugins.selection import (
    attention_refusals,
    choose,
    choose_attention,
    choose_platform,
    choose_scheduler,
)
from dovetail.scheduling import Scheduler

PARTS = """
from dovetail.interfaces import (
    AttentionBackend, AttentionCapabilities, Ops, Platform, PlatformInfo, Policy, Probe,
)
from dovetail.scheduling import Scheduler

class Box(Platform):
    info = PlatformInfo(name="box", device_type="box")
    likes = {}
    @classmethod
    def probe(cls):
        return Probe(usable=True)
    def capabilities(self):
        return frozenset()
    def total_memory_bytes(self, local_rank=0):
        return 0
    def prefer(self, kind):
        return self.likes.get(kind, ())

class Better(Box):
    info = PlatformInfo(name="better", device_type="box")
    rank = 5

class Absent(Better):
    info = PlatformInfo(name="absent", device_type="box")
    rank = 9
    @classmethod
    def probe(cls):
        return Probe(usable=False, reasons=("no such chip", "no driver"))

class Shy(Better):
    rank = 9
    automatic = False

class Broken(Box):
    @classmethod
    def probe(cls):
        raise OSError("the driver crashed")

class Alpha(Ops):
    def rms_norm(self, x_TD, weight_D, eps): ...
    def add_rms_norm(self, x_TD, residual_TD, weight_D, eps): ...
    def rotary_embedding(self, q_THS, k_TKS, positions_T, cos_sin_PS): ...
    def silu_and_mul(self, x_T2D): ...

class Beta(Alpha):
    pass

class Plain(AttentionBackend):
    name = "plain"
    capabilities = AttentionCapabilities(dtypes=frozenset({"float32"}), block_size_multiple=8)
    @staticmethod
    def kv_cache_shape(num_blocks, spec): ...
    @staticmethod
    def create_builder(context): ...
    @staticmethod
    def create_layer(context): ...

class Windowed(Plain):
    name = "windowed"
    capabilities = AttentionCapabilities(
        dtypes=frozenset({"float32"}), features=frozenset({"sliding_window"})
    )

class Unbuilt(Windowed):
    name = "unbuilt"
    @classmethod
    def refusals(cls, ask):
        return ["its library is not installed"]

class Mine(Policy):
    pass

class Whole(Scheduler):
    pass
"""


@pytest.fixture
def make(tmp_path, monkeypatch, count_as_member):
    """Make a registry. Each argument maps a distribution to the text of its entry_points.txt."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "parts.py").write_text(PARTS)

    def build(**entries):
        for name, text in entries.items():
            info = tmp_path / f"{name}-1.0.dist-info"
            info.mkdir()
            name = name.replace("_", "-")
            if name.startswith("dovetail-"):
                count_as_member(name, "parts")
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
            (info / "entry_points.txt").write_text(text)
        return PluginRegistry(distributions=distributions(path=[str(tmp_path)]))

    yield build
    sys.modules.pop("parts", None)


def section(kind, **targets):
    lines = "".join(f"{name} = parts:{target}\n" for name, target in targets.items())
    return f"[dovetail.{kind}]\n{lines}"


def box(**likes):
    import parts

    platform = parts.Box()
    platform.likes = likes
    return platform


# --- platforms --------------------------------------------------------------------------------


def test_the_usable_platform_with_the_highest_rank_is_selected(make):
    registry = make(dovetail_a=section("platform", box="Box", better="Better", absent="Absent"))
    assert choose_platform(registry, "auto").info.name == "better"


def test_a_platform_can_opt_out_of_automatic_selection(make):
    registry = make(dovetail_a=section("platform", box="Box", shy="Shy"))
    assert choose_platform(registry, "auto").info.name == "box"
    assert type(choose_platform(registry, "shy")).__name__ == "Shy"


def test_a_third_party_platform_is_selected_by_name_only(make):
    registry = make(dovetail_a=section("platform", box="Box"), acme=section("platform", b="Better"))
    assert choose_platform(registry, "auto").info.name == "box"
    assert choose_platform(registry, "b").info.name == "better"


def test_if_no_platform_is_usable_every_reason_is_reported(make):
    registry = make(
        dovetail_a=section("platform", absent="Absent"), acme=section("platform", b="Better")
    )
    with pytest.raises(PluginNotFoundError) as rejection:
        choose_platform(registry, "auto")
    assert "absent: no such chip; no driver" in str(rejection.value)
    assert "b: third-party plugins must be requested by name, or allowed with plugins_allow" in str(
        rejection.value
    )
    with pytest.raises(PluginNotFoundError, match="pip install dovetail-cpu"):
        choose_platform(PluginRegistry(distributions=[]), "auto")


def test_an_explicit_platform_that_cannot_be_used_is_rejected(make):
    registry = make(dovetail_a=section("platform", box="Box", absent="Absent"))
    with pytest.raises(PluginError, match=r"'absent' was requested.*no such chip; no driver"):
        choose_platform(registry, "absent")


def test_a_failed_probe_prevents_the_selection_of_another_platform(make):
    registry = make(dovetail_a=section("platform", box="Box", broken="Broken"))
    with pytest.raises(PluginLoadError, match="probe of the platform 'broken'") as failure:
        choose_platform(registry, "auto")
    assert "OSError: the driver crashed, in parts:Broken.probe" in str(failure.value)
    assert type(failure.value.__cause__) is OSError
    with pytest.raises(PluginLoadError, match="request another plugin by name"):
        choose_platform(registry, "broken")
    assert choose_platform(registry, "box").info.name == "box"


# --- other kinds -----------------------------------------------------------------------------


def test_the_users_option_overrides_the_platforms_preference(make):
    registry = make(dovetail_a=section("ops", alpha="Alpha", beta="Beta"))
    platform = box(ops=("beta", "alpha"))
    assert choose(registry, platform, "ops", "alpha").__name__ == "Alpha"
    assert choose(registry, platform, "ops", "auto").__name__ == "Beta"
    assert choose(registry, platform, "ops", "parts:Alpha").__name__ == "Alpha"


def test_a_preferred_plugin_that_is_not_installed_is_skipped(make):
    registry = make(dovetail_a=section("ops", alpha="Alpha", beta="Beta"))
    assert choose(registry, box(ops=("gamma", "alpha")), "ops", "auto").__name__ == "Alpha"


def test_without_a_preference_the_first_plugin_by_distribution_and_name_is_selected(make):
    registry = make(dovetail_b=section("ops", alpha="Alpha"), dovetail_a=section("ops", z="Beta"))
    assert choose(registry, box(), "ops", "auto").__name__ == "Beta"


def test_a_third_party_plugin_is_selected_automatically_only_if_preferred(make):
    registry = make(acme=section("ops", alpha="Alpha"))
    with pytest.raises(
        PluginNotFoundError, match=r"alpha: third-party plugins must be requested by name, or"
    ):
        choose(registry, box(), "ops", "auto")
    assert choose(registry, box(ops=("alpha",)), "ops", "auto").__name__ == "Alpha"
    assert choose(registry, box(ops=("alpha@acme",)), "ops", "auto").__name__ == "Alpha"


def test_an_unknown_explicit_plugin_is_not_replaced_by_a_preferred_plugin(make):
    registry = make(dovetail_a=section("ops", alpha="Alpha"))
    with pytest.raises(PluginNotFoundError, match=r"'alfa'.*Did you mean 'alpha'"):
        choose(registry, box(ops=("alpha",)), "ops", "alfa")


# --- schedulers and policies ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reference", "scheduler", "policy"),
    [
        ("whole", "Whole", None),
        ("parts:Whole", "Whole", None),
        ("mine", "Scheduler", "Mine"),
        ("parts:Mine", "Scheduler", "Mine"),
        ("parts.Mine", "Scheduler", "Mine"),
    ],
)
def test_scheduler_cls_accepts_a_policy(make, reference, scheduler, policy):
    registry = make(dovetail_a=section("scheduler", whole="Whole") + section("policy", mine="Mine"))
    resolution, ordered_by = choose_scheduler(registry, reference)
    assert resolution.__name__ == scheduler
    assert (ordered_by and ordered_by.__name__) == policy


def test_plugins_given_as_class_objects_are_used_directly(make):
    registry = make()
    import parts

    assert choose_scheduler(registry, parts.Whole) == (parts.Whole, None)
    assert choose_scheduler(registry, parts.Mine) == (Scheduler, parts.Mine)


def test_a_scheduler_takes_precedence_over_a_policy_of_the_same_name(make):
    registry = make(dovetail_a=section("scheduler", same="Whole") + section("policy", same="Mine"))
    assert choose_scheduler(registry, "same")[0].__name__ == "Whole"


def test_a_class_that_is_neither_scheduler_nor_policy_is_rejected(make):
    with pytest.raises(ContractError, match="contract of a scheduler"):
        choose_scheduler(make(), "parts:Alpha")


# --- attention --------------------------------------------------------------------------------


def requirements(**changes):
    fields = {"device_type": "box", "dtype": "float32", "kv_cache_dtype": "float32"}
    sizes = {"head_size": 8, "num_heads": 2, "num_kv_heads": 1, "block_size": 16}
    return AttentionRequirements(**(fields | sizes | changes))


WINDOW = frozenset({"sliding_window"})


def backends(make):
    names = {"plain": "Plain", "windowed": "Windowed", "unbuilt": "Unbuilt"}
    return make(dovetail_a=section("attention", **names))


def test_the_first_suitable_attention_backend_is_selected(make):
    registry, order = backends(make), ("unbuilt", "plain", "windowed")
    assert choose_attention(registry, box(attention=order), "auto", requirements()).name == "plain"
    needed = requirements(features=WINDOW)
    assert choose_attention(registry, box(attention=order), "auto", needed).name == "windowed"
    assert choose_attention(registry, box(), "auto", needed).name == "windowed"


def test_an_explicit_unsuitable_backend_is_rejected(make):
    with pytest.raises(PluginError, match=r"'plain' was requested .*: sliding_window is required"):
        choose_attention(backends(make), box(), "plain", requirements(features=WINDOW))


def test_if_no_backend_is_suitable_every_reason_is_reported(make):
    with pytest.raises(PluginNotFoundError) as rejection:
        choose_attention(backends(make), box(), "auto", requirements(dtype="float16", block_size=4))
    lines = str(rejection.value).splitlines()
    assert lines[1].startswith("  - plain: dtype float16 is not supported; supported: float32;")
    assert "multiples of 8" in lines[1]
    assert lines[2].startswith("  - unbuilt: ") and lines[2].endswith(
        "its library is not installed"
    )
    with pytest.raises(PluginNotFoundError, match="pip install dovetail-attn-torch"):
        choose_attention(PluginRegistry(distributions=[]), box(), "auto", requirements())


def test_a_third_party_backend_is_not_selected_automatically(make):
    registry = make(acme=section("attention", plain="Plain"))
    with pytest.raises(PluginNotFoundError):
        choose_attention(registry, box(), "auto", requirements())
    assert choose_attention(registry, box(), "plain", requirements()).name == "plain"
    assert (
        choose_attention(registry, box(attention=("plain",)), "auto", requirements()).name
        == "plain"
    )


def test_a_backend_is_rejected_for_missing_capabilities_or_by_its_own_check(make):
    backends(make)
    import parts

    reasons = attention_refusals(
        parts.Unbuilt, requirements(dtype="bfloat16", kv_cache_dtype="bfloat16")
    )
    assert len(reasons) == 2
