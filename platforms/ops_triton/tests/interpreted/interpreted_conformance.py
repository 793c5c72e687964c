"""Cases of the conformance suite for Triton's ops in the interpreter, with fewer samples."""

import pytest
import torch

from dovetail_devkit.suites.ops import ops_cases
from dovetail_ops_triton.ops import TritonOps

NUM_DRAWS = 60
CASES = tuple(ops_cases(TritonOps, torch.device("cpu"), num_draws=NUM_DRAWS))


@pytest.mark.sampled(16)
@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES])
def test_the_ops_pass_the_conformance_suite_in_the_triton_interpreter(case):
    case.run()
