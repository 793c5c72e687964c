"""`python -m dovetail.engine.process FOLDER PARENT LIFELINE VITALS`: an engine core with a parent.

PARENT is the parent's process id, LIFELINE the descriptor of a socket whose other end it holds.
When the parent goes, in whatever way, this process ends at once, with all that it started in its
session. VITALS is the descriptor of the memory for its signs of life.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import zmq

from dovetail.clock import MonotonicClock
from dovetail.config import EngineConfig
from dovetail.engine.process.boot import INPUT_SOCKET, OUTPUT_SOCKET, Boot, bind_private, read_boot
from dovetail.engine.process.server import EngineServer
from dovetail.engine.process.vital_signs import VitalSigns
from dovetail.engine.start import StartedEngine, start_engine
from dovetail.errors import DovetailError
from dovetail.faults import fault
from dovetail.lifeline import end_with_parent
from dovetail.plugins.containment import describe_failure
from dovetail.transport.messages import MAX_MESSAGE_BYTES, Died, Ready, pack

_LINGER_MS = 2000


def main() -> int:
    """Start the engine, tell the parent how that went, and serve."""
    folder, lifeline = Path(sys.argv[1]), socket.socket(fileno=int(sys.argv[3]))
    lifeline.set_inheritable(False)
    end_with_parent(lifeline, int(sys.argv[2]), folder)
    vitals = VitalSigns(int(sys.argv[4]), MonotonicClock())
    os.close(int(sys.argv[4]))
    fault("engine.boot")
    boot = read_boot(folder)
    sys.path[:] = boot.sys_path
    context = zmq.Context()
    inbox, outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    inbox.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)  # before it is in memory
    inbox.setsockopt(zmq.RCVHWM, 0)  # a front end never waits for the engine in order to send
    outbox.setsockopt(zmq.LINGER, _LINGER_MS)
    fault("engine.bind")
    bind_private(inbox, folder, INPUT_SOCKET)
    bind_private(outbox, folder, OUTPUT_SOCKET)
    try:
        return _serve(boot, inbox, outbox, vitals)
    finally:
        vitals.stop()
        inbox.close(linger=0)
        outbox.close()  # waits _LINGER_MS at most for the last words to go out
        context.term()


def _serve(
    boot: Boot, inbox: zmq.Socket[bytes], outbox: zmq.Socket[bytes], vitals: VitalSigns
) -> int:
    clock = MonotonicClock()
    try:
        config = EngineConfig.model_validate_json(boot.config)
        started = start_engine(config, clock=clock, tell_phase=vitals.enter_phase)
    except DovetailError as error:
        outbox.send(pack(Died(str(error), kind=type(error).__name__)))
        return 1
    except Exception as error:
        outbox.send(pack(Died(describe_failure(error))))
        return 1
    vitals.enter_phase("")
    vitals.watch(started.core.executor.silence_s)
    try:
        fault("engine.ready")
        outbox.send(pack(_ready(started)))
        return EngineServer(
            started.core,
            inbox,
            outbox,
            ahead=bool(started.config.scheduler.async_scheduling),
            heartbeat_s=boot.heartbeat_s,
            clock=clock,
            vitals=vitals,
        ).run()
    finally:
        fault("engine.stop")
        started.core.shutdown()


def _ready(started: StartedEngine) -> Ready:
    return Ready(
        pid=os.getpid(),
        config=started.config.model_dump_json(),
        model_info=started.model_info,
        max_model_len=started.max_model_len,
    )


if __name__ == "__main__":
    sys.exit(main())
