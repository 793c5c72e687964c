"""If the system does not permit more threads, an error or a warning says so.

OpenMP would end the process.
"""

import subprocess
import sys
import threading

import pytest

from dovetail.errors import CapacityError
from dovetail_cpu.native_library import find_library
from dovetail_cpu.threads import supply
from dovetail_cpu.threads.supply import start_team, start_threads

LIMITED = """
import os, resource, sys
from dovetail.errors import CapacityError
from dovetail_cpu.native_library import find_library
from dovetail_cpu.threads.supply import start_team, start_threads
import dovetail_cpu_kernels.probe
library = find_library()
if os.getuid() == 0:
    os.setuid(65534)  # root has no limit
resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
try:
    start_threads(4)
except CapacityError as error:
    print(error)
print("team of", start_team(library, 4) if library else 1)
"""


class Refused(threading.Thread):
    """A thread that the system does not start if `num_left` threads were started before."""

    num_left = 0

    def start(self):
        if not Refused.num_left:
            raise RuntimeError("can't start new thread")
        Refused.num_left -= 1
        super().start()


def test_the_error_names_the_number_of_threads_that_the_system_permits(monkeypatch):
    monkeypatch.setattr(supply.threading, "Thread", Refused)
    Refused.num_left, before = 2, threading.active_count()
    with pytest.raises(CapacityError, match=r"num_threads=8: .* only 3 .*pids\.max"):
        start_threads(8)
    assert threading.active_count() == before


@pytest.mark.costly
@pytest.mark.skipif(sys.platform != "linux", reason="sets limits of Linux")
def test_a_process_without_more_threads_continues_after_a_typed_error():
    command = [sys.executable, "-c", LIMITED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "num_threads=4: the system permits only 1" in lines[0] and lines[1] == "team of 1"


@pytest.mark.skipif(find_library() is None, reason="no native library")
def test_the_team_has_the_requested_number_of_threads():
    library = find_library()
    before = library.dk_num_threads()
    try:
        assert start_team(library, 3) == 3
        assert start_team(library, 1) == 1
    finally:
        library.dk_set_num_threads(before)
