"""Simulates separate replicas for prefill and decode.

A request runs on a prefill replica until its first token. Then it arrives at a decode replica,
which loads the KV blocks of the prompt and generates the other tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dovetail.errors import UserError
from dovetail.interfaces import KVSchedulerSide, SchedulerInterface
from dovetail_lab.replicas.cluster import ClusterResult, can_skip, merge_columns, run_pools
from dovetail_lab.replicas.pool import UNROUTED, ReplicaPool
from dovetail_lab.replicas.routers import Router
from dovetail_lab.replicas.transfers import (
    DecodeSide,
    PrefillSide,
    StoredBlocks,
    TransferCost,
    TransferLink,
)
from dovetail_lab.simulation.arrival_queue import ArrivalQueue
from dovetail_lab.simulation.engine import RunLimits, SimulatedEngine
from dovetail_lab.simulation.executor import SimExecutor
from dovetail_lab.simulation.prompts import OUTPUT_TOKEN, Prompts
from dovetail_lab.simulation.results import NEVER, RequestColumns, StepColumns
from dovetail_lab.simulation.schedulers import make_scheduler
from dovetail_lab.simulation.setup import EngineSetup, StepTimeModel
from dovetail_lab.workloads.workload import Workload, WorkloadRequest


def simulate_split(
    workload: Workload,
    prefill: Sequence[EngineSetup],
    decode: Sequence[EngineSetup],
    step_times: StepTimeModel,
    routers: tuple[Router, Router],
    *,
    cost: TransferCost | None = None,
    limits: RunLimits | None = None,
) -> ClusterResult:
    """Run a workload on prefill replicas and decode replicas.

    prefill, decode: the engine of each replica. routers: one for the prefill replicas and one for
    the decode replicas. In the result, `replica_of` is the prefill replica, and `replicas` contains
    the prefill replicas first. Raises UserError if a pool has no replicas, or if prefix caching,
    which transfers need, is disabled.
    """
    for name, setups in (("prefill", prefill), ("decode", decode)):
        if not setups:
            raise UserError(f"{name} is empty; it needs at least one replica.")
        if not all(setup.limits.enable_prefix_caching for setup in setups):
            raise UserError(
                f"{name}: enable_prefix_caching is False, but transfers find blocks by the keys "
                "of the prefix cache."
            )
    split = _Split(workload, prefill, decode, step_times, routers, cost or TransferCost())
    run = run_pools([split.prefill, split.decode], limits or RunLimits())
    first, second = split.prefill.results(), split.decode.results()
    columns = _joined(
        merge_columns(split.prefill, first),
        merge_columns(split.decode, second),
        split.decode,
        [request.num_output_tokens > 1 for request in workload.requests],
    )
    return ClusterResult(
        requests=columns,
        replica_of=split.prefill.replica_of,
        replicas=first + second,
        end_ns=max(result.end_ns for result in first + second),
        host_ns=run.host_ns,
        error=run.error,
    )


class _Split:
    """Both pools, and the route of a request through them."""

    def __init__(
        self,
        workload: Workload,
        prefill: Sequence[EngineSetup],
        decode: Sequence[EngineSetup],
        step_times: StepTimeModel,
        routers: tuple[Router, Router],
        cost: TransferCost,
    ) -> None:
        self._requests = workload.requests
        stored, prompts = StoredBlocks(), _PrefillPrompts(self._requests)
        macro_steps = can_skip(workload)

        def make_prefill(index: int, queue: ArrivalQueue) -> SimulatedEngine:
            engine = _ConnectedEngine(
                PrefillSide(stored),
                None,
                firsts,
                prefill[index],
                step_times,
                arrivals=queue,
                prompts=prompts,
            )
            engine.macro_steps = macro_steps
            return engine

        def make_decode(index: int, queue: ArrivalQueue) -> SimulatedEngine:
            engine = _ConnectedEngine(
                DecodeSide(stored),
                TransferLink(cost, decode[index].block_size),
                rests,
                decode[index],
                step_times,
                arrivals=queue,
                prompts=_DecodePrompts(prompts),
            )
            engine.macro_steps = macro_steps
            return engine

        firsts = [_first_part(request) for request in self._requests]
        rests = [_second_part(request) for request in self._requests]
        self.prefill = ReplicaPool(
            firsts,
            ArrivalQueue(self._requests),
            routers[0],
            num_replicas=len(prefill),
            make_engine=make_prefill,
            horizon_ns=lambda: self.prefill.arrivals.next_ns,
            on_end=self._end_prefill,
        )
        self.decode = ReplicaPool(
            rests,
            ArrivalQueue(()),
            routers[1],
            num_replicas=len(decode),
            make_engine=make_decode,
            horizon_ns=self._decode_horizon_ns,
            on_end=self._end_decode,
        )

    def _decode_horizon_ns(self) -> int | None:
        """Return the first time at which a request can arrive at the decode replicas."""
        times = [engine.clock.now_ns() for engine in self.prefill.busy]
        times += [
            next_ns
            for next_ns in (self.prefill.arrivals.next_ns, self.decode.arrivals.next_ns)
            if next_ns is not None
        ]
        return min(times, default=None)

    def _end_prefill(self, number: int, now_ns: int | None) -> None:
        if now_ns is None:
            return
        if self._requests[number].num_output_tokens > 1:
            self.decode.arrivals.push(number, now_ns)
        else:
            self.prefill.arrivals.end(number, now_ns)

    def _end_decode(self, number: int, now_ns: int | None) -> None:
        if now_ns is not None:
            self.prefill.arrivals.end(number, now_ns)


class _ConnectedEngine(SimulatedEngine):
    """A replica with a KV connector.

    link: the link of a decode replica; None for a prefill replica.
    """

    def __init__(
        self,
        side: KVSchedulerSide,
        link: TransferLink | None,
        requests: Sequence[WorkloadRequest],
        setup: EngineSetup,
        step_times: StepTimeModel,
        **arguments: Any,
    ) -> None:
        self._side = side
        self._link = link
        super().__init__(requests, setup, step_times, **arguments)
        self.steps = StepColumns()

    def _make_scheduler(self, decision_log: Path | None) -> SchedulerInterface:
        return make_scheduler(self._setup, self.clock, decision_log, kv_connector=self._side)

    def _make_executor(self) -> SimExecutor:
        executor = super()._make_executor()
        executor.transfers = self._link
        return executor


class _PrefillPrompts(Prompts):
    """Prompts of the requests on prefill replicas, kept until a decode replica takes them."""

    def __init__(self, requests: Sequence[WorkloadRequest]) -> None:
        super().__init__(requests)
        self._whole = {request.request_id: request for request in requests}
        self.kept: dict[str, array[int]] = {}

    def make(self, request: WorkloadRequest) -> array[int]:
        """Return the prompt of a request."""
        whole = self._whole[request.request_id]
        prompt = super().make(whole)
        if whole.num_output_tokens > 1:
            self.kept[whole.request_id] = prompt
        return prompt


class _DecodePrompts(Prompts):
    """The prompts of the decode replicas: those of the prefill replicas, plus the first token."""

    def __init__(self, prompts: _PrefillPrompts) -> None:
        super().__init__(())
        self._prompts = prompts

    def make(self, request: WorkloadRequest) -> array[int]:
        """Return the prompt of a request that a prefill replica has ended."""
        return self._prompts.kept.pop(request.request_id) + array("i", (OUTPUT_TOKEN,))


def _first_part(request: WorkloadRequest) -> WorkloadRequest:
    """Return the prefill replica's request: the prompt and one output token."""
    expected = min(request.expected_tokens, 1)
    return replace(request, num_output_tokens=1, max_tokens=1, expected_tokens=expected)


def _second_part(request: WorkloadRequest) -> WorkloadRequest:
    """Return the decode replica's request: all tokens after the first, without a TTFT objective."""
    return replace(
        request,
        num_prompt_tokens=request.num_prompt_tokens + 1,
        num_output_tokens=max(1, request.num_output_tokens - 1),
        max_tokens=max(1, request.max_tokens - 1),
        expected_tokens=max(1, request.expected_tokens - 1) if request.expected_tokens else 0,
        ttft_slo_ns=0,
    )


def _joined(
    first: RequestColumns, second: RequestColumns, decode: ReplicaPool, has_rest: Sequence[bool]
) -> RequestColumns:
    """Return the columns of whole requests, joined from the columns of both parts.

    has_rest: whether each request has more than one output token.
    """
    columns = RequestColumns(**{name: column[:] for name, column in vars(first).items()})
    for number, replica in enumerate(decode.replica_of):
        if replica == UNROUTED:
            if has_rest[number] and not first.failed[number]:
                columns.finished_ns[number] = NEVER
            continue
        columns.finished_ns[number] = second.finished_ns[number]
        columns.failed[number] = second.failed[number]
        for name in ("num_output_tokens", "num_preemptions", "num_recomputed_tokens"):
            getattr(columns, name)[number] += getattr(second, name)[number]
        if second.first_token_ns[number] != NEVER:
            columns.last_token_ns[number] = second.last_token_ns[number]
            gap = second.first_token_ns[number] - first.last_token_ns[number]
            columns.max_gap_ns[number] = max(gap, second.max_gap_ns[number])
    return columns
