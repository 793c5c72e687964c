"""Step samples whose times follow known terms, and calibrations that are fitted to them."""

import random

from lab_builders import setup

from dovetail_lab.simulation.step_times import StepFeatures
from dovetail_lab.step_times.calibration import MeasuredModel
from dovetail_lab.step_times.fitting import TERMS, feature_values
from dovetail_lab.step_times.profiling import make_calibration
from dovetail_lab.step_times.samples import StepSample

TRUE_PS = {
    "step": 900_000_000,
    "prefill_token": 40_000_000,
    "prefill": 300_000_000,
    "decode": 70_000_000,
    "kv_token": 200_000,
    "context_pair": 30_000,
    "join": 0,
    "first": 800_000_000,
}
MODEL = MeasuredModel(name="made-up", config_digest="0" * 64)


def random_features(rng):
    decodes = rng.choice([0, 1, 2, 5, 16, 32])
    prefills = rng.choice([0, 0, 1, 3]) if decodes else 1
    tokens = sum(rng.randint(2, 120) for _ in range(prefills))
    joins = rng.randint(0, prefills)
    return StepFeatures(
        num_prefill_tokens=tokens,
        num_prefills=prefills,
        num_decodes=decodes,
        num_kv_tokens=decodes * rng.randint(1, 400),
        num_context_pairs=tokens * rng.randint(1, 200),
        num_joins=joins,
        is_first=int(joins == prefills + decodes),
    )


def samples(count=600, noise=0.0, seed=0, odd=1.0):
    """Return steps with times computed from `TRUE_PS`. odd: factor for an odd number of decodes."""
    rng = random.Random(seed)
    steps = []
    for _ in range(count):
        features = random_features(rng)
        ns = sum(TRUE_PS[n] * v for n, v in zip(TERMS, feature_values(features), strict=True)) / 1e3
        factor = odd if features.num_decodes % 2 and not features.num_prefills else 1.0
        runs = features.num_prefills + features.num_decodes
        steps.append(
            StepSample(
                features=features,
                duration_ns=round(ns * factor * rng.lognormvariate(0, noise)),
                gap_ns=100_000 + 3_000 * runs,
            )
        )
    return steps


def calibration(steps=None, max_num_seqs=256):
    """Return a calibration that is fitted to two measurements."""
    passes = [{"decodes": steps or samples()}] * 2
    limits = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": 2048, "max_model_len": 16384}
    return make_calibration(passes, setup(**limits), MODEL, 0)
