"""Reports: one page without external requests, charts that show the data, Chrome traces."""

import json
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from dovetail.errors import UserError
from dovetail_lab.experiments.experiment import RunOptions, run_experiment
from dovetail_lab.experiments.spec import make_spec
from dovetail_lab.reports import figures
from dovetail_lab.reports.figures import chart_style
from dovetail_lab.reports.html_page import Section, render_page
from dovetail_lab.reports.load_charts import draw_curves, draw_differences
from dovetail_lab.reports.perfetto import trace_events
from dovetail_lab.reports.report import write_report
from dovetail_lab.reports.run_charts import draw_distributions, draw_gantt, draw_tenants
from dovetail_lab.reports.tables import (
    TextTable,
    number_text,
    percent_text,
    policy_table,
    report_load,
    winner_table,
)
from dovetail_lab.simulation.results import NEVER, RequestColumns, StepColumns

pytest.importorskip("matplotlib")
NS = 1_000_000_000
WORKER = (sys.executable, str(Path(__file__).with_name("queue_worker.py")))
SLO = {"name": "chat", "ttft_ms": 2000}
FIELDS = {
    "name": "a <b>bold</b> name",
    "loads": [0.5, 0.9],
    "seeds": 6,
    "workload": {
        "trace": "azure:conv",
        "num_requests": 300,
        "tenants": 2,
        "slo_classes": [SLO],
    },
}


def run(out, policies, **fields):
    spec = make_spec({**FIELDS, "policies": list(policies), **fields})
    return run_experiment(spec, RunOptions(out=out, num_workers=2, command=WORKER))


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """Return the results of two policies and one that fails, their report and its directory."""
    out = tmp_path_factory.mktemp("report")
    results = run(out, ("fcfs", "shortest", "raises"))
    return results, write_report(results, out), out


def drawn(name, draw, *arguments):
    with chart_style(name):
        return draw(*arguments)


@pytest.mark.costly
def test_the_page_makes_no_external_requests_and_escapes_names(done):
    _, files, _ = done
    page = files.page.read_text()
    assert not re.search(r'(?:src|href|xlink:href)="(?!#)', page)
    assert not re.search(r"<(?:script|link|iframe|img|object)\b|@import|url\((?!#)", page)
    assert "a &lt;b&gt;bold&lt;/b&gt; name" in page and "<b>bold" not in page


def test_the_page_has_every_section_and_names_what_is_missing(done):
    _, files, _ = done
    page = files.page.read_text()
    for title in (
        "Policies",
        "Load",
        "Differences",
        "Distributions",
        "Requests over time",
        "Tenants",
        "Cache and queues",
        "Runs",
        "Method",
    ):
        assert f"<h2>{title}</h2>" in page
    assert "12 of 36 runs failed" in page and "the policy is broken" in page
    assert page.count("<svg") == page.count("</svg>") == 6


def test_every_chart_is_also_a_valid_png_and_svg(done):
    _, files, out = done
    assert len(files.charts) == 12
    for path in files.charts:
        assert path.parent == out / "figures"
        if path.suffix == ".svg":
            assert ElementTree.parse(path).getroot().tag.endswith("svg")
        else:
            assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000


def test_the_curves_show_the_means_over_seeds(done):
    results, _, _ = done
    figure = drawn("load", draw_curves, results, "sim", ["e2e_mean"])
    lines = {line.get_label(): line for line in figure.axes[0].get_lines()}
    assert set(lines) == {"fcfs", "shortest"}
    loads, means = lines["fcfs"].get_data()
    runs = [item for item in results.records if item.key.policy == "fcfs" and item.key.load == 0.9]
    expected = sum(item.values["e2e_mean"] for item in runs) / 6
    assert list(loads) == [0.5, 0.9] and means[1] == pytest.approx(expected)
    assert drawn("load", draw_curves, results, "real") is None


def test_a_difference_that_is_not_significant_is_drawn_as_a_hollow_bar(done):
    results, _, _ = done
    figure = drawn("bars", draw_differences, results, "sim", 0.9, ["e2e_mean", "service_gap"])
    clear, unclear = (axis.patches[0] for axis in figure.axes[:2])
    assert clear.get_facecolor()[3] == 1 and clear.get_width() < 0
    assert unclear.get_facecolor()[3] == 0


@pytest.mark.costly
def test_the_cumulative_distribution_ends_at_one_unless_requests_are_unfinished(done, tmp_path):
    results, _, _ = done
    figure = drawn("cdf", draw_distributions, results, "sim", 0.9)
    ends = [line.get_ydata()[-1] for line in figure.axes[0].get_lines()]
    assert ends == [1.0, 1.0]
    censored = run(tmp_path, ("unfinished",), seeds=1, loads=[0.9], drain=0.0)
    figure = drawn("cdf", draw_distributions, censored, "sim", 0.9)
    assert figure.axes[2].get_lines()[0].get_ydata()[-1] < 1.0


def test_the_charts_of_all_policies_share_their_axes(done):
    results, _, _ = done
    figure = drawn("gantt", draw_gantt, results, "sim", 0.9, ["fcfs", "shortest", "raises"])
    left, right = figure.axes
    assert left.get_xlim() == right.get_xlim() and left.get_title(loc="left") == "fcfs"
    assert drawn("gantt", draw_gantt, results, "sim", 0.9, ["raises"]) is None


@pytest.mark.costly
def test_service_curves_need_two_tenants(done, tmp_path):
    results, _, _ = done
    figure = drawn("tenants", draw_tenants, results, "sim", 0.9)
    assert [line.get_label() for line in figure.axes[0].get_lines()] == ["tenant 0", "tenant 1"]
    workload = {"synthetic": "chat", "num_requests": 30}
    alone = run(tmp_path, ("fcfs",), seeds=1, workload=workload)
    assert drawn("tenants", draw_tenants, alone, "sim", 0.5) is None


def test_tables_name_winners_and_ties(done):
    results, _, _ = done
    table = winner_table(results, "sim")
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["End-to-end latency, mean"][1] == "shortest"
    assert rows["Service difference"][0] == "not distinguishable: fcfs, shortest"
    means = policy_table(results, "sim", 0.9)
    assert [row[0] for row in means.rows] == ["fcfs", "shortest", "raises"]
    assert set(means.rows[2][1:]) == {"–"} and " ± " in means.rows[0][1]


@pytest.mark.costly
def test_the_report_of_equal_policies_names_no_winner_and_its_curves_are_visible(tmp_path):
    results = run(tmp_path, ("fcfs", "sjf"), seeds=2)  # the queue serves both in the same order
    assert list(winner_table(results, "sim").rows) == [["all metrics", "equal", "equal"]]
    figure = drawn("load", draw_curves, results, "sim", ["gap_mean"])
    (axis,) = figure.axes
    assert axis.get_ylim()[1] > 1.05 * max(axis.get_lines()[0].get_ydata())


def test_a_wide_table_is_transposed():
    table = TextTable(title="t", headings=["policy", "a", "b", "c"], rows=[["x", "1", "2", "3"]])
    turned = table.oriented()
    assert list(turned.headings) == ["metric", "x"] and list(turned.rows[2]) == ["c", "3"]
    assert turned.oriented() is turned


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (1234.5, "1,234"), (0.012345, "0.0123"), (-3.14159, "-3.14"), (1e-9, "0.000000")],
)
def test_numbers_have_three_significant_digits(value, text):
    assert number_text(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.123, "+12%"), (-0.0123, "-1.2%"), (0.00012, "+0.012%"), (12.5, "+1250%"), (0.0, "")],
)
def test_percentages_have_two_significant_digits(value, text):
    assert percent_text(value) == text
    assert percent_text(float("nan")) == ""


def test_all_strings_in_html_pages_are_escaped():
    table = TextTable(title="<t>", headings=["<h>"], rows=[["<c>"]])
    section = Section(title="<s>", paragraphs=["<p1>"], warnings=["<w>"], tables=[table])
    page = render_page("<title>", "<sub>", [section])
    for text in ("<t>", "<h>", "<c>", "<s>", "<p1>", "<w>", "<sub>"):
        assert text not in page


def test_charts_of_single_runs_use_the_highest_load_up_to_90_percent():
    assert report_load([0.5, 0.85, 1.1]) == 0.85 and report_load([1.2, 1.0]) == 1.0


def test_a_trace_has_steps_phases_and_counters():
    requests, steps = RequestColumns(), StepColumns()
    for column in vars(requests).values():
        column.extend([0, 0])
    requests.admitted_ns[0], requests.first_token_ns[0] = NS, 2 * NS
    requests.finished_ns[0] = requests.last_token_ns[0] = 5 * NS
    requests.admitted_ns[1] = requests.first_token_ns[1] = requests.finished_ns[1] = NEVER
    requests.last_token_ns[1] = NEVER
    for values in ((0, NS, 1, 10, 0, 1, 1, 3), (NS, NS, 4, 0, 8, 2, 0, 4)):
        for column, value in zip(vars(steps).values(), values, strict=True):
            column.append(value)
    events = list(trace_events(requests, steps, ["a", "b"]))
    spans = [(item["name"], item["ts"], item["dur"]) for item in events if item["ph"] == "X"]
    assert spans == [
        ("prefill", 0.0, 1e6),
        ("decode", 1e6, 1e6),
        ("waiting", 0.0, 1e6),
        ("prefill", 1e6, 1e6),
        ("decode", 2e6, 3e6),
    ]
    counters = [item["args"]["value"] for item in events if item["ph"] == "C"]
    assert counters == [3, 1, 1, 4, 2, 0]


def test_the_traces_of_a_report_are_json_for_perfetto(done):
    _, files, _ = done
    assert [path.name for path in files.traces] == ["fcfs_sim_0.9.json", "shortest_sim_0.9.json"]
    events = json.loads(files.traces[0].read_text())["traceEvents"]
    names = {item["args"]["name"] for item in events if item["name"] == "thread_name"}
    assert len(names) == 300
    assert {item["name"] for item in events if item["ph"] == "X"} >= {
        "waiting",
        "prefill",
        "decode",
    }


def test_a_report_without_a_complete_run_is_rejected(done, tmp_path):
    results, _, _ = done
    empty = type(results)(
        spec=results.spec,
        capacity=1.0,
        records=[item for item in results.records if not item.ok],
        folder=results.folder,
    )
    with pytest.raises(UserError, match=r"no run is complete.*is broken"):
        write_report(empty, tmp_path)


def test_the_error_for_missing_matplotlib_names_the_extra_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match=r"dovetail-lab\[report\]"), chart_style("x"):
        pass
    assert figures.color_of(0) != figures.color_of(1)
