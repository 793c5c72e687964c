"""Experiments with several replicas: the options reach the simulator."""

import csv
import re

import pytest

from dovetail.cli import main
from dovetail.errors import UserError
from dovetail_lab.experiments.engines import run_workload
from dovetail_lab.experiments.job import built_workload
from dovetail_lab.experiments.run_key import RunKey, run_id
from dovetail_lab.experiments.spec import make_spec

RUN = ["lab", "run", "fcfs", "--trace", "azure:conv", "--requests", "80"]


def run(**setup):
    """Return the result of one simulated run with these fields of the setup."""
    spec = make_spec(
        {
            "policies": ["fcfs"],
            "workload": {"trace": "azure:conv", "num_requests": 60},
            "setup": setup,
        }
    )
    key = RunKey(policy="fcfs", load=0.9, rate=20.0, seed=0, engine="sim")
    return run_workload(spec, key, built_workload(spec, key).workload, trust_local_code=False)


def mean_gap_ms(result):
    return sum(result.requests.max_gap_ns) / len(result.requests.max_gap_ns) / 1e6


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_run_with_more_replicas_ends_earlier_and_its_steps_are_merged():
    one, three = run(), run(replicas=3)
    assert three.end_ns < one.end_ns and not three.error
    assert three.num_steps == sum(three.steps.num_steps) > one.num_steps
    assert list(three.steps.start_ns) == sorted(three.steps.start_ns)
    assert three.num_blocks == one.num_blocks and three.scheduler_ns > 0


@pytest.mark.costly
def test_the_transfer_options_determine_the_gap_after_the_first_token():
    fast = run(replicas=2, prefill_replicas=1, transfer_latency_ms=0, transfer_us_per_token=0)
    late = run(replicas=2, prefill_replicas=1, transfer_latency_ms=400, transfer_us_per_token=0)
    slow = run(replicas=2, prefill_replicas=1, transfer_latency_ms=0, transfer_us_per_token=400)
    assert mean_gap_ms(late) > mean_gap_ms(fast) + 400
    assert mean_gap_ms(slow) > mean_gap_ms(fast) + 200


@pytest.mark.costly
def test_lab_run_prints_metrics_of_all_replicas(folder, capsys):
    rates = []
    for options in ([], ["--replicas", "3"], ["--replicas", "3", "--prefill-replicas", "1"]):
        assert main([*RUN, *options]) == 0
        rates.append(float(re.search(r"at ([\d.]+) requests/s", capsys.readouterr().out)[1]))
    assert rates[1] > 1.5 * rates[0] and rates[2] != rates[1]


@pytest.mark.costly
def test_the_compare_command_ranks_routers_as_policies_with_labels(folder, capsys):
    (folder / "routers.toml").write_text(
        'policies = [{policy = "fcfs", router = "round_robin", label = "turns"}, '
        '{policy = "fcfs", router = "prefix", label = "prefix"}]\n'
        "loads = [0.8]\nseeds = 3\n[workload]\nsynthetic = 'conversations'\nnum_requests = 80\n"
        "[setup]\nreplicas = 3\n"
    )
    command = ["lab", "compare", "routers.toml", "--jobs", "2", "--no-report", "--out", "out"]
    assert main(command) == 0
    with (folder / "out/differences.csv").open() as file:
        rows = {row["metric"]: row for row in csv.DictReader(file)}
    assert float(rows["hit_rate"]["difference"]) > 0


def test_runs_with_another_router_or_a_changed_router_file_are_not_reused(folder):
    def id_of(router):
        policy = {"policy": "fcfs", "router": router}
        spec = make_spec({"policies": [policy], "workload": {"synthetic": "chat"}})
        key = RunKey(policy="fcfs", load=0.9, rate=20.0, seed=0, engine="sim")
        return run_id(spec, key, "fingerprint", trust_local_code=True)

    (folder / "mine.py").write_text("class R: pass\n")
    before = id_of("./mine.py:R")
    (folder / "mine.py").write_text("class R: x = 1\n")
    ids = [id_of(""), id_of("prefix"), before, id_of("./mine.py:R"), id_of("./missing.py:R")]
    assert len(set(ids)) == 5
    assert id_of("") == id_of("least_load")
    assert id_of("no.such.module:R") == id_of("no.such.module:R")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--replicas", "-1"], "setup.replicas: Input should be greater than"),
        (["--replicas", "2000"], "setup.replicas: Input should be less than"),
        (["--prefill-replicas", "1"], "prefill_replicas=1 must be less than replicas=1"),
        (["--replicas", "2", "--router", "prefxi"], "router='prefxi' is unknown; use round_robin"),
        (["--replicas", "2", "--router", "./r.py:R"], "add --trust-local-code to run it"),
        (["--replicas", "2", "--decision-log", "x"], "--decision-log records one engine"),
    ],
)
def test_invalid_options_are_rejected(folder, capsys, options, message):
    assert main([*RUN, *options]) != 0
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


def test_replicas_need_the_simulator():
    fields = {"policies": ["fcfs"], "workload": {"synthetic": "chat"}, "setup": {"replicas": 2}}
    with pytest.raises(UserError, match="engine='real' supports one engine only"):
        make_spec({**fields, "engine": "real"})
    split = {"replicas": 2, "prefill_replicas": 1, "enable_prefix_caching": False}
    with pytest.raises(UserError, match="prefill_replicas needs enable_prefix_caching=true"):
        make_spec({**fields, "setup": split})
