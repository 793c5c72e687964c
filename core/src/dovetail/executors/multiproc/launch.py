"""Starts the worker processes, with the rings that they share with the executor.

If one cannot be started, the others are killed. This module does not wait until they are ready.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from dovetail.clock import Clock
from dovetail.executors.multiproc.worker_main import WorkerBoot
from dovetail.executors.worker_spec import PHASES, WorkerSpec
from dovetail.faults import fault
from dovetail.interfaces.executor import ExecutorContext
from dovetail.processes.child_group import ChildGroup
from dovetail.processes.child_process import start_child
from dovetail.transport.private_folder import make_private_folder
from dovetail.transport.ring import RingReader, RingWriter, make_ring, make_ring_ends
from dovetail.transport.ring_memory import RingShape
from dovetail.transport.wire_types import encode

_SHARE_OF_DEADLINE = 0.9
"""Share of a phase's timeout after which a worker stops waiting, before the executor does.

The worker's error states which operation took too long.
"""


@dataclass(frozen=True, kw_only=True)
class Workers:
    """Worker processes, and the rings that they share with the executor.

    commands: the ring for commands to all ranks. responses: each rank's ring. reading: a lock that
    is held while a ring is in use. `close` also takes this lock, so it never closes a ring in use.
    folder: the directory for the rendezvous, or "".
    """

    group: ChildGroup
    commands: RingWriter
    responses: Sequence[RingReader]
    reading: threading.RLock
    folder: str

    def close(self, timeout_s: float) -> None:
        """Wait for the processes to exit, kill the rest, close the rings. May be called twice."""
        if self.folder:  # a killed worker process does not remove the directory
            shutil.rmtree(self.folder, ignore_errors=True)
        with self.reading:
            self.commands.close()
        self.group.close(timeout_s)
        with self.reading:
            for reader in self.responses:
                reader.close()


def launch(context: ExecutorContext, clock: Clock) -> Workers:
    """Start a process for each rank.

    Raises ContractError for a class that no other process can import, OSError if the system has
    no process, memory or descriptor left.
    """
    world_size = context.config.worker.tensor_parallel_size
    with ExitStack() as undo, ExitStack() as passed:
        folder = str(make_private_folder()) if world_size > 1 else ""
        undo.callback(shutil.rmtree, folder, ignore_errors=True)
        rendezvous = f"file://{Path(folder) / 'rendezvous'}" if folder else ""
        commands, reader_ends = make_ring(RingShape(num_readers=world_size))
        undo.callback(commands.close)
        group = ChildGroup(PHASES, clock)
        undo.callback(group.close, 0.0)
        readers = []
        for end in reader_ends:
            passed.callback(end.close)
        for end in reader_ends:
            writer, (reader,) = make_ring_ends(RingShape(num_readers=1))
            passed.callback(writer.close)
            readers.append(reader.take())
            undo.callback(readers[-1].close)
            boot = WorkerBoot(
                spec=WorkerSpec.of(context, rank=end.index, rendezvous=rendezvous),
                commands=end.descriptors,
                responses=writer.descriptors,
                reports_transfers=context.config.worker.kv_connector is not None,
                phase_timeout_s=_SHARE_OF_DEADLINE * context.config.start_timeout_s,
            )
            fault("multiproc.spawn")
            group.children.append(
                start_child(
                    "dovetail.executors.multiproc.worker_main:serve",
                    encode(boot),
                    name=f"worker {end.index}",
                    descriptors=(*boot.commands, *boot.responses),
                    folder=folder,
                    clock=clock,
                )
            )
        undo.pop_all()
    return Workers(
        group=group, commands=commands, responses=readers, reading=threading.RLock(), folder=folder
    )
