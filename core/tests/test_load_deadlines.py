"""Late transfers of a KV connector: no request waits forever, and every block is freed."""

import logging
from dataclasses import replace
from zlib import crc32

import pytest

from dovetail import LLM, SamplingParams
from dovetail.interfaces import KVOutcome
from dovetail.scheduling import Scheduler
from dovetail_devkit import FAKES
from dovetail_devkit.contexts import SMALL_ENGINE, write_fake_config

TIMEOUT_NS = 5_000_000_000
PROMPT = list(range(1, 42))


class Side:
    """A connector with all blocks of 16 prompts. `outcome` states which transfers have ended."""

    def __init__(self):
        self.outcome, self.claims, self.transfers = KVOutcome(), True, []
        self.takes_stores = False

    def has(self, keys):
        return [self.claims] * len(keys)

    def load(self, transfer):
        self.transfers.append(transfer)
        return True

    def store(self, transfer):
        if self.takes_stores:
            self.transfers.append(transfer)
        return self.takes_stores

    def take_instructions(self):
        return b""

    def update(self, response):
        return self.outcome

    def shutdown(self):
        pass


@pytest.fixture
def side():
    return Side()


@pytest.fixture
def driver(drive, side):
    class Connected(Scheduler):
        def __init__(self, context):
            context = replace(context, kv_connector=side, kv_transfer_timeout_s=TIMEOUT_NS / 1e9)
            super().__init__(context)

    return drive(cls=Connected, num_blocks=60)


def spoil(driver, transfer):
    """Overwrite the blocks of a transfer, as the connector does."""
    for block in transfer.block_ids:
        for index in range(driver.worker.block_size):
            driver.worker.slots[block, index] = "spoilt"


def answer(driver, side, **outcome):
    """Run an empty step in which the connector's worker side reports an outcome."""
    side.outcome = KVOutcome(**outcome)
    plan = driver.scheduler.schedule()
    output = replace(driver.worker.execute(plan), kv_transfer=b"ended")
    driver.scheduler.update_from_output(plan, output)
    driver.scheduler.check_integrity()


def test_the_blocks_of_a_late_load_are_recomputed_and_freed_after_twice_the_timeout(
    driver, side, alone, caplog
):
    free = driver.scheduler.view.num_free_blocks
    driver.add("late", PROMPT, max_tokens=3)
    assert driver.step() == {}
    (transfer,) = side.transfers
    driver.clock.advance(TIMEOUT_NS - 1)
    assert driver.step() == {}
    driver.clock.advance(1)
    with caplog.at_level(logging.WARNING):
        assert driver.step() == {"late": (0, len(PROMPT))}
    assert "kv_transfer_timeout_s" in caplog.text
    spoil(driver, transfer)
    driver.run()
    assert driver.tokens["late"] == alone(PROMPT, 3) and driver.cached == {"late": 0}
    assert driver.scheduler.depth().num_transfers == 1
    assert driver.scheduler.view.num_free_blocks == free - len(transfer.block_ids)
    driver.clock.advance(TIMEOUT_NS)
    driver.step()
    assert driver.scheduler.depth().num_transfers == 0
    assert driver.scheduler.view.num_free_blocks == free
    # a report after the blocks were freed is ignored
    answer(driver, side, done=(transfer.transfer_id,))
    assert driver.scheduler.view.num_free_blocks == free


@pytest.mark.parametrize("fails", [False, True])
def test_the_result_of_a_load_after_its_deadline_frees_the_blocks_immediately(
    driver, side, alone, fails
):
    free = driver.scheduler.view.num_free_blocks
    driver.add("late", PROMPT, max_tokens=3)
    driver.step()
    driver.clock.advance(TIMEOUT_NS)
    driver.run()
    (transfer,) = side.transfers
    number, blocks = transfer.transfer_id, transfer.block_ids
    answer(driver, side, **({"failed": {number: blocks}} if fails else {"done": (number,)}))
    assert driver.scheduler.depth().num_transfers == 0
    assert driver.scheduler.view.num_free_blocks == free
    assert driver.tokens["late"] == alone(PROMPT, 3)


def test_blocks_of_an_aborted_loading_request_are_freed_eventually(driver, side, alone):
    free = driver.scheduler.view.num_free_blocks
    driver.add("gone", PROMPT)
    driver.step()
    assert driver.scheduler.abort_requests(["gone"]) == ["gone"]
    (transfer,) = side.transfers
    side.claims = False
    other = driver.add("other", 90, max_tokens=30)
    for _ in range(15):
        assert "other" in driver.step()
        spoil(driver, transfer)
    assert driver.scheduler.view.num_free_blocks <= free - len(transfer.block_ids)
    driver.clock.advance(2 * TIMEOUT_NS)
    driver.run()
    assert driver.tokens["other"] == alone(other, 30)
    assert driver.scheduler.depth().num_transfers == 0
    assert driver.scheduler.view.num_free_blocks == free
    assert driver.scheduler.reset_prefix_cache()


def test_a_store_that_never_ends_keeps_its_blocks_for_twice_the_timeout(driver, side, alone):
    free, side.claims, side.takes_stores = driver.scheduler.view.num_free_blocks, False, True
    driver.add("a", PROMPT, max_tokens=2)
    driver.run()
    assert driver.tokens["a"] == alone(PROMPT, 2)
    assert driver.scheduler.view.num_free_blocks == free - sum(
        len(transfer.block_ids) for transfer in side.transfers
    )
    driver.clock.advance(2 * TIMEOUT_NS)
    driver.step()
    assert driver.scheduler.view.num_free_blocks == free
    assert driver.scheduler.depth().num_transfers == 0


def test_a_scheduler_that_was_idle_abandons_a_late_load_in_one_step(driver, side, alone):
    driver.add("late", PROMPT, max_tokens=3)
    driver.step()
    driver.clock.advance(3 * TIMEOUT_NS)
    assert driver.step() == {"late": (0, len(PROMPT))}
    assert driver.scheduler.depth().num_transfers == 0
    driver.run()
    assert driver.tokens["late"] == alone(PROMPT, 3)


def test_late_loads_fail_together_and_each_prompt_is_computed_correctly(driver, side, alone):
    prompts = {name: driver.add(name, 21, max_tokens=2) for name in "abcd"}
    driver.step()
    driver.clock.advance(TIMEOUT_NS // 2)
    prompts |= {name: driver.add(name, 21, max_tokens=2) for name in "ef"}
    driver.step()
    driver.clock.advance(TIMEOUT_NS // 2)
    assert sorted(driver.step()) == list("abcd")
    driver.clock.advance(TIMEOUT_NS // 2)
    driver.run()
    for name, prompt in prompts.items():
        assert driver.tokens[name] == alone(prompt, 2)


def test_new_requests_do_not_starve_a_partly_loaded_prompt(drive, side, alone):
    class Connected(Scheduler):
        def __init__(self, context):
            super().__init__(replace(context, kv_connector=side))

    limits = {"max_num_batched_tokens": 8, "max_num_seqs": 8, "enable_chunked_prefill": False}
    driver = drive(cls=Connected, **limits)
    prompt = [*range(1, 8)]  # a block is loaded; a step computes 3 tokens
    driver.add("loaded", prompt, max_tokens=1)
    driver.step()
    for number in range(7):
        driver.add(f"r{number}", 1, max_tokens=3 + number)
    driver.step()
    (transfer,) = side.transfers
    checksum = 0  # the strict worker's checksum of a token and its prefix
    for index, token in enumerate(prompt[:4]):
        checksum = crc32(token.to_bytes(4, "little"), checksum)
        driver.worker.slots[transfer.block_ids[0], index] = checksum
    answer(driver, side, done=(transfer.transfer_id,))
    side.outcome = KVOutcome()
    for number in range(7, 27):  # one request ends in each step
        driver.add(f"r{number}", 1, max_tokens=7)
    for _ in range(8):
        driver.step()
    assert driver.tokens["loaded"] == alone(prompt, 1)
    assert len(driver.reasons) < 20


class StoresLong(Scheduler):
    """A scheduler with a connector that accepts every block and never finishes a store."""

    def __init__(self, context):
        side = Side()
        side.claims, side.takes_stores = False, True
        super().__init__(replace(context, kv_connector=side))


def test_outputs_and_cache_resets_do_not_wait_for_long_stores(tmp_path, monkeypatch):
    monkeypatch.setattr("dovetail.engine.core.MAX_DRAIN_NS", 100_000_000)
    with LLM(
        write_fake_config(tmp_path),
        platform=FAKES["platform"],
        worker_cls=FAKES["worker"],
        scheduler_cls=f"{__name__}:StoresLong",
        skip_tokenizer_init=True,
        **SMALL_ENGINE,
    ) as llm:
        params = SamplingParams(max_tokens=3, detokenize=False, ignore_eos=True)
        progress = llm.llm_engine.client.progress
        llm.generate([[*range(1, 30)]], params)
        steps = llm.llm_engine.client.progress.num_steps - progress.num_steps
        assert steps <= 3 + 4
        assert llm.llm_engine.last_stats.num_used_blocks > 0  # running stores use blocks
        before = llm.llm_engine.last_stats.step_id
        assert llm.reset_prefix_cache() is False
        llm.generate([[1]], params)
        assert llm.llm_engine.last_stats.step_id - before < 60  # the scheduler waits between steps
