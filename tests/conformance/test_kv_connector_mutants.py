"""The KV connector suite detects faulty connectors: each mutant has one fault."""

import pytest
import torch

from dovetail.interfaces import KVOutcome
from dovetail_devkit.fakes.kv_connector import (
    FakeKVConnector,
    FakeSchedulerSide,
    FakeWorkerSide,
)
from dovetail_devkit.suites.kv_connector import check_kv_connector

CPU = torch.device("cpu")


class KeepsNoCopy(FakeWorkerSide):
    """Keeps views of the cache instead of copies."""

    def save(self, order):
        for key, block in zip(order["keys"], order["blocks"], strict=True):
            self.kept[key] = [cache_NP[block] for cache_NP in self._pages_NP]
            self._report["stored"].append(key)
        self.end(order, [])


class ForgetsABuffer(FakeWorkerSide):
    """Loads all buffers except the last."""

    def load(self, order):
        kept, self.kept = self.kept, {k: pages[:-1] for k, pages in self.kept.items()}
        pages, self._pages_NP = self._pages_NP, self._pages_NP[:-1]
        super().load(order)
        self.kept, self._pages_NP = kept, pages


class SwapsBlocks(FakeWorkerSide):
    """Loads the requested blocks in the wrong order."""

    def load(self, order):
        super().load({**order, "blocks": list(order["blocks"])[::-1]})


class StoresTooEarly(FakeWorkerSide):
    """Stores before the forward pass that writes the block."""

    def begin(self, instructions):
        super().begin(instructions)
        for order in [order for order in self._after if order["what"] == "store"]:
            self._after.remove(order)
            self.save(order)


class LoadsTooLate(FakeWorkerSide):
    """Loads after the forward pass instead of before it."""

    def begin(self, instructions):
        super().begin(instructions.replace(b'"load"', b'"later"'))


class HidesFailures(FakeWorkerSide):
    """Reports that it has loaded blocks that it does not have."""

    def end(self, order, missing):
        super().end(order, [])


class WritesUnrelatedBlocks(FakeWorkerSide):
    """Writes to an unrelated block when a load fails."""

    def end(self, order, missing):
        super().end(order, missing)
        if missing:
            self._pages_NP[0][1] += 1


class BlamesTooMany(FakeWorkerSide):
    """Reports all blocks of a transfer as failed if one block has failed."""

    def end(self, order, missing):
        super().end(order, list(order["blocks"]) if missing else [])


class LosesTransfers(FakeWorkerSide):
    """Never reports that a store has finished."""

    def end(self, order, missing):
        if order["what"] != "store":
            super().end(order, missing)


class EndsTwice(FakeSchedulerSide):
    """Reports twice that a transfer has finished."""

    before = ()

    def update(self, response, rank=0):
        outcome = super().update(response, rank)
        done, self.before = (*outcome.done, *self.before), outcome.done
        return KVOutcome(done=done, failed=outcome.failed)


class PromisesEarly(FakeSchedulerSide):
    """Reports that it has blocks that were never stored."""

    def has(self, keys):
        return [True for _ in keys]


class RepeatsItself(FakeSchedulerSide):
    """Returns the same instructions again."""

    last = b""

    def take_instructions(self):
        self.last = super().take_instructions() or self.last
        return self.last


class ForgetsAtOnce(FakeSchedulerSide):
    """Loses stored blocks."""

    def update(self, response, rank=0):
        outcome = super().update(response, rank)
        self.known.clear()
        return outcome


class EndsOnce(FakeWorkerSide):
    """Cannot be shut down twice."""

    def shutdown(self):
        del self._pages_NP


def connector(mutant):
    worker = mutant if issubclass(mutant, FakeWorkerSide) else FakeWorkerSide
    scheduler = mutant if issubclass(mutant, FakeSchedulerSide) else FakeSchedulerSide

    class Mutant(FakeKVConnector):
        @staticmethod
        def create_scheduler_side(context):
            return scheduler()

        @staticmethod
        def create_worker_side(context):
            return worker()

    return Mutant


MUTANTS = [
    KeepsNoCopy,
    ForgetsABuffer,
    SwapsBlocks,
    StoresTooEarly,
    LoadsTooLate,
    HidesFailures,
    WritesUnrelatedBlocks,
    BlamesTooMany,
    EndsTwice,
    PromisesEarly,
    RepeatsItself,
    ForgetsAtOnce,
    EndsOnce,
]


def test_the_fake_kv_connector_meets_the_contract():
    check_kv_connector(FakeKVConnector, CPU)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_faulty_connector_is_detected(mutant):
    with pytest.raises(AssertionError):
        check_kv_connector(connector(mutant), CPU)


def test_the_suite_detects_a_transfer_that_never_ends(monkeypatch):
    monkeypatch.setattr("dovetail_devkit.suites.kv_connector.MAX_STEPS", 20)
    with pytest.raises(AssertionError, match="have not ended"):
        check_kv_connector(connector(LosesTransfers), CPU)
