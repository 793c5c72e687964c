"""The inputs of a step computed on the device equal the columns computed on the host."""

from array import array
from random import Random

import pytest
import torch

from dovetail.plan import NewRequest, StepBuilder
from dovetail.sampling_params import SamplingParams
from dovetail_devkit.harnesses.late_device import LateDevice
from dovetail_torch.layers.step_inputs import prepare_inputs
from dovetail_torch.runner.device_inputs import DeviceInputs
from dovetail_torch.runner.device_rows import DeviceRows
from dovetail_torch.runner.input_batch import InputGatherer, StepShape
from dovetail_torch.runner.request_rows import RequestRows
from dovetail_torch.runner.staging import Staging

HOST, NUM_ROWS, LONGEST = torch.device("cpu"), 5, 40


def both(block_sizes, thresholds=()):
    shape = {"num_rows": NUM_ROWS, "max_model_len": LONGEST, "block_sizes": block_sizes}
    step = StepShape(block_sizes=block_sizes, max_num_tokens=128, thresholds=thresholds)
    gatherer = InputGatherer(RequestRows(device=HOST, **shape), step)
    rows = DeviceRows(device=HOST, **shape)
    device = DeviceInputs(
        rows,
        Staging(HOST, LateDevice()),
        step,
        prepare_inputs=prepare_inputs,
        sampling_numbers=lambda rows: (),
    )
    return gatherer, device


class Plans:
    """Creates plans in which rows are reused, get several blocks in one step, and run in chunks."""

    def __init__(self, seed, block_sizes):
        self.rng, self.block_sizes = Random(seed), block_sizes
        self.builder = StepBuilder(num_groups=len(block_sizes))
        self.computed, self.generations = {}, [0] * NUM_ROWS

    def next(self):
        rng = self.rng
        for row in range(NUM_ROWS):
            if row not in self.computed or rng.random() < 0.2:
                self.join(row)
        for row in rng.sample(range(NUM_ROWS), rng.randrange(NUM_ROWS + 1)):
            start, end = self.computed[row]
            count = min(rng.choice((1, 1, 7)), end - start)
            if count:
                self.builder.run(row, start, count, samples=start + count == end)
                self.computed[row] = (start + count, end)
        return self.builder.build()

    def join(self, row):
        if row in self.computed:
            self.builder.leave(row)
        self.generations[row] += 1
        self.computed[row] = (0, self.rng.randrange(1, LONGEST))
        self.builder.join(new_request(row, self.generations[row], self.rng))
        for group, size in enumerate(self.block_sizes):
            blocks = [self.rng.randrange(1, 99) for _ in range(-(-LONGEST // size))]
            self.builder.grow(row, blocks[:1], group=group)
            self.builder.grow(row, blocks[1:], group=group)


def new_request(row, generation, rng):
    return NewRequest(
        request_id=f"{row}-{generation}",
        row=row,
        generation=generation,
        token_ids=array("i", [rng.randrange(1000) for _ in range(LONGEST)]),
        num_prompt_tokens=LONGEST,
        sampling_params=SamplingParams(),
        stop_token_ids=frozenset(),
        bad_words_token_ids=(),
        seed=0,
    )


@pytest.mark.parametrize("block_sizes", [(4,), (8, 5), ()])
@pytest.mark.parametrize(("seed", "thresholds"), [(1, ()), (2, (1,))])
def test_the_device_computes_the_same_columns_as_the_host(block_sizes, seed, thresholds):
    gatherer, device = both(block_sizes, thresholds)
    num_decodes = 0
    plans = Plans(seed, block_sizes)
    for _ in range(30):
        plan = plans.next()
        left, right = gatherer.take(plan), device.take(plan)
        assert (left is None) == (right is None) == plan.empty
        if left is None:
            continue
        num_decodes += set(plan.num_tokens) == {1}
        for name in ("input_ids_T", "positions_T", "last_S"):
            same(getattr(left, name), getattr(right, name))
        assert left.sampling_rows == right.sampling_rows
        assert left.sampling_runs.tolist() == right.sampling_runs.tolist()
        assert left.first_R.tolist() == right.first_R.tolist()
        for item, other in zip(left.attention, right.attention, strict=True):
            for name in ("query_start_R1", "seq_lens_R", "block_table_RM", "slot_mapping_T"):
                same(getattr(item, name), getattr(other, name))
            assert list(item.seq_lens) == list(other.seq_lens)
            assert list(item.query_lens) == list(other.query_lens)
            assert other.block_table_RM.is_contiguous()
        if left.sampling_rows:
            tokens = torch.arange(len(left.sampling_rows))
            gatherer.append(left, tokens)
            device.append(right, tokens.to(torch.int32))
    assert num_decodes
    assert torch.equal(gatherer._rows.token_ids_RL, device._rows.token_ids_RL[:NUM_ROWS])


def same(tensor, other):
    assert tensor.dtype == other.dtype and tensor.tolist() == other.tolist()


def test_a_row_cannot_be_reused_without_a_higher_generation():
    _, device = both((4,))
    for generation in (1, 1):
        builder = StepBuilder()
        builder.join(new_request(0, generation, Random(1)))
        if not device._rows.num_prompt_tokens[0]:
            device.take(builder.build())
    with pytest.raises(AssertionError, match="generation"):
        device.take(builder.build())
