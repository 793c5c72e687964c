"""`python -m dovetail.executors.multiproc DESCRIPTOR PARENT`: one worker, until its executor goes.

DESCRIPTOR is that of the memory with the `Boot`, PARENT the id of the executor's process. When that
ends, in whatever way, this one ends at once, with all that it started in its session.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

from dovetail.clock import MonotonicClock
from dovetail.config import EngineConfig
from dovetail.executors.multiproc.boot import (
    Boot,
    Failed,
    Hello,
    Phase,
    PhaseName,
    Serving,
    read_boot,
    tell,
)
from dovetail.executors.multiproc.host import WorkerHost, make_worker
from dovetail.executors.multiproc.pulse import Pulse, PulseBoard
from dovetail.faults import fault
from dovetail.lifeline import end_with_parent
from dovetail.transport.ring import RingPlace, RingReader, RingWriter, make_ring
from dovetail.transport.ring_memory import RingShape
from dovetail.transport.told_error import ToldError

_PARTING_S = 1.0


def main() -> int:
    """Make the worker, tell the executor how that went, and serve."""
    fault("worker.boot")
    boot = read_boot(int(sys.argv[1]))
    sys.path[:] = boot.sys_path
    lifeline, orders, board = _take(boot)
    dismissed = _watch_executor(lifeline, boot.folder)
    status = 0
    with ExitStack() as ends:
        pulse = Pulse(board, boot.rank, MonotonicClock())
        answers, (place,) = make_ring(RingShape(num_readers=1))
        for end in (orders.close, answers.close, pulse.stop):
            ends.callback(end)
        fault("worker.hello")
        tell(lifeline, Hello(), place.descriptors)
        place.close()
        try:
            _work(boot, lifeline, orders, answers, ends)
        except BaseException as error:  # whatever it is, it is told, and this process ends
            # Before the worker is shut down, which may take long: whoever waits for an answer
            # hears of the end by the ring's.
            tell(lifeline, Failed(ToldError.of(error)))
            answers.close()
            status = 1
    # If nobody has dismissed it, the executor is gone, and the watch takes this session down.
    dismissed.wait(_PARTING_S)
    return status


def _take(boot: Boot) -> tuple[socket.socket, RingReader, PulseBoard]:
    lifeline_file, memory, bell, pulses = boot.descriptors
    for descriptor in boot.descriptors:
        os.set_inheritable(descriptor, False)
    board = PulseBoard(pulses)
    os.close(pulses)
    orders = RingPlace(index=boot.rank, descriptors=(memory, bell)).take()
    return socket.socket(fileno=lifeline_file), orders, board


def _watch_executor(lifeline: socket.socket, folder: str) -> threading.Event:
    """End with the executor; return what is set once it says that this process may end."""
    dismissed = threading.Event()
    parent_pid = int(sys.argv[2])
    end_with_parent(lifeline, parent_pid, Path(folder) if folder else None, heard=dismissed.set)
    return dismissed


def _work(
    boot: Boot,
    lifeline: socket.socket,
    orders: RingReader,
    answers: RingWriter,
    ends: ExitStack,
) -> None:
    """Make the worker and serve; `ends` is told how the worker is shut down."""

    def enter(phase: PhaseName) -> None:
        tell(lifeline, Phase(phase))

    fault("worker.make")
    worker, plugins = make_worker(boot, enter)
    ends.callback(worker.shutdown)
    enter("init_device")
    fault("worker.init_device")
    worker.init_device()
    enter("load_model")
    fault("worker.load_model")
    worker.load_model()
    fault("worker.serving")
    tell(lifeline, Serving.of(plugins.resolutions))
    connector = EngineConfig.model_validate_json(boot.config).extensions.kv_connector
    host = WorkerHost(worker, boot.rank, orders, answers, tells_transfers=connector is not None)
    host.serve()


if __name__ == "__main__":
    sys.exit(main())
