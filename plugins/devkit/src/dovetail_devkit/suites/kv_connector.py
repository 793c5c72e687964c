"""The conformance suite of the KV connector contract, for any connector.

The suite calls the connector as a scheduler and a worker would, with a small cache of random bytes.
Blocks are stored, overwritten and loaded into other blocks, in several concurrent transfers, and
every byte of the cache is compared with a copy. The two sides exchange only bytes. torch is
imported within functions.
Dimensions: N blocks, P bytes of a page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from threading import Event
from typing import TYPE_CHECKING
from uuid import uuid4

from dovetail.interfaces.kv_cache import FullAttentionSpec, KVCacheConfig, KVCacheGroup
from dovetail.interfaces.kv_connector import KVConnector, KVConnectorContext, KVTransfer
from dovetail_devkit.case import Case, run_all
from dovetail_devkit.contexts import make_config, write_fake_config
from dovetail_devkit.expectation import checking, expect

if TYPE_CHECKING:
    import torch

NUM_BLOCKS = 13
NUM_LAYERS = 3
NUM_ROUNDS = 30
MAX_STEPS = 2000
"""Number of steps, at intervals of one millisecond, in which every transfer must end."""

_SPEC = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=3, dtype="float32")


@checking("kv_connector")
def check_kv_connector(
    connector_cls: type[KVConnector],
    device: torch.device,
    *,
    options: Mapping[str, object] | None = None,
) -> None:
    """Check a connector against its contract. Raise AssertionError with the violated rule.

    options: constructor options; None for none.
    """
    run_all(kv_connector_cases(connector_cls, device, options=options))


def kv_connector_cases(
    connector_cls: type[KVConnector],
    device: torch.device,
    *,
    options: Mapping[str, object] | None = None,
) -> Iterator[Case]:
    """Yield the cases of the suite. Each case creates a new connector."""
    checks = {
        "no transfers": _check_idle,
        "stored blocks can be loaded": _check_round_trip,
        "a store copies the content after the forward pass": _check_late_content,
        "a failed load lists its blocks": _check_failure,
        "many transfers": _check_program,
        "shutdown, twice": _check_end,
    }
    for name, check in checks.items():
        yield Case(name=name, run=partial(_run, connector_cls, device, options or {}, check))


def _run(
    connector_cls: type[KVConnector],
    device: torch.device,
    options: Mapping[str, object],
    check: Callable[[_Harness], None],
) -> None:
    with TemporaryDirectory(prefix="dovetail-kv-") as folder:
        harness = _Harness(connector_cls, device, Path(folder), options)
        try:
            check(harness)
        finally:
            harness.end()


class _Harness:
    """Both sides of one connector, a cache, and a copy of the cache's expected content."""

    def __init__(
        self,
        connector_cls: type[KVConnector],
        device: torch.device,
        folder: Path,
        options: Mapping[str, object],
    ) -> None:
        import torch

        layers = tuple(f"layers.{i}" for i in range(NUM_LAYERS))
        group = KVCacheGroup(layer_names=layers, spec=_SPEC)
        context = KVConnectorContext(
            config=make_config(write_fake_config(folder)).worker_config(),
            kv_cache=KVCacheConfig(num_blocks=NUM_BLOCKS, groups=(group,)),
            options=options,
        )
        self.scheduler = connector_cls.create_scheduler_side(context)
        self.worker = connector_cls.create_worker_side(context)
        shape = (NUM_BLOCKS, _SPEC.page_size_bytes)
        generator = torch.Generator().manual_seed(7)
        self.due = [
            torch.randint(256, shape, dtype=torch.uint8, generator=generator)
            for _ in range(NUM_LAYERS)
        ]
        self.cache = [pages_NP.to(device, copy=True) for pages_NP in self.due]
        self.worker.register(self.cache)
        self.random = Random(7)
        self.open: dict[int, KVTransfer] = {}
        self.kept: dict[bytes, list[torch.Tensor]] = {}
        self._num_transfers = 0
        self._name = uuid4().bytes

    def key(self, number: int) -> bytes:
        """Return a unique key of 32 bytes, because a connector may keep keys forever."""
        return self._name + number.to_bytes(16, "big")

    def transfer(self, keys: Sequence[bytes], blocks: Sequence[int]) -> KVTransfer:
        """Return a transfer with a new number."""
        self._num_transfers += 1
        return KVTransfer(
            transfer_id=self._num_transfers,
            request_id=f"r{self._num_transfers}",
            keys=tuple(keys),
            block_ids=tuple(blocks),
        )

    def store(self, keys: Sequence[bytes], blocks: Sequence[int]) -> bool:
        """Request a store. Return whether the connector accepts it."""
        transfer = self.transfer(keys, blocks)
        taken = self.scheduler.store(transfer)
        expect(isinstance(taken, bool), f"store() returns {taken!r}; expected True or False")
        if taken:
            self.open[transfer.transfer_id] = transfer
            for key, block in zip(keys, blocks, strict=True):
                self.kept[key] = self.content(block)
        return taken

    def load(self, keys: Sequence[bytes], blocks: Sequence[int]) -> bool:
        """Request a load. Return whether it is asynchronous."""
        transfer = self.transfer(keys, blocks)
        waits = self.scheduler.load(transfer)
        expect(isinstance(waits, bool), f"load() returns {waits!r}; expected True or False")
        self.open[transfer.transfer_id] = transfer
        for key, block in zip(keys, blocks, strict=True):
            if key in self.kept:
                self.put(block, self.kept[key], in_cache=False)
        return waits

    def content(self, block: int) -> list[torch.Tensor]:
        """Return the expected content of a block."""
        return [pages_NP[block].clone() for pages_NP in self.due]

    def put(self, block: int, pages: Sequence[torch.Tensor], *, in_cache: bool = True) -> None:
        """Set the expected content of a block. in_cache: also write it to the cache."""
        for due_NP, cache_NP, page_P in zip(self.due, self.cache, pages, strict=True):
            due_NP[block] = page_P
            if in_cache:
                cache_NP[block] = page_P.to(cache_NP.device)

    def spoil(self, block: int) -> None:
        """Write other bytes to a block, as a forward pass does."""
        self.put(block, [255 - page_P for page_P in self.content(block)])

    def step(
        self, *, forward: Sequence[tuple[int, list[torch.Tensor]]] = ()
    ) -> dict[int, tuple[int, ...]]:
        """Run a step. Return a map of each ended transfer to its failed blocks.

        forward: the blocks that the forward pass writes, and their new pages.
        """
        instructions = self.scheduler.take_instructions()
        expect(
            isinstance(instructions, bytes),
            f"take_instructions returns {instructions!r:.80}; expected bytes",
        )
        self.worker.begin(instructions)
        for block, pages in forward:
            self.put(block, pages)
        report = self.worker.finish()
        expect(isinstance(report, bytes), f"finish() returns {report!r:.80}; expected bytes")
        outcome = self.scheduler.update(report)
        ended: dict[int, tuple[int, ...]] = {**dict.fromkeys(outcome.done, ()), **outcome.failed}
        expect(
            len(ended) == len(outcome.done) + len(outcome.failed),
            "one outcome reports the same transfer as done and as failed",
        )
        for number, failed in ended.items():
            expect(
                number in self.open,
                f"the connector reports the end of transfer {number}, which is not active",
            )
            blocks = self.open.pop(number).block_ids
            expect(
                set(failed) <= set(blocks),
                f"the outcome of transfer {number} lists the failed blocks {failed}, but the "
                f"blocks of the transfer are {blocks}",
            )
            expect(
                number in outcome.done or bool(failed),
                f"the outcome of the failed transfer {number} must list its failed blocks",
            )
        return ended

    def settle(self) -> dict[int, tuple[int, ...]]:
        """Run steps until every transfer has ended. Return the results."""
        ended, moment = self.step(), Event()
        for _ in range(MAX_STEPS):
            if not self.open:
                return ended
            moment.wait(0.001)
            ended |= self.step()
        raise AssertionError(
            f"the transfers {sorted(self.open)} have not ended after {MAX_STEPS} steps"
        )

    def check_cache(self, what: str) -> None:
        """Raise AssertionError unless every byte of the cache is as expected."""
        for buffer, (cache_NP, due_NP) in enumerate(zip(self.cache, self.due, strict=True)):
            invalid = (cache_NP.to("cpu") != due_NP).any(1).nonzero().flatten().tolist()
            expect(
                not invalid, f"the blocks {invalid} of buffer {buffer} have wrong content. {what}"
            )

    def end(self) -> None:
        """Shut both sides down, twice."""
        for side in (self.scheduler, self.worker) * 2:
            side.shutdown()


def _check_idle(harness: _Harness) -> None:
    expect(list(harness.scheduler.has([])) == [], "has([]) must return an empty sequence")
    for _ in range(3):
        there = list(harness.scheduler.has([harness.key(1), harness.key(2)]))
        expect(
            there == [False, False],
            f"has() returns {there} for two keys that were not stored; expected [False, False]",
        )
        ended = harness.step()
        expect(not ended, f"the connector reports the end of {ended}, but no transfer is active")
    harness.check_cache("No transfer was requested.")


def _check_round_trip(harness: _Harness) -> None:
    stored, target = [3, 1, 8], [5, 2, 12]
    keys = [harness.key(number) for number in range(3)]
    expect(harness.store(keys, stored), "store() must accept three blocks if nothing is stored yet")
    harness.settle()
    there = list(harness.scheduler.has([*keys, harness.key(9)]))
    expect(
        there == [True] * 3 + [False],
        f"has() returns {there} for three stored keys and another key; expected True for the "
        f"stored keys only",
    )
    for block in stored:
        harness.spoil(block)
    if harness.load(keys[::-1], target):
        harness.settle()
    else:
        harness.worker.begin(harness.scheduler.take_instructions())
        harness.check_cache("A synchronous load must have ended when begin() returns.")
        harness.open.clear()
    harness.check_cache("Stored blocks were loaded into other blocks.")


def _check_late_content(harness: _Harness) -> None:
    written = [255 - page_P for page_P in harness.content(4)]
    expect(
        harness.store([harness.key(1)], [4]), "store() must accept a block if nothing is stored yet"
    )
    ended = harness.step(forward=[(4, written)])
    if not ended:
        harness.settle()
    harness.kept[harness.key(1)] = written
    harness.spoil(4)
    harness.load([harness.key(1)], [6])
    harness.settle()
    harness.check_cache("A store must copy what the forward pass of the same step writes.")


def _check_failure(harness: _Harness) -> None:
    expect(
        harness.store([harness.key(1)], [3]), "store() must accept a block if nothing is stored yet"
    )
    harness.settle()
    harness.load([harness.key(1), harness.key(2)], [7, 9])
    ended = harness.settle()
    failed = [tuple(blocks) for blocks in ended.values() if blocks]
    expect(
        failed == [(9,)],
        f"a load into the blocks 7 and 9 must fail for block 9, whose key was not stored; failed "
        f"blocks: {failed}",
    )
    for due_NP, cache_NP in zip(harness.due, harness.cache, strict=True):
        due_NP[9] = cache_NP[9].to("cpu")  # the content of a failed block is undefined
    harness.check_cache("A load failed for one of two blocks.")


def _check_program(harness: _Harness) -> None:
    for number in range(NUM_ROUNDS):
        blocks = harness.random.sample(range(1, NUM_BLOCKS), 6)
        keys = [harness.key(100 * number + index) for index in range(3)]
        known = [key for key in harness.kept if harness.scheduler.has([key])[0]]
        sampled = harness.random.sample(known, min(len(known), 3))
        harness.store(keys[:1], blocks[:1])
        harness.store(keys[1:], blocks[1:3])
        if sampled:
            harness.load(sampled, blocks[3 : 3 + len(sampled)])
        ended = harness.settle()
        expect(
            not any(ended.values()),
            f"the load of stored keys failed in round {number}; failed blocks by transfer: {ended}",
        )
        extra = harness.step()
        expect(
            not extra,
            f"the connector reports the end of {extra} in round {number}, but no transfer is "
            f"active",
        )
        harness.check_cache(f"Many transfers were active concurrently, in round {number}.")
        harness.spoil(harness.random.choice(blocks))


def _check_end(harness: _Harness) -> None:
    harness.store([harness.key(1)], [4])
    harness.step()
    harness.end()
    harness.check_cache("Both sides were shut down.")
