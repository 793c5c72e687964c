"""Requests are reordered for the attention backend, and results stay in plan order."""

import numpy as np
import pytest
import torch

from dovetail_devkit.attention.batch import check_batch
from dovetail_devkit.harnesses.late_device import late_parts
from dovetail_devkit.harnesses.runner_harness import (
    Backend,
    Builder,
    Model,
    Steps,
)
from dovetail_devkit.harnesses.runner_programs import NUM_BLOCKS, Program, play
from dovetail_torch.attention.run_order import first_tokens, in_order, run_order
from dovetail_torch.attention.workspace import AttentionWorkspace
from dovetail_torch.runner import device_inputs, input_batch

SIZE = 4


def backend_with(threshold):
    """Return a backend whose builder declares the threshold and checks each batch."""

    class Ordered(Builder):
        reorder_threshold = threshold

        def build(self, batch):
            check_batch(batch, SIZE, threshold=threshold)
            return super().build(batch)

    class OrderedBackend(Backend):
        @staticmethod
        def create_builder(context):
            Builder.seen = []
            return Ordered()

    return OrderedBackend


@pytest.mark.parametrize(
    ("counts", "thresholds", "order"),
    [
        ([7, 1, 3, 1], (1,), [1, 3, 0, 2]),
        ([7, 1, 3, 1], (3,), [1, 2, 3, 0]),
        ([7, 2, 3, 1, 9], (1, 2), [3, 1, 0, 2, 4]),
        ([1, 1, 5], (1,), None),
        ([7, 1, 3], (), None),
    ],
)
def test_requests_with_few_tokens_run_first_and_otherwise_the_plan_order_is_kept(
    counts, thresholds, order
):
    actual = run_order(np.array(counts), thresholds)
    assert order == (None if actual is None else actual.tolist())
    (ordered,) = in_order((np.array(counts),), actual)
    first_R1 = np.cumsum([0, *ordered])
    first_R = first_tokens(first_R1, actual).tolist()
    numbered = order or range(len(counts))
    assert [first_R[run] for run in numbered] == first_R1[:-1].tolist()


@pytest.mark.costly
@pytest.mark.parametrize("threshold", [1, 3])
@pytest.mark.parametrize("seed", range(3))
def test_random_plans_have_the_same_results_in_every_order(runner_of, seed, threshold):
    program = Program(seed, 40)
    expected = play(runner_of(Model(), Backend, num_blocks=NUM_BLOCKS), program)
    backend = backend_with(threshold)
    for parts, depth in ((None, 1), (late_parts(), 2)):
        options = () if parts is None else (parts,)
        runner = runner_of(Model(), backend, *options, num_blocks=NUM_BLOCKS)
        assert play(runner, program, depth) == expected
        batches = Builder.seen
        assert any(list(batch.query_lens) != sorted(batch.query_lens) for batch in batches)


@pytest.mark.parametrize("module", [input_batch, device_inputs])
def test_a_runner_that_keeps_the_order_of_the_plan_is_detected(runner_of, monkeypatch, module):
    monkeypatch.setattr(module, "run_order", lambda counts, thresholds: None)
    options = () if module is input_batch else (late_parts(),)
    runner = runner_of(Model(), backend_with(1), *options, num_blocks=NUM_BLOCKS)
    with pytest.raises(AssertionError, match="must precede all longer runs"):
        play(runner, Program(0, 40))


def test_the_reordered_batch_has_the_requests_of_the_plan(runner_of):
    model = Model()
    steps = Steps(runner_of(model, backend_with(1)))
    steps.join(0, [3, 1, 4, 1], [7, 2]).join(1, [8, 8, 2], [3, 4])
    steps.run((1, 0, 3, True))
    actual = steps.run((0, 0, 4, True), (1, 3, 1, True))
    assert actual == {0: model.answer([3, 1, 4, 1], 1)[0], 1: model.answer([8, 8, 2], 2)[1]}
    (batch,) = Builder.seen[-1:]
    assert list(batch.query_lens) == [1, 4] and list(batch.seq_lens) == [4, 4]


def test_builders_of_a_worker_share_their_workspace():
    workspace = AttentionWorkspace(torch.device("cpu"))
    first = workspace.take(64)
    assert not first.any() and workspace.take(32).data_ptr() == first.data_ptr()
    larger = workspace.take(128)
    assert larger.numel() == 128 and workspace.take(64).data_ptr() == larger.data_ptr()
