"""Every installed plugin and every fake passes the suite of its kind."""

import pytest
from conformance.subjects import SPECIAL_CHECKPOINTS, SUBJECTS, check

from dovetail.plugin_kinds import KINDS
from dovetail.plugins import PluginRegistry
from dovetail_devkit import FAKES, SUITES, load_fake

REGISTRY = PluginRegistry()


def installed(*, for_devices):
    """Return the installed plugins, with or without a `verified` entry in their manifest."""
    return [
        pytest.param(
            kind,
            f"{candidates.name}@{candidates.distribution}",
            id=f"{kind}:{candidates.name}@{candidates.distribution}",
        )
        for kind in KINDS
        for candidates in REGISTRY.candidates(kind)
        if bool(REGISTRY.entry_of(candidates).verified) == for_devices
        and not (kind == "weight_loader" and candidates.name in SPECIAL_CHECKPOINTS)
    ]


INSTALLED, FOR_DEVICES = installed(for_devices=False), installed(for_devices=True)


@pytest.mark.costly
@pytest.mark.sampled(24)  # `make soak` and `make wheels` run more of them
@pytest.mark.parametrize(("kind", "reference"), INSTALLED)
def test_an_installed_plugin_meets_its_contract(kind, reference, tmp_path):
    check(kind, REGISTRY.load(kind, reference), tmp_path)


@pytest.mark.parametrize(("kind", "reference"), FOR_DEVICES)
def test_a_plugin_with_a_device_requirement_meets_its_contract_on_that_device(
    kind, reference, tmp_path
):
    """Without the device, the plugin's own tests use a fake device and the Triton interpreter."""
    check(kind, REGISTRY.load(kind, reference), tmp_path)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("kind", FAKES)
def test_a_fake_meets_its_contract(kind, tmp_path):
    loaded = REGISTRY.load(kind, load_fake(kind))
    check(kind, loaded, tmp_path)


def test_every_kind_has_a_suite_and_a_fake():
    assert set(SUITES) == set(FAKES) == set(SUBJECTS) == set(KINDS)


def test_at_least_one_plugin_of_each_main_kind_is_installed():
    kinds = {param.values[0] for param in INSTALLED}
    assert {"platform", "worker", "executor", "scheduler", "policy", "attention"} <= kinds
