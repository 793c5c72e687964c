"""Experiments: equal workloads for all policies, failed runs do not stop others, runs resume.

A single-server queue replaces the engine (`queue_worker`).
"""

import csv
import errno
import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dovetail.errors import UserError
from dovetail_lab.experiments.comparison import compare_all, rank_policies
from dovetail_lab.experiments.experiment import RunOptions, run_experiment
from dovetail_lab.experiments.export import export_results
from dovetail_lab.experiments.results import Cell
from dovetail_lab.experiments.spec import make_spec, parse_loads
from dovetail_lab.experiments.spec_file import read_spec

WORKER = (sys.executable, str(Path(__file__).with_name("queue_worker.py")))
YAML_ALIASES = "".join(
    f"{y}: &{y} [{f'*{x},' * 9}]\n" for x, y in zip("abcdefg", "bcdefgh", strict=True)
)
WORKLOAD = {"synthetic": "chat", "num_requests": 200}


def spec_of(policies=("fcfs", "shortest"), **fields):
    values = {"loads": (0.5, 0.9), "seeds": 6, "time_limit_s": 60, "workload": WORKLOAD, **fields}
    return make_spec({"policies": list(policies), **values})


def run(spec, out, **options):
    return run_experiment(spec, RunOptions(out=out, num_workers=2, command=WORKER, **options))


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """Return a completed experiment (two policies, two loads, six seeds) and its directory."""
    out = tmp_path_factory.mktemp("queue")
    return run(spec_of(), out), out


@pytest.mark.costly
def test_every_policy_runs_the_same_workloads_at_fractions_of_the_capacity(done):
    results, _ = done
    assert len(results.records) == 2 * 2 * 6 and not results.failures
    for record in results.records:
        # One server: 0.1 ms per prompt token, 1 ms per output token.
        output = record.workload
        capacity = 200 / (output["prompt_tokens"] * 1e-4 + output["output_tokens"] * 1e-3)
        assert record.key.rate == pytest.approx(record.key.load * capacity, rel=0.15)
    by_seed = {}
    for record in results.records:
        where = record.key.load, record.key.seed
        assert by_seed.setdefault(where, record.workload) == record.workload
    assert len({item["fingerprint"] for item in by_seed.values()}) == 12


def test_the_capacity_is_measured_for_each_seed(done):
    results, _ = done
    rates = {item.key.seed: item.key.rate / 0.9 for item in results.records if item.key.load == 0.9}
    assert len(set(rates.values())) == 6
    assert results.capacity == pytest.approx(sum(rates.values()) / 6, rel=1e-5)


def test_a_better_policy_is_found_and_named(done):
    results, _ = done
    entries = {item.load: item for item in compare_all(results, "e2e_mean", "sim")}
    assert entries[0.9].verdict == "better" and entries[0.9].difference.t.high < 0
    assert entries[0.9].difference.t.num_values == 6
    ranking = rank_policies(results, "sim", 0.9, "e2e_mean")
    assert ranking.describe(2) == ranking.best == "shortest"


def test_identical_policies_tie_and_noise_is_not_significant(done, tmp_path):
    results, _ = done
    same = {item.verdict for item in compare_all(results, "gap_mean", "sim")}
    assert same == {"equal"}
    assert rank_policies(results, "sim", 0.9, "gap_mean").describe(2) == "equal"
    noise = {item.load: item for item in compare_all(results, "throughput", "sim")}
    assert noise[0.5].verdict == "not distinguishable"
    ranking = rank_policies(results, "sim", 0.5, "throughput")
    assert ranking.describe(2) == "not distinguishable: all"
    assert ranking.describe(3).startswith(f"not distinguishable: {ranking.best}, ")


@pytest.mark.parametrize("value", [math.nan, math.inf, "fast"])
def test_a_value_that_cannot_be_ranked_is_reported_with_its_policy_and_metric(done, value):
    results, _ = done
    wrong = results.by_cell[Cell(engine="sim", policy="shortest", load=0.9)][2]
    records = [
        replace(record, values={**record.values, "e2e_mean": value}) if record is wrong else record
        for record in results.records
    ]
    changed = replace(results, records=records, comparisons={})
    message = (
        f"the policy 'shortest' has e2e_mean={value!r} at load 0.9 with seed 2, .*{wrong.run_id}"
    )
    with pytest.raises(UserError, match=message):
        rank_policies(changed, "sim", 0.9, "e2e_mean")
    with pytest.raises(UserError, match=message):
        compare_all(changed, "e2e_mean", "sim")
    assert rank_policies(changed, "sim", 0.5, "e2e_mean").best


@pytest.mark.costly
def test_a_comparison_with_one_seed_has_no_verdict(tmp_path):
    results = run(spec_of(seeds=1, loads=(0.9,)), tmp_path)
    (result,) = compare_all(results, "e2e_mean", "sim")
    assert result.verdict == "one seed: no interval"


@pytest.mark.costly
def test_finished_runs_are_reused_if_their_settings_are_unchanged(done, tmp_path):
    results, out = done
    counts = []
    again = run(spec_of(), out, on_progress=lambda done, total, last: counts.append((done, total)))
    assert again.num_reused == 24 and counts == [(6, 6), (24, 24)]
    assert [item.values for item in again.records] == [item.values for item in results.records]
    more = run(spec_of(seeds=6, loads=(0.5, 0.9, 0.7)), out)
    assert more.num_reused == 24 and len(more.records) == 36
    other = run(spec_of(warmup=0.2), out)
    assert other.num_reused == 0


@pytest.mark.costly
def test_a_run_with_a_damaged_file_is_repeated(done):
    _, out = done
    victim = next((out / "runs").glob("*.json"))
    victim.write_text(victim.read_text()[:50])
    assert run(spec_of(), out).num_reused in (23, 24)  # 24 if it was the burst
    assert run(spec_of(), out).num_reused == 24


@pytest.mark.costly
@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("raises", "RuntimeError: the policy is broken"),
        ("exits", "exited with code 7; see workers.log"),
        ("incomplete", "stopped at step 5"),
    ],
)
def test_a_run_that_fails_is_marked_and_the_sweep_continues(policy, message, tmp_path):
    results = run(spec_of(("fcfs", policy, "shortest"), seeds=2, loads=(0.5,)), tmp_path)
    assert [item.key.policy for item in results.failures] == [policy] * 2
    assert all(message in item.error for item in results.failures)
    for name in ("fcfs", "shortest"):
        assert len(results.values(Cell(engine="sim", policy=name, load=0.5), "e2e_mean")) == 2


@pytest.mark.costly
def test_a_run_that_hangs_is_killed_at_its_time_limit(tmp_path):
    spec = spec_of(("fcfs", "hangs", "shortest"), seeds=2, loads=(0.5,), time_limit_s=6)
    results = run(spec, tmp_path)
    assert [item.key.policy for item in results.failures] == ["hangs"] * 2
    assert "time limit of 6 s" in results.failures[0].error
    assert len(results.values(Cell(engine="sim", policy="shortest", load=0.5), "e2e_mean")) == 2


@pytest.mark.costly
def test_output_of_a_policy_goes_to_the_log_of_the_workers(tmp_path):
    results = run(spec_of(("prints",), seeds=1, loads=(0.5,)), tmp_path)
    assert not results.failures
    assert "hello from a policy" in (tmp_path / "workers.log").read_text()


@pytest.mark.costly
def test_a_failed_run_is_repeated(tmp_path):
    spec = spec_of(("fcfs", "raises"), seeds=1, loads=(0.5,))
    run(spec, tmp_path)
    again = run(spec, tmp_path)
    assert again.num_reused == 1 and len(again.failures) == 1


@pytest.mark.costly
def test_unfinished_requests_are_reported(tmp_path):
    spec = spec_of(("fcfs", "unfinished"), seeds=2, loads=(0.5,), drain=0.0)
    results = run(spec, tmp_path)
    cell = Cell(engine="sim", policy="unfinished", load=0.5)
    assert results.censored(cell) == (360, 6, 0)
    assert results.values(cell, "e2e_mean") == {} and results.values(cell, "e2e_p50")


@pytest.mark.costly
def test_an_experiment_whose_baseline_burst_fails_is_rejected(tmp_path):
    with pytest.raises(UserError, match=r"burst run of the baseline 'raises' failed.*is broken"):
        run(spec_of(("raises", "fcfs")), tmp_path)


@pytest.mark.costly
def test_results_are_exported_as_csv_parquet_and_a_data_frame(done):
    pandas, parquet = pytest.importorskip("pandas"), pytest.importorskip("pyarrow.parquet")
    results, out = done
    paths = export_results(results, out)
    assert [path.name for path in paths] == ["results.csv", "differences.csv", "results.parquet"]
    frame = results.frame()
    table = pandas.read_csv(out / "results.csv")
    assert len(table) == len(frame) == parquet.read_table(out / "results.parquet").num_rows
    means = frame[frame.metric == "e2e_mean"].groupby(["policy", "load"]).value.mean()
    assert means["shortest", 0.9] < means["fcfs", 0.9]
    with (out / "differences.csv").open() as file:
        rows = list(csv.DictReader(file))
    (row,) = (r for r in rows if r["metric"] == "e2e_mean" and r["load"] == "0.9")
    assert row["verdict"] == "better" and float(row["t_high"]) < 0


def test_the_results_directory_contains_the_experiment_description(done):
    _, out = done
    output = json.loads((out / "experiment.json").read_text())
    assert make_spec(output).workload.synthetic == "chat"


def test_the_columns_of_a_run_can_be_read_again(done):
    results, _ = done
    first = next(item for item in results.records if item.key.seed == 0)
    later = next(item for item in results.records if item.key.seed == 1)
    requests, steps = results.folder.read_columns(first.run_id)
    assert len(requests.arrival_ns) == 200 and steps is not None and len(steps.start_ns) == 200
    assert results.folder.read_columns(later.run_id)[1] is None
    path = results.folder.folder / f"{later.run_id}.columns"
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(UserError, match="cannot be read"):
        results.folder.read_columns(later.run_id)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"policies": []}, "policies"),
        ({"policies": ["fcfs", "fcfs"]}, "two policies are named 'fcfs'"),
        ({"loads": [0.5, -1]}, r"loads\.1"),
        ({"loads": [0.5, 0.5]}, "not unique"),
        ({"loads": [float("inf")]}, "loads"),
        ({"seeds": 0}, "seeds"),
        ({"engine": "gpu"}, "engine"),
        ({"warmup": 0.7}, "warmup"),
        ({"time_limit_s": 0}, "time_limit_s"),
        ({"speed": 3}, "speed"),
        ({"setup": {"max_num_batched_tokens": 8}}, "at least max_num_seqs=256"),
        ({"setup": {"num_blocks": 8}}, "needs num_blocks of at least 1025"),
        ({"workload": {"trace": ""}}, "exactly one"),
        ({"policies": [""]}, r"policies\.0\.policy"),
        ({"policies": "fcfs"}, "policies: must be a list"),
        ({"policies": [3]}, r"policies\.0: must be a table of fields"),
        ({"time_limit_s": 1e300}, "time_limit_s"),
        ({"first_seed": 2**63}, "first_seed"),
        ({"setup": {"max_num_seqs": 10**9}}, r"setup\.max_num_seqs"),
        ({"seed": 3}, r"seed: unknown field\. Did you mean 'seeds'\?$"),
        ({"workload": {**WORKLOAD, "reqs": 3}}, r"workload\.reqs: unknown field; use trace, synth"),
    ],
)
def test_an_invalid_experiment_is_rejected(fields, message):
    with pytest.raises(UserError, match=message):
        make_spec({"policies": ["fcfs"], "workload": WORKLOAD, **fields})


def test_toml_and_yaml_describe_the_same_experiment(tmp_path):
    toml, yaml = tmp_path / "a.toml", tmp_path / "a.yaml"
    toml.write_text(
        'policies = ["fcfs", {policy = "sarathi", options = {chunk = 256}, label = "s"}]\n'
        "loads = [0.5]\n[workload]\nsynthetic = 'chat'\n"
    )
    yaml.write_text(
        "policies:\n- fcfs\n- {policy: sarathi, options: {chunk: 256}, label: s}\n"
        "loads: [0.5]\nworkload: {synthetic: chat}\n"
    )
    assert make_spec(read_spec(toml)) == make_spec(read_spec(yaml))
    for path in (toml, yaml):
        path.write_text("{ a = [")
        with pytest.raises(UserError, match="not valid"):
            read_spec(path)
    yaml.write_text("- 1\n")
    with pytest.raises(UserError, match="table of fields"):
        read_spec(yaml)
    with pytest.raises(UserError, match="cannot be read"):
        read_spec(tmp_path / "none.toml")
    toml.write_bytes(b"\x83")
    with pytest.raises(UserError, match="is not UTF-8 text"):
        read_spec(toml)


@pytest.mark.costly
@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", "[" * 100_000, "nested too deeply"),
        ("a.yaml", "[" * 5000, "nested too deeply"),
        ("a.toml", "a = " + "[" * 5000, "nested too deeply"),
        ("a.yaml", "policies: &again [*again]", "nested too deeply"),
        ("a.yaml", "a: &a [1,1,1,1,1,1]\n" + YAML_ALIASES, "more than 100,000 values"),
        ("a.toml", "#" * 2**20 + "#", "larger than 1,048,576 bytes"),
    ],
)
def test_an_experiment_file_is_read_in_bounded_memory(name, text, message, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=message):
        read_spec(tmp_path / name)


def test_a_device_file_is_rejected_as_an_experiment_file():
    with pytest.raises(UserError, match="larger than"):
        read_spec(Path("/dev/zero"))


@pytest.mark.costly
def test_a_full_disk_fails_the_experiment_and_leaves_no_partial_file(tmp_path, monkeypatch):
    def fail(path, content):
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fail)
    with pytest.raises(UserError, match=r"out=.*cannot be written: No space left on device"):
        run(spec_of(("exits",), seeds=1, loads=(0.5,)), tmp_path)
    assert list((tmp_path / "runs").iterdir()) == []


def test_loads_are_a_list_or_a_range():
    assert parse_loads("0.5,0.9") == (0.5, 0.9)
    assert parse_loads("0.5:1.1:7") == (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1)
    for bad in ("a", "0.5:1", "0.5:1:1", "0.5:1:2:3", ""):
        with pytest.raises(UserError, match="neither a list"):
            parse_loads(bad)
