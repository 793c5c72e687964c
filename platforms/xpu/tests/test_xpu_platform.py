"""The XPU platform on simulated machines."""

from dataclasses import replace

import pytest

from dovetail_devkit.suites.platform import check_platform
from dovetail_xpu.platform import Machine, XPUPlatform, reasons_against

MACHINE = Machine(torch_version="2.13.0", toolkit="20250301", has_loader=True, num_nodes=1)


def platform_on(machine):
    class Here(XPUPlatform):
        look = staticmethod(lambda: machine)

        def total_memory_bytes(self, local_rank=0):
            return 16 << 30  # only a torch built for XPU could report the memory

    return Here


def test_the_platform_meets_its_contract_with_and_without_an_xpu():
    check_platform(XPUPlatform)
    check_platform(platform_on(MACHINE))


@pytest.mark.parametrize(
    ("lack", "expected"),
    [
        ({"toolkit": ""}, "built without XPU"),
        ({"has_loader": False}, "Level Zero"),
        ({"num_nodes": 0}, "no XPU was found"),
    ],
)
def test_each_reason_why_an_xpu_is_unusable_is_reported(lack, expected):
    machine = replace(MACHINE, **lack)
    probe = platform_on(machine).probe()
    assert not probe.usable and len(probe.reasons) == 1 and expected in probe.reasons[0]


def test_a_machine_that_meets_all_requirements_is_usable():
    assert reasons_against(MACHINE) == ()
    assert platform_on(MACHINE).probe().usable
