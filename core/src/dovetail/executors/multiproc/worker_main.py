"""The worker's process: creates the worker from its settings, and executes its commands."""

from __future__ import annotations

from contextlib import ExitStack

import msgspec

from dovetail.clock import MonotonicClock
from dovetail.executors.multiproc.host import WorkerHost
from dovetail.executors.worker_spec import WorkerSpec, describe_plugins, make_worker
from dovetail.faults import fault
from dovetail.processes.child_main import ChildContext
from dovetail.processes.startup_phases import StartUp
from dovetail.transport.ring import RingReader, RingReaderEnd, RingWriter, RingWriterEnd
from dovetail.transport.wire_types import decode


class WorkerBoot(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The settings of a worker's process.

    commands, responses: the descriptors of this worker's ends of the two rings.
    reports_transfers: whether each rank responds to each step with its KV connector's report.
    phase_timeout_s: timeout of each startup phase.
    """

    spec: WorkerSpec
    commands: tuple[int, ...]
    responses: tuple[int, ...]
    reports_transfers: bool
    phase_timeout_s: float


def serve(context: ChildContext) -> int:
    """Create the worker, report the result, and execute commands."""
    fault("worker.boot")
    boot = decode(context.settings, WorkerBoot)
    status = 0
    with ExitStack() as ends:
        commands = RingReaderEnd(index=boot.spec.rank, descriptors=boot.commands).take()
        ends.callback(commands.close)
        results_ring = RingWriterEnd(descriptors=boot.responses).take()
        ends.callback(results_ring.close)
        try:
            _work(context, boot, commands, results_ring, ends)
        except BaseException as error:
            # The ring is closed before the worker is shut down, which may take long, to inform a
            # process that waits for a response.
            context.failed(error)
            results_ring.close()
            status = 1
    context.await_dismissal()
    return status


def _work(
    context: ChildContext,
    boot: WorkerBoot,
    commands: RingReader,
    results_ring: RingWriter,
    ends: ExitStack,
) -> None:
    """Create the worker and execute commands. Register its shutdown in `ends`."""
    fault("worker.make")
    deadline_s = boot.phase_timeout_s
    with StartUp(MonotonicClock(), deadline_s=deadline_s, notify=context.enter_phase) as start:
        worker, plugins = make_worker(boot.spec, start.enter)
        ends.callback(worker.shutdown)
        start.enter("init_device")
        fault("worker.init_device")
        worker.init_device()
        start.enter("load_model")
        fault("worker.load_model")
        worker.load_model()
    fault("worker.ready")
    context.ready(describe_plugins(plugins))
    rank, reports = boot.spec.rank, boot.reports_transfers
    WorkerHost(worker, rank, commands, results_ring, reports_transfers=reports).serve()
