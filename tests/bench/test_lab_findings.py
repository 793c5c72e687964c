"""The page of findings: its experiments are valid, and a claim is judged by its direction."""

import tomllib
from dataclasses import replace

import lab_findings
import pytest

from dovetail_lab.experiments.experiment import RunOptions, run_experiment
from dovetail_lab.experiments.metric_table import METRICS
from dovetail_lab.experiments.spec import make_spec

FILES = sorted(path.stem for path in lab_findings.FOLDER.glob("*.toml"))


def spec_of(name):
    return make_spec(tomllib.loads((lab_findings.FOLDER / f"{name}.toml").read_text("utf-8")))


@pytest.mark.parametrize("claim", lab_findings.CLAIMS, ids=lambda claim: claim.text)
def test_a_claim_names_policies_a_load_and_a_metric_of_its_experiment(claim):
    spec = spec_of(claim.experiment)
    names = {policy.name for policy in spec.policies}
    assert {claim.name, claim.baseline} <= names and claim.load in spec.loads
    assert claim.metric in METRICS and claim.expected in ("lower", "higher")


def test_every_experiment_is_on_the_page_and_every_policy_has_a_claim():
    used = {claim.experiment for claim in lab_findings.CLAIMS}
    assert used | {f"goodput_{trace}" for trace in lab_findings.TRACES} == set(FILES)
    shipped = {policy.name for policy in spec_of("goodput_azure_conv").policies}
    assert {claim.policy for claim in lab_findings.CLAIMS} | {lab_findings.OWN} == shipped
    page = lab_findings.PAGE.read_text("utf-8")
    assert all(claim.text in page for claim in lab_findings.CLAIMS)
    assert all(f"| {trace.replace('_', ':', 1)} |" in page for trace in lab_findings.TRACES)


@pytest.mark.costly
def test_the_direction_of_a_difference_reproduces_or_contradicts_a_claim(tmp_path):
    spec = spec_of("tenants").model_copy(update={"seeds": 3})
    results = run_experiment(spec, RunOptions(out=tmp_path, num_workers=2))
    claim = next(item for item in lab_findings.CLAIMS if item.experiment == "tenants")
    assert lab_findings.judge(claim, results)[2] == lab_findings.REPRODUCED
    invalid = replace(claim, expected="higher")
    assert lab_findings.judge(invalid, results)[2] == lab_findings.CONTRADICTED
    same = replace(claim, policy="fcfs")
    assert lab_findings.judge(same, results)[2] == "equal"
    rows = [*lab_findings.claim_rows({"tenants": results})]
    assert len(rows) == 3 and "`vtc`" in rows[2] and rows[2].endswith("reproduced |")
    page = "a\n<!-- recorded: claims -->\nold\n<!-- end -->\nb\n"
    shown = lab_findings.replace_between(page, "claims", rows)
    assert "old" not in shown and shown.startswith("a\n") and shown.endswith("-->\nb\n")
