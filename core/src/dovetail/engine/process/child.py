"""The engine's process: starts the engine from its settings, then runs the loop."""

from __future__ import annotations

import os
from pathlib import Path

import zmq

from dovetail.clock import MonotonicClock, sleep
from dovetail.config import RequestedConfig
from dovetail.engine.process.boot import INPUT_SOCKET, OUTPUT_SOCKET, EngineBoot, bind_private
from dovetail.engine.process.front_ends import FrontEnds
from dovetail.engine.process.link import OWNER
from dovetail.engine.process.server import EngineServer
from dovetail.engine.start import StartedEngine, start_engine
from dovetail.faults import fault
from dovetail.processes.child_main import ChildContext
from dovetail.transport.messages import MAX_MESSAGE_BYTES, Heartbeat, Ready, pack
from dovetail.transport.wire_types import decode

_LINGER_MS = 2000
_TRY_S = 0.01
_NUM_TRIES = 500


def serve(context: ChildContext) -> int:
    """Bind the sockets, start the engine, report the result, and run the engine's loop."""
    fault("engine.boot")
    boot = decode(context.settings, EngineBoot)
    folder, zmq_context = Path(boot.folder), zmq.Context()
    inbox, outbox = zmq_context.socket(zmq.ROUTER), zmq_context.socket(zmq.ROUTER)
    inbox.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)  # a longer message is not received
    inbox.setsockopt(zmq.RCVHWM, 0)  # a front end's send never waits for the engine
    outbox.setsockopt(zmq.SNDHWM, 0)  # flow control limits unread messages
    outbox.setsockopt(zmq.ROUTER_MANDATORY, 1)  # sending to a disconnected front end fails
    outbox.setsockopt(zmq.LINGER, _LINGER_MS)
    try:
        fault("engine.bind")
        bind_private(inbox, folder, INPUT_SOCKET)
        bind_private(outbox, folder, OUTPUT_SOCKET)
        return _serve(context, boot, inbox, outbox)
    finally:
        inbox.close(linger=0)
        outbox.close()  # waits at most _LINGER_MS for the last messages
        zmq_context.term()


def _serve(
    context: ChildContext, boot: EngineBoot, inbox: zmq.Socket[bytes], outbox: zmq.Socket[bytes]
) -> int:
    clock = MonotonicClock()
    config = RequestedConfig.model_validate_json(boot.config)
    started = start_engine(config, clock=clock, notify_phase=context.enter_phase)
    context.liveness.watch_children(started.core.executor.silence_s)
    try:
        fault("engine.ready")
        ready = _ready(started)
        _wait_for_owner(outbox)
        context.ready(pack(ready))
        return EngineServer(
            started.core,
            inbox,
            FrontEnds(outbox, ready),
            ahead=started.config.scheduler.async_scheduling,
            heartbeat_s=boot.heartbeat_s,
            clock=clock,
            liveness=context.liveness,
        ).run()
    finally:
        fault("engine.stop")
        started.core.shutdown()


def _wait_for_owner(outbox: zmq.Socket[bytes]) -> None:
    """Wait until the parent has connected, which happens while the engine starts."""
    for _ in range(_NUM_TRIES):
        try:
            outbox.send_multipart((OWNER, pack(Heartbeat(0, 0))))
            return
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
        sleep(_TRY_S)


def _ready(started: StartedEngine) -> Ready:
    return Ready(
        pid=os.getpid(),
        config=started.config.model_dump_json(),
        model_info=started.model_info,
        max_model_len=started.max_model_len,
        phases=started.phase_facts,
        cache_bytes=started.kv_cache.num_blocks * started.kv_cache.bytes_per_block,
    )
