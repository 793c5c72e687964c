"""A soak run shows progress, continues after a failure, and resumes on the same source tree."""

import re
import sys
import time

import pytest
from soak.__main__ import LONG, PATHS, ROOT, make_sections
from soak.sections import Section, SoakRun


def section(name, code, *, limit_s=20.0, **options):
    return Section(name=name, command=(sys.executable, "-c", code), limit_s=limit_s, **options)


def test_each_file_with_a_partial_test_has_one_that_runs_all_cases():
    files = [
        text
        for path in ROOT.glob("*/*/tests/**/test_*.py")
        if "@pytest.mark.partial" in (text := path.read_text("utf-8"))
    ]
    assert len(files) >= 4
    assert all("@pytest.mark.soak" in text for text in files)


@pytest.fixture
def start(tmp_path):
    """Return a function that runs sections on a source tree and returns the exit code and printed
    lines."""

    def run(sections, tree="one", **options):
        lines = []
        soak = SoakRun(
            tmp_path / "soak", tree=tree, directory=tmp_path, say=lines.append, **options
        )
        return soak.run(sections), lines

    return run


def test_a_failed_section_does_not_stop_the_others(start):
    code, lines = start([section("a", "print('no'); raise SystemExit(3)"), section("b", "")])
    assert code == 1
    assert any(line.startswith("[1/2] a: FAILED (exit status 3") for line in lines)
    assert any(line.startswith("[2/2] b: passed after") for line in lines)
    assert "no" in lines  # the last lines of the failed section's log
    assert "soak: failed: a. Run the same command to try them again." in lines


def test_a_soak_run_resumes_with_the_sections_that_have_not_passed(start, tmp_path):
    mark = tmp_path / "ran"
    count = f"open({str(mark)!r}, 'a').write('x')"
    start([section("a", count), section("b", "raise SystemExit(1)")])
    code, lines = start([section("a", count), section("b", "")])
    assert code == 0
    assert mark.read_text() == "x"
    assert lines[0].startswith("[1/2] a: passed before in")


@pytest.mark.parametrize("tree", ["two", ""], ids=["another tree", "an unknown tree"])
def test_a_record_of_another_source_tree_is_ignored(start, tmp_path, tree):
    mark = tmp_path / "ran"
    count = section("a", f"open({str(mark)!r}, 'a').write('x')")
    start([count], tree=tree and "one")
    start([count], tree=tree)
    assert mark.read_text() == "xx"


def test_a_section_above_its_limit_is_killed_with_its_children(start, tmp_path):
    late = tmp_path / "late"
    child = f"import time; time.sleep(3); open({str(late)!r}, 'w')"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    code, lines = start([section("a", parent, limit_s=0.5)])
    assert code == 1
    assert any("longer than its limit" in line for line in lines)
    time.sleep(3)
    assert not late.exists()


def test_the_cpu_time_of_each_section_is_shown(start):
    busy = "import time\nwhile time.process_time() < 1.2: pass"
    _, lines = start([section("a", busy), section("b", "")])
    shown = [re.search(r"passed after \d+ s, (\d+) s of CPU time; \d+ s in all", x) for x in lines]
    first, second = (int(match[1]) for match in shown if match)
    assert first >= 1
    assert second < first


def test_progress_is_shown_while_a_section_runs(start):
    slow = "import time\nfor n in range(5): print('step', n, flush=True); time.sleep(0.3)"
    _, lines = start([section("a", slow)], report_every_s=0.4)
    assert any("step" in line for line in lines)


def test_the_processes_of_a_section_write_and_load_bytecode(start, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    (tmp_path / "module_a.py").write_text("")
    code, _ = start([section("a", "import module_a")])
    assert code == 0
    assert [file.name for file in (tmp_path / "soak" / "bytecode").rglob("module_a.*.pyc")]


def test_the_skipped_tests_of_a_section_are_shown(start):
    _, lines = start([section("a", "print('skipped: test_x (needs Node)\\nother')")])
    assert "  skipped: test_x (needs Node)" in lines
    assert not any("other" in line for line in lines)


@pytest.mark.costly
def test_sections_cover_every_directory_of_tests():
    named = {path.split("/")[0] for paths in PATHS.values() for path in paths}
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and path.name[0] != "."}
    with_tests = {name for name in folders if any((ROOT / name).rglob("test_*.py"))}
    assert len(with_tests) > 5
    assert with_tests <= named | {"tests", "bench"}
    sections = make_sections()
    assert len({item.name for item in sections}) == len(sections)
    assert all(LONG in item.command for item in sections if item.name.startswith("long"))
