"""Step-time models: linear, calibrated, roofline; their fit, their files and their options."""

import json
import random
from dataclasses import replace

import numpy as np
import pytest
from lab_builders import Recorded, random_workload, setup
from step_samples import TRUE_PS, calibration, samples

from dovetail.cli import main
from dovetail.errors import UserError
from dovetail_lab.simulation.engine import RunLimits
from dovetail_lab.simulation.previous_step import After
from dovetail_lab.simulation.step_times import StepFeatures
from dovetail_lab.step_times import references
from dovetail_lab.step_times.calibrated import CalibratedStepTimes
from dovetail_lab.step_times.calibration import MeasuredEngine, read_calibration
from dovetail_lab.step_times.fitting import (
    fit_steps,
    nonnegative_least_squares,
)
from dovetail_lab.step_times.machine_info import local_config
from dovetail_lab.step_times.profiling import model_quality
from dovetail_lab.step_times.references import StepTimeReference
from dovetail_lab.step_times.roofline import DeviceSheet, ModelSizes, RooflineStepTimes
from dovetail_lab.step_times.samples import StepSample

CONFIG = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}


def write(path, max_num_seqs=256, **changes):
    """Write a calibration file with changed fields."""
    fields = calibration(max_num_seqs=max_num_seqs).model_dump(mode="json")
    path.write_text(json.dumps(fields | changes))
    return path


# --- the fit --------------------------------------------------------------------------------------


def test_the_fit_recovers_the_terms_of_noise_free_step_times():
    fit = fit_steps(samples())
    for name, value in TRUE_PS.items():
        assert fit.step_ps[name] == pytest.approx(value, rel=1e-3, abs=2e5), name
    assert fit.gap_ps == pytest.approx((100_000_000, 3_000_000), rel=1e-3)


def test_terms_are_not_negative_even_if_the_unconstrained_fit_is():
    matrix = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    slope_down = nonnegative_least_squares(matrix, np.array([3.0, 2.0, 1.0]))
    assert slope_down.tolist() == pytest.approx([2.0, 0.0])
    assert nonnegative_least_squares(matrix, np.array([-1.0, -2.0, -3.0])).tolist() == [0.0, 0.0]
    assert nonnegative_least_squares(matrix, np.array([1.0, 3.0, 5.0]))[1] > 0


def test_held_out_steps_with_noise_have_a_small_bias_and_error():
    model = CalibratedStepTimes(calibration(samples(noise=0.05)))
    quality = model_quality(samples(seed=1, noise=0.05), model)
    assert quality.num_steps == 600
    assert abs(quality.bias) < 0.01 and 0.02 < quality.mape < 0.06


def test_the_table_of_residuals_corrects_sizes_that_the_terms_cannot_describe():
    uneven = calibration(samples(odd=1.5))
    plain = uneven.model_copy(update={"decode_factors": (), "prefill_factors": ()})
    held_out = samples(seed=1, odd=1.5)
    errors = [model_quality(held_out, CalibratedStepTimes(item)).mape for item in (plain, uneven)]
    assert errors[1] < errors[0] / 2


def cache_effect(rows, context):
    """Return the time of a decode step. Each token beyond 1500 takes 20 times as long."""
    tokens = rows * context
    return 200_000 + 20_000 * rows + 40 * min(tokens, 1500) + 800 * max(0, tokens - 1500)


def test_a_decode_step_after_a_prefill_or_with_a_changed_batch_takes_additional_time():
    steps = []
    for number, item in enumerate(samples()):
        after = After(number % 3) if not item.features.num_prefills else After.SAME
        more = {After.SAME: 0, After.OTHERS: 150_000, After.PROMPTS: 420_000}[after]
        steps.append(replace(item, after=after, duration_ns=item.duration_ns + more))
    created = calibration(steps)
    assert created.batch_change_ps == pytest.approx((150_000_000, 420_000_000), rel=1e-3)
    model = CalibratedStepTimes(created)
    assert model_quality(steps, model).mape < 0.005
    single, macro = (simulated(created, macro_steps=item) for item in (False, True))
    assert single.requests == macro.requests and single.end_ns == macro.end_ns
    without = created.model_copy(update={"batch_change_ps": (0, 0)})
    faster = simulated(without, macro_steps=True)
    assert sum(single.requests.finished_ns) > sum(faster.requests.finished_ns)


def simulated(created, *, macro_steps):
    """Return the result of a workload that is simulated with a calibration."""
    model = CalibratedStepTimes(created)
    requests = random_workload(5).requests
    return Recorded(requests, setup(), model, macro_steps=macro_steps).run(RunLimits())


def prefill_samples():
    return [item for item in samples() if item.features.num_prefills]


def decode_samples(all_rows, contexts, noise=0.0):
    rng = random.Random(1)
    return [
        StepSample(
            features=StepFeatures(0, 0, rows, rows * (context + step), 0, 0, 0),
            duration_ns=round(cache_effect(rows, context + step) * rng.lognormvariate(0, noise)),
            gap_ns=100_000,
        )
        for rows in all_rows
        for context in contexts
        for step in range(10)
    ]


def test_a_jump_in_the_time_per_cached_token_is_fitted_between_measured_context_lengths():
    steps = decode_samples(range(1, 17), (24, 60, 96, 140, 190, 280, 370, 460), noise=0.05)
    jump = calibration([*steps, *prefill_samples()])
    linear = jump.model_copy(update={"decode_factors": ()})
    held_out = decode_samples((3, 7, 10, 16), (40, 120, 230, 320, 430))
    terms, tables = (model_quality(held_out, CalibratedStepTimes(item)) for item in (linear, jump))
    assert terms.bias < -0.2 and terms.mape > 0.25
    assert tables.mape < 0.06 and abs(tables.bias) < 0.03


def test_step_times_of_batch_sizes_that_were_not_measured_are_interpolated():
    contexts = (20, 60, 140, 300, 480)
    steps = decode_samples((1, 2, 4, 8, 16), contexts)
    model = CalibratedStepTimes(calibration([*steps, *prefill_samples()]))
    held_out = decode_samples((3, 6, 12), contexts)
    assert model_quality(held_out, model).mape < 0.15
    # Outside the measured contexts, the outer factors continue.
    (last,), (beyond,) = (model.decode_times_ns(16, 16 * item, 1) for item in (490, 980))
    assert last < beyond < 2.5 * last


def test_consecutive_decode_steps_have_the_times_of_single_steps():
    steps = decode_samples(range(1, 17, 3), (20, 60, 140, 300), noise=0.3)
    created = calibration([*steps, *prefill_samples()])
    slow = {name: value * 10**5 for name, value in created.step_ps.items()}
    for item in (created, created.model_copy(update={"step_ps": slow})):
        model = CalibratedStepTimes(item)
        for rows, first in ((1, 0), (5, 77), (16, 16 * 10), (31, 31 * 200)):
            features = (StepFeatures(0, 0, rows, first + rows * n, 0, 0, 0) for n in range(400))
            times = model.decode_times_ns(rows, first, 400)
            assert times.tolist() == [model.time_ns(each) for each in features]


def test_too_few_steps_are_an_error():
    with pytest.raises(UserError, match="only 49 steps"):
        fit_steps(samples(49))


def test_a_simulation_with_a_calibration_is_the_same_with_macro_steps():
    model = CalibratedStepTimes(calibration(samples(odd=1.5)))
    results = []
    for macro_steps in (False, True):
        requests = random_workload(3).requests
        engine = Recorded(requests, setup(), model, macro_steps=macro_steps)
        results.append((engine.run(RunLimits()), engine.plans))
    (plain, every), (macro, some) = results
    assert plain.requests == macro.requests and not plain.error and not macro.error
    assert len(some) < len(every) and all(every[step] == some[step] for step in some)


# --- roofline -------------------------------------------------------------------------------------


def test_the_slower_resource_determines_roofline_times():
    sizes = ModelSizes.of(CONFIG)
    assert sizes.weight_bytes == pytest.approx(15.0e9, rel=0.02), "8 billion parameters"
    assert sizes.kv_bytes == 2 * 2 * 32 * 8 * 128
    sheet = DeviceSheet(
        tflops=100, bandwidth_gb_s=1000, compute_share=1, memory_share=1, step_us=0, layer_us=0
    )
    model = RooflineStepTimes("test", sizes, sheet)
    (decode,) = model.decode_times_ns(1, 0, 1)
    assert decode == pytest.approx(sizes.weight_bytes / 1000, rel=1e-3), (
        "a decode reads all weights"
    )
    few, more = model.decode_times_ns(64, 64 * 1000, 1)[0], model.decode_times_ns(64, 0, 1)[0]
    assert few - more == pytest.approx(64 * sizes.kv_bytes, rel=1e-3)
    faster = RooflineStepTimes("test", sizes, sheet.model_copy(update={"bandwidth_gb_s": 2000.0}))
    assert faster.decode_times_ns(1, 0, 1)[0] == pytest.approx(decode / 2, rel=1e-3)


def test_roofline_rejects_models_and_devices_that_it_does_not_know(tmp_path):
    with pytest.raises(UserError, match="mixtures of experts"):
        ModelSizes.of(CONFIG | {"num_local_experts": 8})
    with pytest.raises(UserError, match="vocab_size"):
        ModelSizes.of({name: value for name, value in CONFIG.items() if name != "vocab_size"})
    sheet = tmp_path / "sheet.toml"
    for text, message in (("tflops = 0", "tflops"), ("tflops =", "not a device sheet")):
        sheet.write_text(text)
        with pytest.raises(UserError, match=message):
            references.read_device(str(sheet))
    with pytest.raises(UserError, match="h100-sxm"):
        references.read_device("h101")


def test_a_roofline_reference_reads_the_model_and_the_device(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"model_type": "llama"}))
    sheet = tmp_path / "mine.toml"
    sheet.write_text("tflops = 100\nbandwidth_gb_s = 1000\n")
    times = {}
    for device in ("h100-sxm", "l4", str(sheet)):
        reference = StepTimeReference(name=f"roofline:{device}", model=str(tmp_path))
        times[device] = int(reference.load().decode_times_ns(1, 0, 1)[0])
    assert times["h100-sxm"] < times[str(sheet)] < times["l4"]
    digest = StepTimeReference(name=f"roofline:{sheet}", model=str(tmp_path)).digest()
    sheet.write_text("tflops = 100\nbandwidth_gb_s = 1001\n")
    changed = StepTimeReference(name=f"roofline:{sheet}", model=str(tmp_path)).digest()
    assert digest != changed, "a changed sheet gives different run ids"


# --- linear and names -----------------------------------------------------------------------------


def test_the_linear_step_times_have_named_constants():
    model = StepTimeReference(name="linear:step_ps=5000,kv_token_ps=0").load()
    assert model.decode_times_ns(0, 0, 2).tolist() == [5, 5]
    for bad in ("linear:speed=3", "linear:step_ps=-1", "linear:step_ps"):
        with pytest.raises(UserError, match="of the form NAME=PICOSECONDS"):
            StepTimeReference(name=bad).load()


# --- calibration files ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not a calibration file"),
        ("[" * 100_000, "not a calibration file"),
        ("[]", "not a calibration file"),
        (' {"format": "dovetail-step-times", "version": 3}', "version 3; this lab reads version 4"),
        (' {"format": "dovetail-step-times", "version": 4}', "model: Field required"),
        (" " * 2_000_000, "larger than"),
    ],
)
def test_a_file_that_is_not_a_calibration_is_rejected(text, message, tmp_path):
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        read_calibration(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step_ps": {"step": -1}}, "step_ps.step"),
        ({"step_ps": {"step": 1}}, "must have the terms"),
        ({"decode_factors": [[2, [[0, 1.0]]], [1, [[0, 1.0]]]]}, "must increase"),
        ({"decode_factors": [[1, [[9, 1.0], [9, 1.0]]]]}, "must increase"),
        ({"prefill_factors": [[2, 1.0], [1, 1.0]]}, "must increase"),
        ({"decode_factors": [[1, [[0, 1e9]]]]}, "decode_factors"),
        ({"decode_factors": [[1, []]]}, "decode_factors"),
        ({"gap_ps": [1, 10**16]}, "gap_ps"),
        ({"batch_change_ps": [1, 10**16]}, "batch_change_ps"),
        ({"batch_change_ps": [-1, 0]}, "batch_change_ps"),
        ({"batch_change_ps": [1]}, "batch_change_ps"),
    ],
)
def test_a_calibration_with_impossible_numbers_is_rejected(changes, message, tmp_path):
    with pytest.raises(UserError, match=message):
        read_calibration(write(tmp_path / "bad.json", **changes))


RUN = ["lab", "run", "fcfs", "--trace", "chat", "--requests", "20", "--seeds", "1", "--step-times"]


@pytest.fixture
def small(tmp_path, monkeypatch):
    """Return the current directory, which contains the configuration of a model."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def told(capsys):
    shown = capsys.readouterr()
    return " ".join((shown.out + shown.err).split())


def test_the_strict_option_accepts_a_calibration_of_this_machine_and_commit(small, capsys):
    means = []
    for factor in (1, 1000):
        slower = {name: value * factor for name, value in calibration().step_ps.items()}
        write(small / "mine.json", step_ps=slower)
        assert main([*RUN, "mine.json", "--strict"]) == 0
        shown = told(capsys)
        assert "Warning" not in shown
        means.append(float(shown.partition("Time per output token, mean")[2].split()[0]))
    assert means[1] > 100 * means[0], "the file determines the times"


def other_machine():
    return calibration().model_dump(mode="json")["machine"] | {"cpu": "Z80", "num_cores": 1}


@pytest.mark.costly
@pytest.mark.parametrize(
    ("changes", "message", "is_warned"),
    [
        ({"machine": other_machine}, "another machine: Z80 with 1 cores", True),
        ({"commit": lambda: "0123456789ab"}, "measured with commit 0123456789ab", False),
    ],
)
def test_the_strict_option_rejects_a_calibration_of_another_machine_or_commit(
    changes, message, is_warned, small, capsys
):
    write(small / "other.json", **{name: make() for name, make in changes.items()})
    command = [*RUN, "other.json"]
    assert main(command) == 0
    assert (message in told(capsys)) == is_warned
    assert main([*command, "--strict"]) == 2
    shown = told(capsys)
    assert message in shown and "Omit --strict" in shown


def test_a_calibration_of_another_model_or_a_smaller_engine_is_a_warning(small, capsys):
    write(small / "mine.json", max_num_seqs=32)
    assert main([*RUN, "mine.json", "--model", "model"]) == 0
    shown = told(capsys)
    assert "another model: 'made-up'" in shown
    assert "measured up to max_num_seqs=32; max_num_seqs=256 is extrapolated" in shown


def test_inaccurate_step_times_give_a_warning_and_the_strict_option_rejects_them(small, capsys):
    command = [*RUN, "roofline:l4", "--model", "model"]
    assert main(command) == 0
    assert "Times of roofline are rough" in told(capsys)
    assert main([*command, "--strict"]) == 2
    assert main(command[:-2]) == 2
    assert "needs a model" in told(capsys)


def test_the_shipped_calibrations_are_valid():
    names = references.shipped_calibrations()
    assert {"demo", "llama-160m"} <= set(names)
    engine = MeasuredEngine(
        max_num_seqs=16, max_num_batched_tokens=256, max_model_len=512, block_size=16
    )
    for name in names:
        reference = StepTimeReference(name=f"calibrated:{name}")
        assert reference.load().decode_times_ns(4, 400, 3).min() > 10_000
        assert not any("extrapolated" in item for item in reference.problems(engine))
    with pytest.raises(UserError, match="shipped calibrations are demo"):
        StepTimeReference(name="calibrated:none").load()


def test_a_model_of_an_unknown_user_has_no_configuration():
    assert local_config("~no-such-user/model") is None
