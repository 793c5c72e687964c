"""The suites for random sampling and step inputs detect faulty ops: each mutant has one fault."""

from array import array
from dataclasses import replace

import pytest
import torch

from dovetail.interfaces.ops import Ops
from dovetail.plan import NewRequest
from dovetail.sampling_params import SamplingParams
from dovetail_devkit.fakes.ops import FakeOps
from dovetail_devkit.ops.draw import NUM_DRAWS, chi_squared, draw_cases
from dovetail_devkit.ops.drawing_law import DrawParams, probabilities
from dovetail_devkit.ops.inputs import input_cases
from dovetail_devkit.suites.ops import ops_cases
from dovetail_torch.layers.torch_ops import TorchOps
from dovetail_torch.sampling import Sampler

HOST = torch.device("cpu")


def draws(change):
    """Return ops that apply `change` to the logits and columns, and then sample."""

    class Changed(FakeOps):
        def draw_tokens(self, logits_RV, columns):
            return super().draw_tokens(*change(logits_RV, columns))

    return Changed


def with_columns(**changes):
    """Return ops that sample after a change of some columns. changes: map of column name to
    function."""

    def change(logits_RV, columns):
        return logits_RV, replace(
            columns, **{k: f(getattr(columns, k)) for k, f in changes.items()}
        )

    return draws(change)


def is_truncated(columns, logits_RV):
    return (columns.top_k_R < logits_RV.shape[1]) & (columns.top_p_R < 1)


def with_top_p_first(logits_RV, columns):
    """Apply top-p to the whole row before top-k."""
    both = is_truncated(columns, logits_RV)
    for r in both.nonzero().flatten().tolist():
        row = (logits_RV[r].double() / columns.temperature_R[r]).softmax(-1)
        probs, order = row.sort(descending=True, stable=True)
        drop = order[(probs.cumsum(0) - probs) >= columns.top_p_R[r]]
        logits_RV[r, drop] = -torch.inf
    top_p_R = torch.where(both, 1.0, columns.top_p_R)
    return logits_RV, replace(columns, top_p_R=top_p_R)


def with_equals_kept(logits_RV, columns):
    """Apply top-k to distinct values instead of tokens."""
    top_k_R = columns.top_k_R.clone()
    for r, row in enumerate(logits_RV):
        minimum = row.topk(min(int(top_k_R[r]), len(row))).values[-1]
        top_k_R[r] = int((row >= minimum).sum())
    return logits_RV, replace(columns, top_k_R=top_k_R)


def with_temperature_last(logits_RV, columns):
    """Apply the temperature after top-k, top-p and min-p."""
    hot = columns.temperature_R > 0
    return logits_RV, replace(columns, temperature_R=hot.float())


class LastOfEquals(FakeOps):
    """Samples the last of several tokens with equal logits."""

    def draw_tokens(self, logits_RV, columns):
        last = logits_RV.shape[1] - 1
        return last - super().draw_tokens(logits_RV.flip(-1), columns)


class SeedsByRowIndex(FakeOps):
    """Uses the row's index in the batch as its seed."""

    def draw_tokens(self, logits_RV, columns):
        indexes = torch.arange(len(logits_RV))
        return super().draw_tokens(logits_RV, replace(columns, positions_R=indexes))


class UsesAGenerator(FakeOps):
    """Uses a stateful random generator."""

    drawn = 0

    def draw_tokens(self, logits_RV, columns):
        type(self).drawn += 1
        moved = columns.positions_R + self.drawn
        return super().draw_tokens(logits_RV, replace(columns, positions_R=moved))


class SpreadsNaN(FakeOps):
    """Spreads a NaN of one row to all rows."""

    def draw_tokens(self, logits_RV, columns):
        return super().draw_tokens(logits_RV + logits_RV.sum() * 0, columns)


class Int32(FakeOps):
    """Returns another dtype."""

    def draw_tokens(self, logits_RV, columns):
        return super().draw_tokens(logits_RV, columns).int()


class WritesToColumns(FakeOps):
    """Writes to the caller's columns."""

    def draw_tokens(self, logits_RV, columns):
        columns.positions_R.add_(1)
        return super().draw_tokens(logits_RV, columns)


class AlwaysGreedy(FakeOps):
    """Returns the most likely token instead of sampling."""

    def draw_tokens(self, logits_RV, columns):
        return self.best_tokens(logits_RV)


DRAWING = {
    "always the most likely token": AlwaysGreedy,
    "temperature after truncation": draws(with_temperature_last),
    "no min-p": with_columns(min_p_R=torch.zeros_like),
    "no top-p": with_columns(top_p_R=torch.ones_like),
    "k + 1 tokens": with_columns(top_k_R=lambda top_k_R: top_k_R + 1),
    "k - 1 tokens": with_columns(top_k_R=lambda top_k_R: (top_k_R - 1).clamp_min(1)),
    "top-p before top-k": draws(with_top_p_first),
    "k distinct values": draws(with_equals_kept),
    "last of equal tokens": LastOfEquals,
    "no seed": with_columns(seeds_R=torch.zeros_like),
    "32 bits of the seed": with_columns(seeds_R=lambda seeds_R: seeds_R & 0xFFFFFFFF),
    "no position": with_columns(positions_R=torch.zeros_like),
    "seeded by row index": SeedsByRowIndex,
    "stateful generator": UsesAGenerator,
    "NaN spreads to all rows": SpreadsNaN,
    "int32": Int32,
    "changes the columns": WritesToColumns,
}


def run(cases):
    for case in cases:
        case.run()


@pytest.mark.costly
@pytest.mark.parametrize("mutant", DRAWING.values(), ids=DRAWING)
def test_faulty_random_sampling_is_detected(mutant):
    with pytest.raises(AssertionError):
        run(draw_cases(mutant, HOST, dtypes=("float32",)))


class ReturnsLengths(FakeOps):
    """Returns the numbers of scheduled tokens instead of the rows."""

    def prepare_inputs(self, columns):
        super().prepare_inputs(columns)
        columns.seq_lens_R.sub_(columns.starts_R)


class IndexesRowsByRun(FakeOps):
    """Uses the position in the plan instead of the row."""

    def prepare_inputs(self, columns):
        counted = torch.arange(len(columns.rows_R), dtype=torch.int32)
        super().prepare_inputs(replace(columns, rows_R=counted))


class OneBlockSize(FakeOps):
    """Uses one block size for all groups."""

    def prepare_inputs(self, columns):
        sizes = (16,) * len(columns.block_sizes)
        super().prepare_inputs(replace(columns, block_sizes=sizes))


class WritesBeyondTheEnd(FakeOps):
    """Writes beyond the used part of buffers."""

    def prepare_inputs(self, columns):
        super().prepare_inputs(columns)
        longer = columns.positions_T.as_strided((columns.num_tokens + 1,), (1,))
        longer[-1] = 0


class KeepsTheCallersTables(FakeOps):
    """Does not copy the block tables."""

    def prepare_inputs(self, columns):
        created = tuple(table.clone() for table in columns.block_tables_RM)
        super().prepare_inputs(replace(columns, block_tables_RM=created))


class ChangesTheColumns(FakeOps):
    """Modifies the caller's columns."""

    def prepare_inputs(self, columns):
        super().prepare_inputs(columns)
        columns.starts_R.add_(1)


INPUTS = (
    ReturnsLengths,
    IndexesRowsByRun,
    OneBlockSize,
    WritesBeyondTheEnd,
    KeepsTheCallersTables,
    ChangesTheColumns,
)


@pytest.mark.parametrize("mutant", INPUTS)
def test_faulty_step_inputs_are_detected(mutant):
    with pytest.raises(AssertionError):
        run(input_cases(mutant, HOST))


def test_correct_step_inputs_pass():
    run(draw_cases(FakeOps, HOST, dtypes=("float32", "bfloat16"), num_draws=NUM_DRAWS))
    for right in (FakeOps, TorchOps):
        cases = list(input_cases(right, HOST))
        assert cases
        run(cases)


def test_the_suite_tests_only_the_operations_that_ops_override():
    class OneOperation(Ops):
        def silu_and_mul(self, x_T2D):
            return FakeOps().silu_and_mul(x_T2D)

    class Wrong(Ops):
        def silu_and_mul(self, x_T2D):
            return x_T2D.chunk(2, dim=-1)[0]

    cases = list(ops_cases(OneOperation, HOST, dtypes=("float32",)))
    assert [case.name for case in cases] == ["silu_and_mul in float32"]
    run(cases)
    with pytest.raises(AssertionError):
        run(ops_cases(Wrong, HOST, dtypes=("float32",)))
    assert not list(ops_cases(Ops, HOST))


def test_a_case_creates_the_provider_when_it_runs():
    class NeedsDevice(FakeOps):
        def __init__(self):
            raise AssertionError("there is no device")

    cases = list(ops_cases(NeedsDevice, HOST, dtypes=("float32",)))
    assert {"layer_norm in float32", "scale in float32"} <= {case.name for case in cases}
    for case in cases:
        with pytest.raises(AssertionError, match="there is no device"):
            case.run()


def test_the_chi_squared_statistic_has_the_expected_mean():
    assert chi_squared([25, 25, 50], [0.25, 0.25, 0.5]) == pytest.approx(-1.0)
    assert chi_squared([60, 40], [0.5, 0.5]) == pytest.approx((4 - 1) / 2**0.5)
    assert chi_squared([99, 1], [1.0, 0.0]) == float("inf")
    assert chi_squared([100, 0], [1.0, 0.0]) == 0.0


def request_of(settings):
    return NewRequest(
        request_id="one",
        row=0,
        generation=1,
        token_ids=array("i", [1, 2, 3]),
        num_prompt_tokens=3,
        sampling_params=SamplingParams(
            temperature=settings.temperature,
            top_k=settings.top_k,
            top_p=settings.top_p,
            min_p=settings.min_p,
        ),
        stop_token_ids=frozenset(),
        bad_words_token_ids=(),
        seed=5,
    )


@pytest.mark.parametrize(
    "settings",
    [
        DrawParams(temperature=0.0),
        DrawParams(temperature=0.6),
        DrawParams(temperature=1.7, min_p=0.07),
        DrawParams(top_k=5),
        DrawParams(top_p=0.77),
        DrawParams(temperature=2.5, top_k=9, top_p=0.66, min_p=0.03),
    ],
    ids=str,
)
@pytest.mark.parametrize("coarse", [False, True], ids=["different logits", "with equal logits"])
def test_sampled_tokens_have_the_distribution_of_the_torch_sampler(settings, coarse):
    logits = torch.randn(200, generator=torch.Generator().manual_seed(31)) * 2
    logits = logits.round() if coarse else logits
    sampler = Sampler(num_rows=1, vocab_size=200, device=HOST)
    sampler.join(request_of(settings))
    (actual,) = sampler.distribution(logits[None].clone(), [0])
    expected = torch.tensor(probabilities(logits.tolist(), settings))
    assert torch.allclose(actual, expected, atol=1e-6) and torch.equal(actual > 0, expected > 0)
