"""Combines the results of all ranks into one step result, including the KV-transfer reports.

Tokens and log-probabilities are equal on every rank, so rank 0's are used. The reports of the KV
connector's worker sides differ: each transfers its rank's part of every block. The executor
gathers the reports (`aggregate_outputs`), and the engine reads them rank by rank (`RankedSide`):

- a transfer has ended when it has ended on every rank, not necessarily in the same step;
- a block has failed if it has failed on any rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from dovetail.errors import ContractError
from dovetail.interfaces.kv_connector import KVOutcome, KVSchedulerSide, KVTransfer
from dovetail.result import ModelRunnerOutput

_MARK = b"\0ranks\0"


def aggregate_outputs(outputs: Sequence[ModelRunnerOutput]) -> ModelRunnerOutput:
    """Combine the results of a step, in rank order, into one result.

    Returns rank 0's result with the `kv_transfer` of all ranks. Executors of several ranks call it
    for each step of an engine with a KV connector; only `kv_transfer` of other ranks is read.
    """
    reports = [output.kv_transfer for output in outputs]
    return replace(outputs[0], kv_transfer=_gather(reports)) if any(reports) else outputs[0]


def _gather(reports: Sequence[bytes]) -> bytes:
    return _MARK + msgspec.msgpack.encode(reports)


def _split(gathered: bytes, num_ranks: int) -> list[bytes]:
    """Return the reports by rank. Raise ContractError if the executor has not gathered all."""
    reports: list[bytes] = []
    if gathered.startswith(_MARK):
        reports = msgspec.msgpack.decode(gathered[len(_MARK) :], type=list[bytes])
    if len(reports) != num_ranks:
        raise ContractError(
            f"the executor returned KV-connector reports of only {max(1, len(reports))} of "
            f"{num_ranks} ranks. It must pass the results of all ranks to `aggregate_outputs`, "
            "because a block is complete only when all ranks have transferred their part."
        )
    return reports


class OutcomeAggregator:
    """The outcomes of a connector's transfers, combined over all ranks."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._failed: dict[int, set[int]] = {}  # failed blocks of unfinished transfers
        self._ranks: dict[int, set[int]] = {}

    def add(self, rank: int, outcome: KVOutcome) -> KVOutcome:
        """Add transfers that ended on a rank. Return transfers that have now ended on all ranks.

        Raises ContractError if a rank ends a transfer twice.
        """
        ended = {**dict.fromkeys(outcome.done, ()), **outcome.failed}
        for transfer_id, failed in ended.items():
            ranks = self._ranks.setdefault(transfer_id, set())
            if rank in ranks:
                raise ContractError(
                    f"KV connector: rank {rank} reports the end of transfer {transfer_id} twice."
                )
            ranks.add(rank)
            self._failed.setdefault(transfer_id, set()).update(failed)
        whole = [item for item in ended if len(self._ranks[item]) == self._num_ranks]
        blocks = {item: tuple(sorted(self._failed.pop(item))) for item in whole}
        for item in whole:
            del self._ranks[item]
        return KVOutcome(
            done=tuple(item for item in whole if not blocks[item]),
            failed={item: failed for item, failed in blocks.items() if failed},
        )


class RankedSide:
    """The scheduler's side of a connector with several worker sides: one for each rank.

    Implements `KVSchedulerSide` for the scheduler, which does not depend on ranks.
    """

    def __init__(self, side: KVSchedulerSide, num_ranks: int) -> None:
        """Combine the ranks for `side`, the connector's scheduler side, which this object owns."""
        self._side = side
        self._num_ranks = num_ranks
        self._outcomes = OutcomeAggregator(num_ranks)

    def has(self, keys: Sequence[bytes]) -> Sequence[bool]:
        """Return for each key whether its content can be loaded, on every rank."""
        return self._side.has(keys)

    def load(self, transfer: KVTransfer) -> bool:
        """Request a load. Return whether it is accepted."""
        return self._side.load(transfer)

    def store(self, transfer: KVTransfer) -> bool:
        """Request a store. Return whether it is accepted."""
        return self._side.store(transfer)

    def take_instructions(self) -> bytes:
        """Return the message to all ranks that is sent with the next plan."""
        return self._side.take_instructions()

    def update(self, report: bytes, rank: int = 0) -> KVOutcome:
        """Read the gathered reports. Return transfers that have ended on all ranks."""
        done: list[int] = []
        failed: dict[int, tuple[int, ...]] = {}
        for index, item in enumerate(_split(report, self._num_ranks)):
            whole = self._outcomes.add(index, self._side.update(item, index))
            done += whole.done
            failed |= whole.failed
        return KVOutcome(done=tuple(done), failed=failed)

    def shutdown(self) -> None:
        """Release all resources. May be called twice."""
        self._side.shutdown()
