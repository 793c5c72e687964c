"""The host's time between two steps: its fit, and its effect on a simulated run."""

import random

import pytest
from lab_builders import TIMES, Recorded, request, setup, workload

from dovetail_lab.simulation.engine import RunLimits
from dovetail_lab.simulation.step_times import StepFeatures
from dovetail_lab.step_times.calibrated import CalibratedStepTimes
from dovetail_lab.step_times.calibration import MeasuredModel
from dovetail_lab.step_times.fitting import fit_steps
from dovetail_lab.step_times.profiling import make_calibration
from dovetail_lab.step_times.samples import StepSample


def true_gap_ns(num_runs, num_prefill_tokens):
    if not num_prefill_tokens:
        return 100_000 + 3_000 * num_runs
    return 250_000 + 5_000 * num_runs + 200 * num_prefill_tokens


def samples(*, with_prompts=True, seed=0):
    rng, steps = random.Random(seed), []
    for _ in range(400):
        decodes, prefills = rng.randint(1, 32), rng.choice([0, 1, 2]) if with_prompts else 0
        tokens = sum(rng.randint(2, 120) for _ in range(prefills))
        features = StepFeatures(tokens, prefills, decodes, 50 * decodes, 9 * tokens, 0, 0)
        gap_ns = true_gap_ns(decodes + prefills, tokens)
        duration_ns = 900_000 + 40_000 * tokens + 70_000 * decodes
        steps.append(StepSample(features=features, duration_ns=duration_ns, gap_ns=gap_ns))
    return steps


def model(steps):
    measured = MeasuredModel(name="made-up", config_digest="0" * 64)
    passes = [{"decodes": steps}, {"decodes": steps}]
    return CalibratedStepTimes(make_calibration(passes, setup(), measured, 0))


def test_the_gap_after_a_step_with_prefill_has_its_own_terms():
    calibrated = model(samples())
    for num_runs, num_prefill_tokens in [(1, 0), (16, 0), (32, 0), (4, 80), (20, 200)]:
        expected = true_gap_ns(num_runs, num_prefill_tokens)
        assert calibrated.gap_ns(num_runs, num_prefill_tokens) == pytest.approx(expected, rel=0.02)


def test_the_fit_preserves_the_sum_of_the_gaps_with_and_without_prefill():
    steps = [
        StepSample(features=item.features, duration_ns=item.duration_ns, gap_ns=gap_ns)
        for number, item in enumerate(samples(seed=1))
        for gap_ns in [item.gap_ns * (20 if number % 50 == 0 else 1)]  # rare long gaps
    ]
    calibrated = model(steps)
    for with_prompts in (False, True):
        chosen = [item for item in steps if bool(item.features.num_prefills) is with_prompts]
        modeled = sum(
            calibrated.gap_ns(
                item.features.num_prefills + item.features.num_decodes,
                item.features.num_prefill_tokens,
            )
            for item in chosen
        )
        assert modeled == pytest.approx(sum(item.gap_ns for item in chosen), rel=1e-3)


def test_the_gap_after_prefill_equals_that_after_decode_if_no_prefill_was_measured():
    fit = fit_steps(samples(with_prompts=False))
    assert fit.prefill_gap_ps == (*fit.gap_ps, 0) and fit.gap_ps[1] > 0


def test_the_clock_of_a_simulated_engine_advances_by_the_gap_of_each_step():
    class Gaps:
        name = "gaps"
        step_ns = TIMES.step_ns
        decode_times_ns = TIMES.decode_times_ns
        batch_change_ns = TIMES.batch_change_ns

        def gap_ns(self, num_runs, num_prefill_tokens=0):
            return 1_000_000 * num_runs + 1_000 * num_prefill_tokens

    load = workload(request(0, num_prompt_tokens=300, num_output_tokens=9))
    runs = [Recorded(load.requests, setup(), Gaps(), macro_steps=macro) for macro in (False, True)]
    single, macro = (run.run(RunLimits()) for run in runs)
    assert single.requests == macro.requests and single.end_ns == macro.end_ns
    starts = [plan[-2] for plan in runs[0].plans.values()]
    ends = [plan[-1] for plan in runs[0].plans.values()]
    gaps = [start - end for start, end in zip(starts[1:], ends, strict=False)]
    # The prompt is computed in two steps, of 256 and 44 tokens.
    assert gaps == [1_256_000, 1_044_000, *[1_000_000] * 7]
