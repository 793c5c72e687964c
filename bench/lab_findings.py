"""Reproduce the claims of the policies' papers, and write docs/lab/findings.md.

Method: each experiment is a file of examples/findings, run by the simulator with the step-time
model of the file. A claim is a direction: a policy has a lower or higher metric than another one,
at one load. It is "reproduced" if the paired difference over the seeds has this direction and is
distinguishable from zero (95 %, paired t test and bootstrap), "contradicted" if it has the other
direction, and otherwise "not distinguishable". The speedups that the papers report are not
compared, because they depend on the machine.

    python bench/lab_findings.py [--only NAME,NAME] [--jobs N] [--out FOLDER] [--page FILE]
"""

from __future__ import annotations

import argparse
import os
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dovetail_lab.experiments.comparison import compare, with_verdicts
from dovetail_lab.experiments.experiment import RunOptions, run_experiment
from dovetail_lab.experiments.metric_table import METRICS
from dovetail_lab.experiments.results import Cell, Results
from dovetail_lab.experiments.spec import make_spec
from dovetail_lab.reports.tables import number_text

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "examples" / "findings"
PAGE = ROOT / "docs" / "lab" / "findings.md"
ENGINE = "sim"
REPRODUCED, CONTRADICTED = "reproduced", "**contradicted**"
OWN = "on_time"
TRACES = ("azure_conv", "azure_code", "mooncake_conversation", "mooncake_synthetic")


@dataclass(frozen=True)
class Claim:
    """A claim: a policy's metric is "lower" or "higher" (`expected`) than that of the baseline."""

    policy: str
    text: str
    experiment: str
    load: float
    metric: str
    expected: str
    baseline: str
    label: str = ""

    @property
    def name(self) -> str:
        """The name of the policy in the experiment."""
        return self.label or self.policy


CLAIMS = (
    Claim("fcfs", "The order of arrival bounds the longest wait (vLLM)", "long_and_short", 1.3,
          "starvation_age", "lower", "sjf"),
    Claim("fcfs", "Blocks on demand admit more requests than reserved blocks (SOSP 2023)",
          "batching", 3.0, "wait_mean", "lower", "orca"),
    Claim("priority", "The class with priority meets its objectives (vLLM)", "deadlines", 0.9,
          "slo_attainment", "higher", "fcfs"),
    Claim("static", "A static batch waits for its longest output (baseline of OSDI 2022)",
          "batching", 1.0, "norm_latency", "higher", "orca"),
    Claim("orca", "Joining at every iteration raises the throughput (OSDI 2022)", "batching", 1.0,
          "throughput", "higher", "static"),
    Claim("orca", "… and shortens the latency per token", "batching", 1.0, "norm_latency", "lower",
          "static"),
    Claim("prefill_first", "Prefill first gives the shortest time to the first token (vLLM v0)",
          "stalls", 0.8, "ttft_mean", "lower", "sarathi"),
    Claim("prefill_first", "… and stall decodes (OSDI 2024)", "stalls", 0.8, "gap_mean", "higher",
          "sarathi"),
    Claim("sarathi", "Chunks bound the time between tokens (OSDI 2024)", "stalls", 0.8, "gap_mean",
          "lower", "orca"),
    Claim("sarathi", "… and cost no throughput", "stalls", 0.8, "tpot_mean", "lower",
          "prefill_first"),
    Claim("sjf", "Shortest first has a lower mean latency (Smith 1956)", "lengths", 1.1, "e2e_mean",
          "lower", "fcfs"),
    Claim("sjf", "… also with a rough ranking (NeurIPS 2024)", "noisy_lengths", 1.1, "e2e_mean",
          "lower", "fcfs"),
    Claim("sjf", "… and long requests starve", "long_and_short", 1.3, "starvation_age", "higher",
          "fcfs"),
    Claim("srpt", "Preemption lowers the mean latency further (Schrage 1968)", "lengths", 1.1,
          "e2e_mean", "lower", "sjf"),
    Claim("srpt", "… at the price of recomputation", "pressure", 1.0, "recompute_share", "higher",
          "fcfs"),
    Claim("hrrn", "A lower mean time to the first token than fcfs (SGLang)", "long_and_short", 1.3,
          "ttft_mean", "lower", "fcfs"),
    Claim("hrrn", "… without the starvation of sjf", "long_and_short", 1.3, "starvation_age",
          "lower", "sjf"),
    Claim("edf", "Deadlines are met below the capacity (Liu and Layland 1973)", "deadlines", 0.9,
          "slo_attainment", "higher", "fcfs"),
    Claim("edf", "… and missed in a row under overload (domino effect)", "deadlines", 1.5,
          "slo_attainment", "lower", "on_time"),
    Claim("vtc", "The service of two busy tenants is nearly equal (OSDI 2024)", "tenants", 1.3,
          "service_gap", "lower", "fcfs"),
    Claim("lpm", "Equal prefixes in a row raise the hit rate (NeurIPS 2024)", "prefixes", 1.6,
          "hit_rate", "higher", "fcfs", label="lpm_no_limit"),
    Claim("lpm", "… and the throughput", "prefixes", 1.6, "throughput", "higher", "fcfs",
          label="lpm_no_limit"),
    Claim("lpm", "… and rare prefixes starve (SGLang: P99 +253 %)", "prefixes", 1.6,
          "starvation_age", "higher", "fcfs", label="lpm_no_limit"),
    Claim("lpm", "The option max_wait_s prevents starvation, at the cost of cache hits", "prefixes",
          1.6, "starvation_age", "lower", "lpm_no_limit"),
    Claim("dlpm", "Fairer than lpm (arXiv:2501.14312)", "prefixes", 1.6, "service_gap", "lower",
          "lpm_no_limit"),
    Claim("dlpm", "… with more hits than vtc", "prefixes", 1.6, "hit_rate", "higher", "vtc"),
    Claim("mlfq", "Lower latency than the order of arrival, without knowing lengths (NSDI 2026)",
          "feedback", 0.9, "e2e_mean", "lower", "arrival_order"),
    Claim("mlfq", "Preemption without swapping computes much again", "pressure", 1.0,
          "recompute_share", "higher", "fcfs", label="mlfq_preempt"),
)  # fmt: skip


def run(name: str, out: Path, jobs: int) -> Results:
    """Run an experiment file; finished runs of the directory are reused."""
    fields = tomllib.loads((FOLDER / f"{name}.toml").read_text("utf-8"))
    print(name, flush=True)
    return run_experiment(make_spec(fields), RunOptions(out=out, num_workers=jobs))


def judge(claim: Claim, results: Results) -> tuple[str, str, str]:
    """Return (values, difference, verdict) of a claim."""
    result = compare(results, ENGINE, claim.load, claim.metric, claim.name, claim.baseline)
    if result is None:
        return "–", "–", "no value"
    (judged,) = with_verdicts([result], results.spec.confidence)
    difference = judged.difference
    values = f"{number_text(difference.left)} → {number_text(difference.right)}"
    shown = f"{difference.relative:+.0%}" if difference.left else number_text(difference.t.mean)
    if judged.verdict not in ("better", "worse", "higher", "lower"):
        return values, shown, judged.verdict
    direction = "higher" if difference.t.mean > 0 else "lower"
    return values, shown, REPRODUCED if direction == claim.expected else CONTRADICTED


def claim_rows(results: dict[str, Results]) -> Iterable[str]:
    """Yield the rows of the table of claims."""
    yield "| policy | claim | metric, compared with | values | difference | result |"
    yield "|---|---|---|---|---|---|"
    for claim in CLAIMS:
        if claim.experiment not in results:
            continue
        values, shown, verdict = judge(claim, results[claim.experiment])
        metric = METRICS[claim.metric]
        unit = f" ({metric.unit})" if metric.unit else ""
        where = f"{metric.label}{unit}: {claim.expected} than `{claim.baseline}`"
        cells = (f"`{claim.name}`", claim.text, where, values, shown, verdict)
        yield f"| {' | '.join((*cells[:2], cells[2], *cells[3:]))} |"


def mean(results: Results, policy: str, metric: str) -> float:
    """Return the mean of a metric over the seeds."""
    cell = Cell(engine=ENGINE, policy=policy, load=results.spec.loads[0])
    values = results.values(cell, metric)
    return sum(values.values()) / len(values) if values else float("nan")


def goodput_rows(results: dict[str, Results]) -> Iterable[str]:
    """Yield the table rows that compare our own policy with the best other policy."""
    yield (
        "| trace | best other policy | goodput (requests/s) | requests on time "
        "| TTFT, 90th percentile (s) | longest wait (s) |"
    )
    yield "|---|---|---|---|---|---|"
    for trace in TRACES:
        measured = results.get(f"goodput_{trace}")
        if measured is None:
            continue
        others = [name for name in measured.policies if name != OWN]
        best = max(others, key=lambda name: mean(measured, name, "goodput"))
        cells = [trace.replace("_", ":", 1), f"`{best}`"]
        for metric in ("goodput", "slo_attainment", "ttft_p90", "starvation_age"):
            claim = Claim(OWN, "", "", measured.spec.loads[0], metric, "higher", best)
            values, shown, verdict = judge(claim, measured)
            word = verdict.replace(REPRODUCED, "higher").replace(CONTRADICTED, "lower")
            cells.append(f"{values} ({shown}, {word})")
        yield f"| {' | '.join(cells)} |"


def replace_between(page: str, name: str, rows: Iterable[str]) -> str:
    """Return the page with `rows` between the markers of the table `name`."""
    begin, end = f"<!-- recorded: {name} -->", "<!-- end -->"
    head, _, rest = page.partition(begin)
    _, _, tail = rest.partition(end)
    return f"{head}{begin}\n{chr(10).join(rows)}\n{end}{tail}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the experiments and write the tables of the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="names of experiments, separated by commas")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, default=ROOT / ".bench" / "findings")
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args(arguments)
    names = [claim.experiment for claim in CLAIMS] + [f"goodput_{trace}" for trace in TRACES]
    only = set(filter(None, options.only.split(",")))
    results = {
        name: run(name, options.out, options.jobs)
        for name in dict.fromkeys(names)
        if not only or name in only
    }
    rows = {"claims": [*claim_rows(results)], "goodput": [*goodput_rows(results)]}
    for table in rows.values():
        print("\n".join(table), "\n")
    if not only:
        page = options.page.read_text("utf-8")
        for name, table in rows.items():
            page = replace_between(page, name, table)
        options.page.write_text(page, "utf-8")


if __name__ == "__main__":
    main()
