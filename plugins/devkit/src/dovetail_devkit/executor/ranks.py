"""Cases of the executor suite in which several ranks return different KV-connector data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from dovetail.executors.output_aggregator import RankedSide
from dovetail.interfaces.executor import Executor
from dovetail.interfaces.kv_connector import KVOutcome
from dovetail.plan import SchedulerOutput
from dovetail.result import ModelRunnerOutput
from dovetail_devkit.contexts import make_executor_context, write_fake_config
from dovetail_devkit.executor.workers import MovingWorker, connector_data_of
from dovetail_devkit.expectation import checking, expect
from dovetail_devkit.fakes.kv_connector import FakeSchedulerSide

NUM_RANKS = 2
RESULT_S = 30.0


class _Recorder(FakeSchedulerSide):
    """The scheduler side of a KV connector, which records each report with its rank."""

    def __init__(self) -> None:
        super().__init__(NUM_RANKS)
        self.answers: list[tuple[int, bytes]] = []

    def update(self, report: bytes, rank: int = 0) -> KVOutcome:
        """Record the report of a rank."""
        self.answers.append((rank, report))
        return KVOutcome()


def check_transfers(
    executor_cls: type[Executor],
    start: Callable[[Executor], object],
    plans: Sequence[SchedulerOutput],
) -> None:
    """Check that every rank's report for the KV connector is in the result of its step.

    The ranks report in different steps, so that an executor that reads only one rank is detected.
    start: a function that completes the startup of the executor's workers.
    """
    with checking("KV transfers"), TemporaryDirectory() as folder:
        context = make_executor_context(
            write_fake_config(Path(folder)),
            MovingWorker,
            tensor_parallel_size=NUM_RANKS,
            async_scheduling=True,
            kv_connector="dovetail_devkit.fakes.kv_connector:FakeKVConnector",
        )
        executor = executor_cls(context)
        try:
            start(executor)
            _check_answers(executor, plans)
        finally:
            executor.shutdown()


def _check_answers(executor: Executor, plans: Sequence[SchedulerOutput]) -> None:
    handles = []
    for plan in plans:
        executor.execute_model(plan)
        handles.append(executor.sample_tokens())
        if len(handles) < executor.max_concurrent_steps:
            continue
        _check_answer(handles.pop(0).result(RESULT_S))
    for handle in handles:
        _check_answer(handle.result(RESULT_S))


def _check_answer(output: ModelRunnerOutput) -> None:
    right = [(rank, connector_data_of(rank, output.step_id)) for rank in range(NUM_RANKS)]
    side = _Recorder()
    if output.kv_transfer:
        RankedSide(side, NUM_RANKS).update(output.kv_transfer)
    reports = side.answers or [(rank, b"") for rank in range(NUM_RANKS)]
    expect(
        reports == right,
        f"step {output.step_id}: the ranks reported {right} for the KV connector, but the result "
        f"has {reports}; pass the results of all ranks to `aggregate_outputs`",
    )
