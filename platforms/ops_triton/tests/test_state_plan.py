"""How the kernels of recurrent operations split the tokens of a step."""

from importlib.util import find_spec

import pytest
import torch

from dovetail.interfaces.ops import StateParts

if find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from dovetail_ops_triton.kernels.states.state_plan import CHUNK_SIZE, plan_states

CPU = torch.device("cpu")


def plan(*requests):
    """Return the plan of requests with parts of these sizes."""
    sizes = tuple(size for request in requests for size in request)
    blocks = torch.zeros(len(sizes), dtype=torch.int64)
    counts = tuple(map(len, requests))
    parts = StateParts(sizes=sizes, num_parts=counts, reads_N=blocks, writes_N=blocks)
    return plan_states(parts, CPU)


def test_a_plan_for_decodes_only_contains_no_lists():
    """A captured graph cannot copy lists from the host."""
    result = plan((1,), (1,), (1,))
    assert (result.num_singles, result.num_runs, result.num_chunks) == (3, 0, 0)
    assert result.singles_S2 is result.runs_R4 is result.ends_N is result.chunks_C4 is None


def test_chunks_end_at_the_ends_of_the_parts_of_a_request():
    size = CHUNK_SIZE
    result = plan((1,), (size + 2, 3), (1,), (1, 1))
    assert result.singles_S2.tolist() == [0, 0, size + 6, 3]
    assert result.runs_R4.tolist() == [1, 3, 0, 1, 4, 6, 3, size + 7]
    assert result.ends_N.tolist() == [1, size + 3, size + 6, size + 7, size + 8, size + 9]
    assert result.chunks_C4.view(-1, 4).tolist() == [
        [1, size, 1, 1],
        [size + 1, 2, 1, 1],
        [size + 3, 3, 1, 1],
        [size + 7, 1, size + 7, 4],
        [size + 8, 1, size + 7, 4],
    ]
    assert (result.num_singles, result.num_runs, result.num_chunks) == (2, 2, 5)


def test_a_request_with_two_segments_of_one_token_is_not_planned_as_a_decode():
    result = plan((1, 1))
    assert (result.num_singles, result.num_runs) == (0, 1)


def test_the_layers_of_a_step_share_a_plan():
    assert plan((3,), (1,)) is plan((3,), (1,))
    assert plan((3,), (1,)) is not plan((2,), (1,))
