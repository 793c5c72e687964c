"""The thread pool: runs the cases of `sanitize/` that test it, compiled without sanitizers."""

import os
import platform
import runpy
import shlex
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

import dovetail_cpu_kernels as native

MEMBER = Path(__file__).resolve().parents[1]
COMPILER = shlex.split(os.environ.get("CXX") or "c++")
SOURCES = ("src/native/team.cpp", "src/native/dispatch.cpp")
CASES = ("sanitize/team_cases.cpp", "sanitize/driver.cpp")

needs_compiler = pytest.mark.skipif(not shutil.which(COMPILER[0]), reason=f"no {COMPILER[0]}")
needs_library = pytest.mark.skipif(
    not native.status().available, reason=f"no native library: {native.status().reason}"
)


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    program = tmp_path_factory.mktemp("team") / "driver"
    flags = runpy.run_path(str(MEMBER / "setup.py"), run_name="setup")["FLAGS"]
    includes = [f"-I{MEMBER / folder}" for folder in ("include", "src/native", "sanitize")]
    sources = [str(MEMBER / source) for source in (*SOURCES, *CASES)]
    command = [*COMPILER, *flags, "-O1", *includes, *sources, "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return program


@pytest.mark.costly
@needs_compiler
@pytest.mark.parametrize(
    "case", ["items", "ranges", "nested", "callers", "starved", "hog", "fork", "parked"]
)
def test_every_work_item_is_processed_exactly_once(driver, case):
    command = [str(driver), "20", case]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "20 turns" in done.stdout, "no case was run"


@pytest.mark.costly
@needs_compiler
@pytest.mark.parametrize(
    ("case", "turns"),
    [
        ("grown", 5),
        ("long_pieces", 2),
        ("late_worker", 2),
        ("joins_midway", 2),
        ("continues_after_pauses", 2),
        ("leaves_core_of_caller", 2),
        ("signals", 5),
        ("float_mode", 5),
        ("without_memory", 1),
    ],
)
def test_the_team_handles_late_workers_signals_floating_point_modes_and_lack_of_memory(
    driver, case, turns
):
    if case == "float_mode" and platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("the case sets MXCSR")
    command = [str(driver), str(turns), case]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{turns} turns" in done.stdout, "no case was run"


@pytest.mark.costly
@needs_compiler
def test_busy_processes_of_a_case_end_with_the_driver(driver):
    """A wrong result ends the driver in the middle of a case."""
    process = subprocess.Popen([str(driver), "5000", "beside_a_hog"], stdout=subprocess.DEVNULL)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    try:
        for _ in range(2000):
            process.send_signal(signal.SIGSTOP)
            if hogs := children.read_text().split():
                break
            process.send_signal(signal.SIGCONT)
            time.sleep(0.01)
        time.sleep(0.1)  # a hog requests the signal when it starts
    finally:
        process.kill()
        process.wait()
    assert hogs
    for _ in range(200):
        if not any(map(_is_running, hogs)):
            break
        time.sleep(0.01)
    running = [pid for pid in hogs if _is_running(pid)]
    for pid in running:
        os.kill(int(pid), signal.SIGKILL)
    assert not running


def _is_running(pid):
    """Return whether the process exists and has not exited."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


CASES_OF_TWO_KINDS = """
#include "cases.h"
DK_CASE(code_with_levels) {}
DK_CASE_ONCE(code_without_levels) {}
int64_t dk_highest_level(void) { return 3; }
int64_t dk_supports_level(int64_t level) { return level != 2; }
int64_t dk_set_level(int64_t level) { return level; }
void dk_set_num_threads(int64_t) {}
"""


@pytest.mark.costly
@needs_compiler
def test_cases_of_code_without_levels_run_at_one_level(tmp_path):
    source, program = tmp_path / "cases.cpp", tmp_path / "driver"
    source.write_text(CASES_OF_TWO_KINDS)
    includes = [f"-I{MEMBER / folder}" for folder in ("include", "sanitize")]
    sources = [str(source), str(MEMBER / "sanitize/driver.cpp")]
    command = [*COMPILER, "-std=c++17", *includes, *sources, "-o", str(program)]
    subprocess.run(command, check=True)
    done = subprocess.run([str(program), "2"], capture_output=True, text=True, check=True)
    assert sorted(done.stdout.splitlines()) == [
        "level 0: code_with_levels, 2 turns",
        "level 0: code_without_levels, 2 turns",
        "level 1: code_with_levels, 2 turns",
        "level 3: code_with_levels, 2 turns",
    ]


@needs_library
def test_the_number_of_team_threads_is_stored_and_checked():
    try:
        native.set_num_threads(3)
        assert native.num_threads() == 3
        with pytest.raises(ValueError, match="1 to 64"):
            native.set_num_threads(0)
        assert native.num_threads() == 3
    finally:
        native.set_num_threads(1)


@pytest.mark.clock
@needs_library
def test_idle_kernel_threads_use_almost_no_cpu_time():
    """Workers spin for microseconds and then park: idle workers use almost no CPU time."""
    from dovetail_cpu_kernels import probe

    native.set_num_threads(4)
    memory = native.library().dk_alloc(8 << 20)
    try:
        probe.read_bandwidth(memory, 8 << 20)
        time.sleep(0.1)
        before = time.process_time()
        time.sleep(0.5)
        assert time.process_time() - before < 0.05
    finally:
        native.library().dk_free(memory, 8 << 20)
        native.set_num_threads(1)
