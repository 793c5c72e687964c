"""The worker's side: makes the worker in its own process, and does what the executor orders.

Orders are done one after the other, by the thread that serves. A step that fails is the end, since
the rows' state is unknown then; an operation that fails is told, and the next order is done. Rank 0
answers steps, with a KV connector every rank does, and every rank answers calls. Where the worker
gives a handle, its device is at work: an order that comes meanwhile is done first, and the answer
goes out before the next one. Knows no process and no parent.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from contextlib import suppress

from dovetail.config import EngineConfig
from dovetail.errors import MessageError, PeerLostError
from dovetail.executors.multiproc.boot import Boot, PhaseName
from dovetail.executors.operation import find_operation
from dovetail.faults import fault
from dovetail.interfaces.executor import ExecutorContext, Handle
from dovetail.interfaces.worker import WorkerBase, WorkerContext
from dovetail.plugins import PluginRegistry
from dovetail.plugins.construction import construct
from dovetail.plugins.extension import complete_worker_cls
from dovetail.plugins.selection import choose_platform
from dovetail.result import ModelRunnerOutput
from dovetail.transport.columns import frame_kind
from dovetail.transport.order_frame import (
    CALL,
    SAMPLE,
    CallAnswer,
    WorkerCall,
    decode_call,
    decode_sample,
    encode_answer,
)
from dovetail.transport.plan_frame import PLAN, decode_plan
from dovetail.transport.result_frame import encode_result
from dovetail.transport.ring import RingReader, RingWriter
from dovetail.transport.told_error import ToldError

_PATIENCE_S = 86_400.0 * 365
"""For room in the ring of answers: an executor looks when it wants to, and if it goes, this process
goes, too."""


def do_nothing(worker: WorkerBase) -> None:
    """Be an operation that tells, by its answer, that all orders before it are done."""


def make_worker(
    boot: Boot, enter: Callable[[PhaseName], None]
) -> tuple[WorkerBase, PluginRegistry]:
    """Choose and make the worker that `boot` names; the registry knows what was loaded for it.

    enter: told of each phase before it begins. Plugins come first: nothing of the worker is
    imported before registry and platform are there.
    """
    enter("plugins")
    config = EngineConfig.model_validate_json(boot.config)
    plugins = PluginRegistry(policy=config.plugins.policy(), options=config.plugin_options)
    platform = choose_platform(plugins, boot.platform)
    enter("worker_cls")
    context = ExecutorContext(
        config=config,
        platform=platform,
        plugins=plugins,
        worker_cls=plugins.load("worker", boot.worker),
    )
    worker: WorkerBase = construct(
        "worker",
        complete_worker_cls(context),
        WorkerContext(
            config=config,
            platform=platform,
            plugins=plugins,
            rank=boot.rank,
            local_rank=boot.rank,
            world_size=boot.world_size,
            rendezvous=boot.rendezvous,
            options=boot.worker_options,
        ),
    )
    return worker, plugins


class WorkerHost:
    """Serves one worker. Owns neither it nor the rings."""

    def __init__(
        self,
        worker: WorkerBase,
        rank: int,
        orders: RingReader,
        answers: RingWriter,
        *,
        tells_transfers: bool = False,
    ) -> None:
        """tells_transfers: whether each rank answers each step with what its connector says."""
        self._tells_transfers = tells_transfers
        self._worker = worker
        self._rank = rank
        self._orders = orders
        self._answers = answers
        self._late: list[Handle[ModelRunnerOutput]] = []

    def serve(self) -> None:
        """Do orders until the executor closes the ring; raise what a step raises."""
        while True:
            try:
                order = self._receive()
            except PeerLostError:
                return
            self._do(order)

    def _receive(self) -> bytes:
        """Return the next order; answer for the last step as soon as its result is there."""
        while self._late:
            if self._late[0].done():
                self._answer_late()
                break
            with suppress(TimeoutError):
                return self._orders.receive(timeout_s=0)
        return self._orders.receive()

    def _do(self, order: bytes) -> None:
        kind = frame_kind(order)
        if kind == PLAN:
            fault("worker.before_execute")
            self._worker.execute_model(decode_plan(order))
            self._answer_late()
        elif kind == SAMPLE:
            fault("worker.before_sample")
            output = self._worker.sample_tokens(decode_sample(order))
            if isinstance(output, ModelRunnerOutput):
                self._answer_step(output)
            else:
                self._late.append(output)
        elif kind == CALL:
            self._answer_late()
            self._answers.send(self._answer(decode_call(order)), timeout_s=_PATIENCE_S)
        else:
            raise MessageError(f"an order of kind {kind}; this worker knows none.")

    def _answer_late(self) -> None:
        """Wait for the steps whose result is due, and answer for them; raise what they raise."""
        while self._late:
            self._answer_step(self._late.pop().result())

    def _answer_step(self, output: ModelRunnerOutput) -> None:
        if self._rank == 0:
            fault("worker.result")
            self._answers.send(encode_result(output), timeout_s=_PATIENCE_S)
        elif self._tells_transfers:
            told = ModelRunnerOutput(
                step_id=output.step_id,
                num_sampled=array("B"),
                token_ids=array("i"),
                kv_transfer=output.kv_transfer,
            )
            self._answers.send(encode_result(told), timeout_s=_PATIENCE_S)

    def _answer(self, call: WorkerCall) -> bytes:
        """Return the frame of an answer; a rank that nobody asks tells only whether it failed."""
        try:
            fault("worker.call")
            operation = find_operation(self._worker, call.operation)
            value = operation(*call.args, **call.kwargs)
            wanted = call.reply_rank in (None, self._rank)
            return encode_answer(CallAnswer(number=call.number, value=value if wanted else None))
        except Exception as error:
            return encode_answer(CallAnswer(number=call.number, error=ToldError.of(error)))
