"""The GPU check writes a complete result, even if a section fails, hangs or lacks a package."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
import zipfile
from pathlib import Path

import pytest
from gpu.catalog import SECTIONS, TOTAL_S, section
from gpu.report import BROKEN, DIED, FAILED, LACKS, LATE, NO_DEVICE, OK
from gpu.tables import aims_missed, render_table
from gpu_check.made_up_runs import run_command, run_sections

from dovetail_devkit.harnesses.process_tree import is_running

SMALL_S = 40.0

FINE = "def run(task, report):\n    report.metric('answer', 42.0, unit='apples')\n"
RAISES = FINE + "    raise KeyError('lost')\n"
HANGS = FINE + "    import time\n    time.sleep(60)\n"
DIES = FINE + "    import os, sys\n    print('farewell', flush=True)\n    os._exit(7)\n"
LACKING = FINE + "    import a_module_that_does_not_exist\n"
WRONG = FINE + "    report.fail('it is off by one')\n    report.note('by the way')\n"
NEEDY = "from gpu.report import NeedsDeviceError\n\n" + FINE
NEEDY += "    raise NeedsDeviceError('torch has no detector')\n"
ORPHANS = FINE + (
    "    import subprocess, sys\n"
    "    child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
    "    report.fact('child', child.pid)\n"
    "    child.wait()\n"
)


@pytest.mark.costly
def test_a_failing_section_does_not_affect_other_sections(tmp_path):
    sources = {
        "raises": RAISES,
        "dies": DIES,
        "lacking": LACKING,
        "wrong": WRONG,
        "needy": NEEDY,
        "fine": FINE,
    }
    code, run, _ = run_sections(tmp_path, sources)
    actual = run["sections"]
    assert {name: item["state"] for name, item in actual.items()} == {
        "machine": OK,
        "raises": BROKEN,
        "dies": DIED,
        "lacking": LACKS,
        "wrong": FAILED,
        "needy": NO_DEVICE,
        "fine": OK,
    }
    assert code == 1
    assert "KeyError: 'lost'" in actual["raises"]["why"]
    assert "exit code 7" in actual["dies"]["why"] and "farewell" in actual["dies"]["why"]
    assert "a_module_that_does_not_exist is not installed" in actual["lacking"]["why"]
    assert actual["wrong"]["why"] == "it is off by one" and actual["wrong"]["notes"] == [
        "by the way"
    ]
    # Metrics measured before the failure are kept.
    values = [[metric["value"] for metric in item["metrics"]] for item in actual.values()]
    assert values == [[], *[[42.0]] * 6]


def test_a_section_that_hangs_is_killed_with_its_child_processes(tmp_path):
    code, run, _ = run_sections(tmp_path, {"hangs": ORPHANS, "fine": FINE}, deadline_s=2.0)
    hung = run["sections"]["hangs"]
    assert (code, hung["state"], run["sections"]["fine"]["state"]) == (1, LATE, OK)
    assert 2.0 <= hung["seconds"] < 8.0 and "after 2 s" in hung["why"]
    assert hung["metrics"][0]["value"] == 42.0
    for _ in range(50):
        if not is_running(hung["facts"]["child"]):
            break
        time.sleep(0.1)
    assert not is_running(hung["facts"]["child"])


def test_sections_that_begin_after_the_total_deadline_are_reported_as_late(tmp_path):
    code, run, _ = run_sections(tmp_path, {"hangs": HANGS, "fine": FINE}, total_s=3.5)
    states = {name: item["state"] for name, item in run["sections"].items()}
    assert (code, states["hangs"], states["fine"]) == (1, LATE, LATE)
    assert "3.5 s total limit has passed" in run["sections"]["fine"]["why"]


def test_without_a_device_every_section_reports_that_it_needs_one(tmp_path):
    machine = "def run(task, report):\n    report.fact('device', {'type': ''})\n"
    code, run, _ = run_sections(tmp_path, {"fine": FINE, "machine": machine}, device="auto")
    assert (code, run["sections"]["fine"]["state"]) == (2, NO_DEVICE)
    assert "no GPU" in render_table(run)


@pytest.mark.parametrize("source", [RAISES, LACKING, WRONG])
def test_a_failed_machine_section_is_reported_as_a_failure_and_not_as_a_missing_device(
    source, tmp_path
):
    code, run, _ = run_sections(tmp_path, {"fine": FINE, "machine": source}, device="auto")
    fine = run["sections"]["fine"]
    assert (code, fine["state"]) == (1, NO_DEVICE)
    assert "the section machine failed" in fine["why"]
    assert run["sections"]["machine"]["why"] in fine["why"]
    assert ("select another Python with GPU_PYTHON" in fine["why"]) == (source == LACKING)


def test_later_sections_can_use_the_time_that_earlier_sections_did_not_need(tmp_path):
    output = "def run(task, report):\n    report.fact('limit', task.deadline_s)\n"
    settings = {"total_s": 60.0, "deadline_s": 10.0, "slack": 1.5}
    _, run, _ = run_sections(tmp_path, {"one": output, "two": output}, **settings)
    limits = [run["sections"][name]["facts"]["limit"] for name in ("one", "two")]
    assert limits == [15.0, 15.0]
    folder = tmp_path / "short"
    folder.mkdir()
    settings["total_s"] = 12.0
    _, run, _ = run_sections(folder, {"one": output, "two": output}, **settings)
    limits = [run["sections"][name]["facts"]["limit"] for name in ("one", "two")]
    assert 0 < limits[0] < 6.0 and limits[0] < limits[1] < 12.0


@pytest.mark.slow
def test_the_command_runs_every_section_on_a_cpu(tmp_path):
    result = tmp_path / "result.json"
    start = _seconds_of_children()
    done = run_command("--device", "cpu", "--small", "--json", result, timeout=280)
    took = _seconds_of_children() - start
    assert done.returncode == 0, done.stdout + done.stderr
    run = json.loads(result.read_text("utf-8"))
    states = {name: item["state"] for name, item in run["sections"].items()}
    assert states == {item.name: OK if item.on_cpu else NO_DEVICE for item in SECTIONS}
    for spec in SECTIONS:
        measured = {metric["name"] for metric in run["sections"][spec.name]["metrics"]}
        assert spec.on_cpu or not measured
    assert run["sections"]["conformance"]["plugins"]["platform:cpu"]["passed"] >= 5
    assert {"max_error", "qualify", "equal"} <= _names(run, "parity")
    assert _names(run, "parity") - _names(run, "backends") == {"bf16_kl", "bf16_top1"}
    assert {"one", "many"} <= _names(run, "small_model")
    assert run["commit"] != "unknown" and run["versions"]["torch"] != "absent"
    assert "needs a GPU" in done.stdout and "qualify" not in done.stderr
    assert took < SMALL_S


def _seconds_of_children() -> float:
    """Return the CPU time of child processes. Wall-clock time would depend on other processes."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _names(run: dict, name: str) -> set[str]:
    return {metric["name"] for metric in run["sections"][name]["metrics"]}


@pytest.mark.costly
@pytest.mark.skipif(bool(os.environ.get("CUDA_VISIBLE_DEVICES")), reason="there may be a device")
def test_without_the_device_the_command_exits_with_status_2_and_runs_no_section(tmp_path):
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    result = tmp_path / "result.json"
    done = run_command("--device", "cuda", "--sections", "probes", "--json", result)
    assert done.returncode == 2
    assert "This check needs a GPU" in done.stdout
    run = json.loads(result.read_text("utf-8"))
    assert run["sections"]["probes"]["state"] == NO_DEVICE


@pytest.mark.costly
def test_a_bundle_is_installed_without_an_index_and_takes_precedence(tmp_path):
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    _write_index(bundle)
    # Replaces a module that the section needs, to show which version is imported.
    _write_wheel(bundle, "statistics", "raise RuntimeError('the bundle takes precedence')\n")
    result = tmp_path / "result.json"
    options = ("--device", "cpu", "--small", "--sections", "probes", "--json", result)
    done = run_command(*options, bundle=bundle)
    probes = json.loads(result.read_text("utf-8"))["sections"]["probes"]
    assert probes["state"] == BROKEN and "the bundle takes precedence" in probes["why"], done.stderr
    assert "the bundle is of commit abc, this checkout of" in done.stderr


@pytest.mark.costly
def test_a_bundle_for_another_python_is_ignored(tmp_path):
    _write_index(tmp_path, python="3.7")
    _write_wheel(tmp_path, "statistics", "raise RuntimeError('the bundle was taken')\n")
    options = ("--device", "cpu", "--small", "--sections", "machine")
    done = run_command(*options, "--json", tmp_path / "result.json", bundle=tmp_path)
    assert done.returncode == 0, done.stdout
    assert "is for Python 3.7" in done.stderr and "ignored" in done.stderr


@pytest.mark.costly
def test_a_bundle_that_cannot_be_installed_is_reported(tmp_path):
    _write_index(tmp_path)
    (tmp_path / "broken-1.0-py3-none-any.whl").write_bytes(b"no wheel")
    done = run_command("--json", tmp_path / "result.json", bundle=tmp_path)
    assert done.returncode == 1 and "cannot be installed" in done.stderr


def _write_index(folder: Path, python: str = "") -> None:
    here = ".".join(map(str, sys.version_info[:2]))
    manifest = {"commit": "abc", "python": python or here, "files": {}}
    (folder / "bundle.json").write_text(json.dumps(manifest))


def _write_wheel(folder: Path, module: str, source: str) -> None:
    info = f"{module}-1.0.dist-info"
    files = {
        f"{module}.py": source,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},,\n" for name in files) + f"{info}/RECORD,,\n"
    with zipfile.ZipFile(folder / f"{module}-1.0-py3-none-any.whl", "w") as wheel:
        for name, text in {**files, f"{info}/RECORD": record}.items():
            wheel.writestr(name, text)


def test_the_sum_of_section_deadlines_is_within_the_total_deadline():
    assert sum(item.deadline_s for item in SECTIONS) <= 1.3 * TOTAL_S
    assert SECTIONS[0].name == "machine" and SECTIONS[0].on_cpu
    assert len({item.name for item in SECTIONS}) == len(SECTIONS)


def test_a_measurement_that_misses_its_target_is_marked_as_missed(tmp_path):
    def run(**values):
        metrics = [
            {"name": name, "value": value, "unit": "", "note": ""} for name, value in values.items()
        ]
        by_name = {"state": OK, "seconds": 1.0, "metrics": metrics, "plugins": {}, "notes": []}
        return {
            "small": False,
            "device": {"type": "cuda", "name": "A chip"},
            "date": "2026-11-21",
            "commit": "abc",
            "versions": {},
            "seconds": 1.0,
            "sections": {"small_model": by_name},
        }

    assert not aims_missed(run(one_h200=850.0, many_h200=22000.0, host_ms=3.0))
    assert aims_missed(run(one_h200=849.0, many_h200=22000.0, host_ms=3.1)) == [
        "small_model: host_ms",
        "small_model: one_h200",
    ]
    assert aims_missed(run(one_h200=float("nan"))) == ["small_model: one_h200"]
    assert aims_missed(run(one_h200=1.0) | {"small": True}) == []
    lines = render_table(run(one_h200=849.0, many_h200=23000.0)).splitlines()
    (one,) = [line for line in lines if "one request" in line]
    (many,) = [line for line in lines if "256 requests" in line]
    assert one.endswith("≥ 850 MISSED") and "MISSED" not in many
    assert section("small_model").metrics


@pytest.mark.costly
def test_gpu_check_sections_run_their_device_code_on_a_fake_device(tmp_path):
    run = _run_on_the_fake_device(tmp_path, "memory", "small_model")
    assert {"device_mib", "host_mib"} == _names(run, "memory")
    assert _names(run, "small_model") == {metric.name for metric in section("small_model").metrics}


@pytest.mark.soak
def test_parity_and_options_of_memory_and_speed_are_checked_on_a_fake_device(tmp_path):
    sections = ("parity", "graphs", "sleep", "offload", "compilation", "fp8_cache", "vllm")
    run = _run_on_the_fake_device(tmp_path, *sections)
    states = {name: item["state"] for name, item in run["sections"].items()}
    done = dict.fromkeys(("machine", *sections[:5]), OK)
    assert states == {**done, "fp8_cache": NO_DEVICE, "vllm": LACKS}
    for name in ("parity", "graphs"):
        values = {item["name"]: item["value"] for item in run["sections"][name]["metrics"]}
        assert values["max_error"] <= 1e-4 and values["equal"] == 100
    assert _names(run, "sleep") == {"equal", "released"}
    for name in ("offload", "compilation"):
        metrics = {item["name"]: item["value"] for item in run["sections"][name]["metrics"]}
        assert metrics["equal"] == 100 and metrics["ratio"] > 0


def _run_on_the_fake_device(folder: Path, *sections: str) -> dict:
    result = folder / "result.json"
    options = ("--sections", *sections, "--slack", 6, "--json", result)
    done = run_command("--device", "fake", "--small", *options, timeout=560)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(result.read_text("utf-8"))
