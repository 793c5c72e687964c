"""Searches: options of a policy, and workloads that are bad for a policy."""

import sys
from pathlib import Path

import pytest

from dovetail.errors import UserError
from dovetail_lab.experiments.experiment import RunOptions
from dovetail_lab.experiments.spec import make_spec
from dovetail_lab.experiments.spec_file import read_spec
from dovetail_lab.searches.adversary import BOUNDS, search_adversary
from dovetail_lab.searches.sweep import candidates_of, parse_option, sweep

WORKER = (sys.executable, str(Path(__file__).with_name("queue_worker.py")))
SLOWNESS = (1.5, 0.5, 1.0, 0.75, 2.0, 0.9)


def spec_of(policies, **fields):
    workload = {"synthetic": "chat", "num_requests": 100}
    return make_spec(
        {"policies": policies, "loads": [0.7], "seeds": 8, "workload": workload, **fields}
    )


def options(out, **fields):
    return RunOptions(out=out, num_workers=2, command=WORKER, **fields)


@pytest.mark.costly
@pytest.mark.parametrize("halving", [False, True])
def test_a_sweep_finds_the_best_options(halving, tmp_path):
    rounds = []
    result = sweep(
        spec_of(["fcfs"]),
        candidates_of("tuned", {"slowness": SLOWNESS}),
        "e2e_mean",
        options(tmp_path),
        halving=halving,
        on_round=lambda count, seeds: rounds.append((count, seeds)),
    )
    best = result.candidates[0]
    assert best.options == {"slowness": 0.5} and best.verdict == "better" and best.num_seeds == 8
    assert [item.name for item in result.candidates] == [
        f"slowness={value}" for value in sorted(SLOWNESS)
    ]
    assert result.candidates[-1].verdict in ("worse", "not distinguishable")
    assert rounds == ([(6, 2), (3, 4), (2, 8)] if halving else [(6, 8)])
    if halving:
        assert [item.num_seeds for item in result.candidates] == [8, 8, 4, 2, 2, 2]


@pytest.mark.costly
def test_halving_reuses_the_runs_of_earlier_rounds(tmp_path):
    candidates = candidates_of("tuned", {"slowness": SLOWNESS})
    sweep(spec_of(["fcfs"]), candidates, "e2e_mean", options(tmp_path), halving=True)
    # Bursts and baseline: 8 seeds. Candidates: 6 on 2 seeds, 3 on 2 more, 2 on 4 more.
    assert len(list((tmp_path / "runs").glob("*.json"))) == 8 + 8 + 12 + 6 + 8


@pytest.mark.costly
def test_a_candidate_that_fails_is_last(tmp_path):
    candidates = [*candidates_of("tuned", {"slowness": (1.0, 0.5)})]
    candidates.append(candidates[0].model_copy(update={"policy": "raises", "label": "broken"}))
    result = sweep(spec_of(["fcfs"]), candidates, "e2e_mean", options(tmp_path), halving=False)
    assert result.candidates[-1].name == "broken" and result.candidates[-1].mean is None
    assert result.candidates[-1].verdict == "failed"


@pytest.mark.costly
def test_a_metric_whose_higher_values_are_better_is_maximized(tmp_path):
    spec = spec_of(
        ["fcfs"],
        workload={
            "synthetic": "chat",
            "num_requests": 100,
            "slo_classes": [{"name": "a", "ttft_ms": 300}],
        },
    )
    candidates = candidates_of("tuned", {"slowness": (2.0, 0.5)})
    result = sweep(spec, candidates, "goodput", options(tmp_path), halving=False)
    assert result.candidates[0].options == {"slowness": 0.5}


def test_options_of_a_sweep_are_json_values_or_strings():
    assert parse_option("chunk=128,256") == ("chunk", [128, 256])
    assert parse_option("a=0.5, true,x") == ("a", [0.5, True, "x"])
    assert parse_option(f"a={'[' * 20_000}") == ("a", ["[" * 20_000])
    grid = candidates_of("p", {"a": [1, 2], "b": ["x", "y"]})
    assert [item.name for item in grid] == ["a=1,b=x", "a=1,b=y", "a=2,b=x", "a=2,b=y"]
    for bad in ("chunk", "=1", "chunk="):
        with pytest.raises(UserError, match="NAME=VALUE"):
            parse_option(bad)
    with pytest.raises(UserError, match="has 1 combinations"):
        candidates_of("p", {"a": [1]})
    with pytest.raises(UserError, match="'a' has the value 64 twice"):
        candidates_of("p", {"a": [64, 64]})
    with pytest.raises(UserError, match="has 1000000000000 combinations"):  # without listing them
        candidates_of("p", {name: range(1000) for name in "abcd"})
    with pytest.raises(UserError, match="has 1001 combinations"):
        candidates_of("p", {"a": range(1001)})
    with pytest.raises(UserError, match="metric='hit_rate_ideal' is not one of"):
        sweep(spec_of(["fcfs"]), grid, "hit_rate_ideal", options(Path()), halving=False)


@pytest.mark.costly
def test_an_adversary_finds_a_workload_that_new_seeds_confirm(tmp_path):
    spec = spec_of(["shortest", "fcfs"], seeds=2)
    shown = []
    result = search_adversary(
        spec,
        "norm_latency",
        10,
        options(tmp_path),
        on_trial=lambda number, trial: shown.append(trial.regret),
    )
    assert len(result.trials) == len(shown) == 10
    assert result.worst.regret == max(shown) > 1.0
    assert result.confirmed.regret > 0.3 and result.confirmed.comparison.verdict == "worse"
    assert result.confirmed.comparison.difference.t.num_values == 10
    assert result.spec.first_seed == 2 and result.spec.seeds == 10
    for name, (low, high) in BOUNDS.items():
        assert all(low <= trial.parameters[name] <= high * 1.0001 for trial in result.trials)


@pytest.mark.costly
def test_the_found_workload_can_be_repeated_from_its_file(tmp_path):
    result = search_adversary(
        spec_of(["shortest", "fcfs"], seeds=1), "e2e_mean", 2, options(tmp_path)
    )
    path = tmp_path / "adversary.json"
    path.write_text(result.spec.model_dump_json())
    assert make_spec(read_spec(path)) == result.spec


@pytest.mark.costly
def test_an_adversary_depends_only_on_its_seed(tmp_path):
    spec = spec_of(["shortest", "fcfs"], seeds=1)
    first, again, other = (
        search_adversary(spec, "e2e_mean", 3, options(tmp_path), seed=seed) for seed in (1, 1, 2)
    )
    assert first.trials == again.trials
    assert first.trials[0].parameters != other.trials[0].parameters


@pytest.mark.costly
@pytest.mark.parametrize(
    ("policies", "metric", "trials", "message"),
    [
        (["fcfs"], "e2e_mean", 5, "needs two policies, got 1"),
        (["fcfs", "shortest"], "speed", 5, "metric='speed'"),
        (["fcfs", "shortest"], "e2e_mean", 1, "trials=1"),
        (["raises", "fcfs"], "e2e_mean", 2, "every trial of the search failed"),
    ],
)
def test_an_impossible_search_is_rejected(policies, metric, trials, message, tmp_path):
    with pytest.raises(UserError, match=message):
        search_adversary(spec_of(policies), metric, trials, options(tmp_path))
