"""Classes, options models and probes that raise, exit or return wrong values cause typed errors."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import pytest
from pydantic import BaseModel, field_validator, model_validator

from dovetail.config.engine_args import EngineArgs
from dovetail.errors import (
    ConfigError,
    ContractError,
    DovetailError,
    PluginError,
    PluginLoadError,
)
from dovetail.interfaces import AttentionCapabilities, Policy, Probe
from dovetail.plugins import PluginRegistry
from dovetail.plugins.admission import check_probe
from dovetail.plugins.construction import construct
from dovetail.plugins.contracts.checks import check_contract
from dovetail.plugins.contracts.declared import promises_equal_bits
from dovetail.plugins.platform_results import MAX_PREFERRED, check_info, preferred_names
from dovetail.plugins.selection import choose_scheduler
from dovetail_devkit import load_fake


class ConstantRankPolicy(Policy):
    def rank(self, request, view):
        return 0


class Exits(type(Policy)):
    def __getattr__(cls, name):
        raise SystemExit(7)


class Raises(type(Policy)):
    def __getattribute__(cls, name):
        if not name.startswith("__"):
            raise RuntimeError(f"no {name}")
        return super().__getattribute__(name)


class Equal(type(Policy)):
    def __eq__(cls, other):
        return True

    def __hash__(cls):
        return 1


class Descriptor:
    def __get__(self, instance, owner):
        raise SystemExit(4)


class ExitingOptions(BaseModel):
    count: int = 1

    @model_validator(mode="after")
    def check(self):
        raise SystemExit(5)


class RaisingOptions(BaseModel):
    count: int = 1

    @field_validator("count")
    @classmethod
    def check(cls, value):
        raise RuntimeError("validator")


class Hostile:
    """A container for hostile classes, because pytest inspects the classes of a module."""

    class ExitsMeta(ConstantRankPolicy, metaclass=Exits):
        pass

    class RaisesMeta(ConstantRankPolicy, metaclass=Raises):
        pass

    class EqualMeta(ConstantRankPolicy, metaclass=Equal):
        pass

    class ExitingField(ConstantRankPolicy):
        provides = Descriptor()

    class EndlessField(ConstantRankPolicy):
        provides = (str(item) for item in range(3))

    class WithExitingOptions(ConstantRankPolicy):
        options_model = ExitingOptions


class WithRaisingOptions(ConstantRankPolicy):
    options_model = RaisingOptions


@pytest.mark.parametrize("name", [name for name in vars(Hostile) if not name.startswith("__")])
def test_a_class_that_cannot_be_inspected_raises_a_typed_error_that_names_it(name):
    registry = PluginRegistry()
    with pytest.raises(PluginError, match=name):
        choose_scheduler(registry, f"{__name__}:Hostile.{name}")
    assert (
        registry.load("policy", ConstantRankPolicy) is ConstantRankPolicy
    )  # the other methods work


def test_the_error_for_an_options_validator_that_raises_names_the_plugin():
    registry = PluginRegistry(options={"WithRaisingOptions": {"count": 2}})
    with pytest.raises(DovetailError, match="WithRaisingOptions"):
        registry.load("policy", WithRaisingOptions)


def test_a_class_that_compares_equal_to_every_object_is_rejected_as_an_option():
    with pytest.raises(ConfigError, match=r"scheduler_cls.*__eq__"):
        EngineArgs(model="demo", scheduler_cls=Hostile.EqualMeta).create_engine_config()


def test_an_invalid_policy_is_rejected_by_the_policy_contract():
    class Wrong(Policy):
        def rank(self):
            return 0

    with pytest.raises(ContractError, match="contract of a policy") as caught:
        choose_scheduler(PluginRegistry(), Wrong)
    assert "add_request" not in str(caught.value)


def test_a_module_that_exits_on_attribute_access_raises_a_load_error(tmp_path, monkeypatch):
    (tmp_path / "exits_late.py").write_text(
        "import sys\ndef __getattr__(name):\n    if name == 'It': sys.exit(3)\n"
        "    raise AttributeError(name)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(PluginLoadError, match="exits_late"):
        PluginRegistry().load("policy", "exits_late:It")


@pytest.mark.parametrize("created", [None, 5, "text"])
def test_a_class_whose_constructor_returns_another_type_is_rejected(created):
    cls = type("Other", (ConstantRankPolicy,), {"__new__": lambda cls: created})
    with pytest.raises(ContractError, match="__new__"):
        construct("policy", cls)


def test_long_plugin_references_are_shortened_in_messages():
    for reference in ("x" * 100_000, "a:" + "b." * 50_000 + "c"):
        with pytest.raises(PluginError) as caught:
            PluginRegistry().load("policy", reference)
        assert len(str(caught.value)) < 400


# --- declared values --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["worker", "ops", "linear_method"])
@pytest.mark.parametrize("value", ["cpu", 5, None, ["cpu"], {5}, property(lambda self: 1 / 0)])
def test_device_types_must_be_a_set_of_names(kind, value):
    cls = type("Odd", (load_fake(kind),), {"device_types": value})
    with pytest.raises(ContractError, match="device_types"):
        check_contract(kind, cls)


@pytest.mark.parametrize("name", ["dtypes", "batch_invariant", "batch_dependent"])
@pytest.mark.parametrize("value", ["rms_norm", 5, ["rms_norm"], {5}, {("a",): 1}, None])
def test_the_declared_names_of_ops_must_be_sets_of_names(name, value):
    cls = type("Odd", (load_fake("ops"),), {name: value})
    with pytest.raises(ContractError, match=f"{name} is"):
        check_contract("ops", cls)


def test_operations_that_batch_invariance_covers_must_not_be_declared_batch_dependent():
    names = frozenset({"linear_attention", "rms_norm"})
    cls = type("Odd", (load_fake("ops"),), {"batch_dependent": names})
    with pytest.raises(ContractError, match="batch_dependent contains rms_norm"):
        check_contract("ops", cls)
    check_contract("ops", type("Good", (cls,), {"batch_dependent": names - {"rms_norm"}}))


@pytest.mark.parametrize("value", ["bfloat16", 5, ["bfloat16"], None])
def test_batch_invariant_must_be_a_set_of_dtypes(value):
    cls = type("Odd", (load_fake("linear_method"),), {"batch_invariant": value})
    with pytest.raises(ContractError, match="batch_invariant"):
        check_contract("linear_method", cls)


@pytest.mark.parametrize(
    "fields",
    [
        {"dtypes": ["float32"]},
        {"dtypes": None},
        {"features": "soft_cap"},
        {"kv_cache_dtypes": {1}},
        {"head_sizes": {"a"}},
        {"head_sizes": {0}},
        {"block_size_multiple": 0},
        {"block_size_multiple": 1.5},
    ],
    ids=str,
)
def test_declared_capabilities_of_wrong_types_are_rejected(fields):
    fake = load_fake("attention")
    check_contract("attention", fake)
    cls = type("Odd", (fake,), {"capabilities": replace(fake.capabilities, **fields)})
    with pytest.raises(ContractError, match=next(iter(fields))):
        check_contract("attention", cls)


@pytest.mark.parametrize("value", [5, None, {}, property(lambda self: 1 / 0)])
def test_a_platform_must_return_capabilities_of_the_right_type(value):
    cls = type("Odd", (load_fake("attention"),), {"capabilities": value})
    with pytest.raises(ContractError, match="AttentionCapabilities"):
        check_contract("attention", cls)


# --- return values ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "probe",
    [
        True,
        None,
        Probe(usable="yes"),
        Probe(usable=False, reasons="no driver"),
        Probe(usable=False, reasons=(5, None)),
        Probe(usable=False, reasons=5),
    ],
    ids=str,
)
def test_a_platform_probe_must_return_a_probe_object(probe):
    with pytest.raises(ContractError, match="probe of the thing"):
        check_probe("thing", probe)


class Iterates(tuple):
    def __iter__(self):
        raise SystemExit(8)


@pytest.mark.parametrize(
    "response",
    [
        5,
        None,
        "cpu",
        ("cpu", 5),
        (item for item in "a"),
        ["cpu"] * (MAX_PREFERRED + 1),
        Iterates(("cpu",)),
        {"cpu"},
        ("",),
        (":",),
    ],
    ids=range(10),
)
def test_the_preferences_of_a_platform_must_be_a_tuple_of_names(response):
    cls = type("Odd", (load_fake("platform"),), {"prefer": lambda self, kind: response})
    with pytest.raises(ContractError, match="prefer"):
        preferred_names(cls(), "worker")


@pytest.mark.parametrize(
    ("field", "value"),
    [("automatic", "maybe"), ("automatic", 1), ("rank", "high"), ("rank", True), ("info", 5)],
)
def test_platform_declarations_of_wrong_types_are_rejected(field, value):
    cls = type("Odd", (load_fake("platform"),), {field: value})
    with pytest.raises(ContractError, match=field):
        check_info(cls)


def test_a_plugin_name_with_unprintable_characters_is_rejected():
    fake = load_fake("platform")
    cls = type("Odd", (fake,), {"info": replace(fake.info, name="x\n\x1b[31m")})
    with pytest.raises(ContractError, match=r"info\.name"):
        check_info(cls)


# --- batch invariance ------------------------------------------------------------------------


class BatchInvariantAttention:
    capabilities: ClassVar = AttentionCapabilities(
        dtypes=frozenset({"bfloat16"}), features=frozenset({"batch_invariant"})
    )
    batch_invariant: ClassVar = frozenset({"bfloat16"})


class UndeclaredInvarianceAttention:
    capabilities: ClassVar = AttentionCapabilities(dtypes=frozenset({"bfloat16"}))
    batch_invariant: ClassVar = frozenset()


@pytest.mark.parametrize("kind", ["attention", "linear_method"])
def test_batch_invariance_is_declared_per_dtype(kind):
    assert promises_equal_bits(kind, BatchInvariantAttention, "bfloat16") is True
    assert promises_equal_bits(kind, BatchInvariantAttention, "float16") is False
    assert promises_equal_bits(kind, BatchInvariantAttention, "") is None
    assert promises_equal_bits(kind, UndeclaredInvarianceAttention, "") is False
    assert promises_equal_bits("model", BatchInvariantAttention, "bfloat16") is None
