"""Starting the workers' processes: what they share with the executor, and what each is told.

All or nothing: if one cannot be started, nothing is left of the others. Waits for no worker.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec

from dovetail.child_process import import_path
from dovetail.clock import Clock
from dovetail.errors import ConfigError, ContractError, MessageError
from dovetail.executors.multiproc.boot import Boot, lifeline_pair
from dovetail.executors.multiproc.crew import Crew
from dovetail.executors.multiproc.pulse import PulseBoard, make_board
from dovetail.interfaces.executor import ExecutorContext
from dovetail.plugins import PluginRegistry
from dovetail.transport.private_folder import make_private_folder
from dovetail.transport.ring import RingWriter, make_ring
from dovetail.transport.ring_memory import RingShape
from dovetail.transport.wire_types import encode


@dataclass(frozen=True, kw_only=True)
class Launched:
    """Processes that are starting, and what is shared with them."""

    orders: RingWriter
    crew: Crew
    board: PulseBoard

    def close(self, timeout_s: float) -> None:
        """Let the processes end, or end them; give back what is shared."""
        with self.crew.reading:
            self.orders.close()
        self.crew.close(timeout_s)
        self.board.close()


def launch(context: ExecutorContext, clock: Clock) -> Launched:
    """Start a process for each rank.

    Raises ContractError for a class that no other process can find, OSError where the system has
    no process, memory or descriptor left.
    """
    world_size = context.config.parallel.tensor_parallel_size
    with ExitStack() as undo, ExitStack() as given:
        folder = str(make_private_folder()) if world_size > 1 else ""
        crew = Crew(folder, clock)
        undo.callback(crew.close, 0.0)
        orders, places = make_ring(RingShape(num_readers=world_size))
        undo.callback(orders.close)
        for place in places:
            given.callback(place.close)
        pulses = make_board(world_size)
        given.callback(os.close, pulses)
        board = PulseBoard(pulses)
        undo.callback(board.close)
        boot = _boot(context, folder)
        for place in places:
            mine, theirs = lifeline_pair()
            with theirs:
                descriptors = (theirs.fileno(), *place.descriptors, pulses)
                own = {"rank": place.index, "descriptors": descriptors}
                crew.start(msgspec.structs.replace(boot, **own), mine)
        undo.pop_all()
    return Launched(orders=orders, crew=crew, board=board)


def _boot(context: ExecutorContext, folder: str) -> Boot:
    """Return what rank 0 is told, but for its descriptors."""
    return Boot(
        config=context.config.model_dump_json(),
        platform=_reference(context.plugins, "platform", type(context.platform)),
        worker=_reference(context.plugins, "worker", context.worker_cls),
        worker_options=_plain_options(context),
        rank=0,
        world_size=context.config.parallel.tensor_parallel_size,
        rendezvous=f"file://{Path(folder) / 'rendezvous'}" if folder else "",
        folder=folder,
        descriptors=(-1, -1, -1, -1),
        sys_path=import_path(),
    )


def _plain_options(context: ExecutorContext) -> dict[str, object]:
    options = dict(context.worker_options)
    try:
        encode(options)
    except MessageError as error:
        raise ConfigError(
            f"plugin_options: the worker's cannot go to its process: {error}"
        ) from None
    return options


def _reference(plugins: PluginRegistry, kind: str, cls: type) -> str:
    """Return by what another process finds the class of a plugin that was loaded here."""
    found = plugins.resolution_of(kind, cls)
    if found is not None and found.distribution:
        return f"{found.name}@{found.distribution}"
    target = f"{cls.__module__}:{cls.__qualname__}" if found is None else found.target
    if "<locals>" in target or target.startswith("__main__:"):
        raise ContractError(
            f"the {kind} {target} cannot be found by another process; put the class at the top of "
            "a module that can be imported."
        )
    return target
