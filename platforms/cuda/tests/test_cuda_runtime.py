"""Which devices a build of torch has code for."""

import pytest

from dovetail_cuda.runtime import has_code

WHEEL = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 9), (9, 0), (10, 3), (12, 0), (12, 1)])
def test_devices_that_are_served(capability):
    assert has_code(WHEEL, capability)


@pytest.mark.parametrize("capability", [(6, 0), (7, 0), (11, 0)])
def test_devices_that_are_not(capability):
    assert not has_code(WHEEL, capability)


def test_intermediate_code_serves_what_comes_later_and_lettered_code_only_its_own():
    assert has_code(["compute_80"], (9, 0)) and not has_code(["compute_80"], (7, 5))
    assert has_code(["sm_90a"], (9, 0)) and not has_code(["sm_100a"], (10, 3))
    assert not has_code([], (9, 0)) and not has_code(["gfx942"], (9, 0))
