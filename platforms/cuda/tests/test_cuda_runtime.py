"""Which devices can run the code that a build of torch contains."""

import pytest
import torch

from dovetail_cuda.runtime import has_code
from dovetail_cuda.symmetric_all_reduce import ONE_SHOT, SymmetricAllReduce

WHEEL = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 9), (9, 0), (10, 3), (12, 0), (12, 1)])
def test_gpus_with_matching_compiled_code_are_supported(capability):
    assert has_code(WHEEL, capability)


@pytest.mark.parametrize("capability", [(6, 0), (7, 0), (11, 0)])
def test_gpus_without_matching_compiled_code_are_reported_as_unsupported(capability):
    assert not has_code(WHEEL, capability)


def test_ptx_code_runs_on_later_gpus_but_architecture_specific_code_runs_on_one():
    assert has_code(["compute_80"], (9, 0)) and not has_code(["compute_80"], (7, 5))
    assert has_code(["sm_90a"], (9, 0)) and not has_code(["sm_100a"], (10, 3))
    assert not has_code([], (9, 0)) and not has_code(["gfx942"], (9, 0))


def test_the_operator_for_the_small_all_reduce_has_the_expected_signature():
    assert str(torch.ops.symm_mem.one_shot_all_reduce.default._schema) == ONE_SHOT


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_the_small_all_reduce_without_a_device_is_rejected_with_the_reason():
    store = torch.distributed.HashStore()
    with pytest.raises(RuntimeError, match="SymmetricMemory does not support"):
        SymmetricAllReduce(store, rank=0, size=1, device=torch.device("cuda", 0))
