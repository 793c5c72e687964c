"""Blocks loaded by a KV connector: the same tokens with less computation."""

from __future__ import annotations

import random

import pytest
import torch

from dovetail import LLM, SamplingParams
from dovetail.errors import ConfigError, ContractError
from dovetail_devkit.fakes.kv_connector import (
    FakeKVConnector,
    FakeSchedulerSide,
    FakeWorkerSide,
)
from dovetail_devkit.fakes.scheduler import FakeScheduler
from parity.checkpoints import MAX_LEN, VOCAB_SIZE, make_checkpoint
from parity.commit_seed import commit_seed
from parity.margin_rule import TOLERANCE, Sequenced, measure
from parity.recording_worker import RecordingWorker

BLOCK_SIZE = 16
NUM_NEW = 24
PROMPT_LENS = (150, 33, 290, 16, 80)
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)
FULL = "llama: llama3 rope, 4/2 heads"
HYBRID = "qwen2: biases, window 45 above layer 0"


@pytest.fixture(scope="module", params=[FULL, HYBRID])
def checkpoint(request, tmp_path_factory):
    return make_checkpoint(request.param, tmp_path_factory.mktemp("kv"), commit_seed()[0])


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def engine(checkpoint, connector="memory", **changes):
    options = {
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "use_tqdm_on_load": False,
        "max_model_len": MAX_LEN,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 128,
        "block_size": BLOCK_SIZE,
        "num_gpu_blocks_override": 400,
        "num_threads": 1,
        "worker_cls": RecordingWorker,
    }
    return LLM(str(checkpoint.folder), **(options | changes), kv_connector=connector)


def prompts():
    source = random.Random(commit_seed()[0])
    return [[source.randrange(VOCAB_SIZE) for _ in range(length)] for length in PROMPT_LENS]


def generate(llm, prompt_ids):
    outputs = llm.generate(prompt_ids, GREEDY, use_tqdm=False)
    return {
        output.request_id: Sequenced(
            token_ids=(*prompt, *output.outputs[0].token_ids),
            num_prompt=len(prompt),
            num_cached=output.num_cached_tokens,
            greedy=True,
        )
        for prompt, output in zip(prompt_ids, outputs, strict=True)
    }


def recorded(llm):
    (runs,) = llm.llm_engine.collective_rpc("take_recorded")
    return runs


def check_tokens(checkpoint, requests, runs):
    """Compare logits and tokens with those of transformers, by the margin rule."""
    measure(requests, runs, checkpoint.logits).check()


def check_greedy(checkpoint, prompt, tokens):
    """Compare greedy tokens with transformers: each is the most likely one, up to rounding ties."""
    logits_TV = checkpoint.logits([*prompt, *tokens])[len(prompt) - 1 : -1]
    chosen_T = logits_TV.gather(1, torch.tensor(list(tokens))[:, None])[:, 0]
    assert len(tokens) == NUM_NEW
    assert (logits_TV.amax(1) - chosen_T).max() <= 10 * TOLERANCE


def whole_blocks(length):
    return (length - 1) // BLOCK_SIZE * BLOCK_SIZE


CASES = {
    "the step waits for loads": ("memory", {}),
    "requests wait": ("memory", {"plugin_options": {"memory": {"asynchronous": True}}}),
    "one step ahead": ("memory", {"async_scheduling": True}),
    "requests wait for loads, one step ahead": (
        "memory",
        {"plugin_options": {"memory": {"asynchronous": True}}, "async_scheduling": True},
    ),
    "fake connector": ("dovetail_devkit.fakes.kv_connector:FakeKVConnector", {}),
}


@pytest.mark.costly
@pytest.mark.sampled(8)
@pytest.mark.parametrize(("connector", "changes"), CASES.values(), ids=CASES.keys())
def test_blocks_are_loaded_from_the_connector_after_a_cache_reset(checkpoint, connector, changes):
    prompt_ids = prompts()
    with engine(checkpoint, connector, **changes) as llm:
        first = generate(llm, prompt_ids)
        runs = recorded(llm)
        num_first = sum(len(run.logits) for run in runs)
        assert llm.reset_prefix_cache()
        second = generate(llm, prompt_ids)
        again = recorded(llm)
        assert llm.reset_prefix_cache(), "blocks are left in use"
    check_tokens(checkpoint, first | second, runs + again)
    assert not any(request.num_cached for request in first.values())
    due = [whole_blocks(length) for length in PROMPT_LENS]
    assert [request.num_cached for request in second.values()] == due
    assert num_first - sum(len(run.logits) for run in again) == sum(due)


@pytest.mark.costly
def test_a_second_engine_in_the_process_loads_blocks_of_the_first(checkpoint):
    prompt_ids = prompts()
    with engine(checkpoint) as first, engine(checkpoint) as second:
        generate(first, prompt_ids)
        generate(second, [[7]])  # the first report contains the list of stored blocks
        recorded(second)
        actual = generate(second, prompt_ids)
        check_tokens(checkpoint, actual, recorded(second))
    assert [request.num_cached for request in actual.values()] == list(
        map(whole_blocks, PROMPT_LENS)
    )


@pytest.mark.costly
def test_engines_with_different_dtypes_share_no_blocks(checkpoint):
    prompt_ids = prompts()
    with engine(checkpoint) as first, engine(checkpoint, dtype="bfloat16") as second:
        generate(first, prompt_ids)
        generate(second, [[7]])
        assert not any(request.num_cached for request in generate(second, prompt_ids).values())


@pytest.mark.costly
def test_blocks_that_the_connector_has_deleted_are_recomputed(checkpoint):
    prompt_ids = prompts()
    tiny = {"plugin_options": {"memory": {"capacity_bytes": 40_000}}}
    with engine(checkpoint, **tiny) as llm:
        first = generate(llm, prompt_ids)
        assert llm.reset_prefix_cache()
        second = generate(llm, prompt_ids)
        assert llm.reset_prefix_cache(), "blocks are left in use"
        runs = recorded(llm)
    check_tokens(checkpoint, first | second, runs)


class PartialFailureSide(FakeWorkerSide):
    """A worker side that writes NaN to half of the blocks to load, and reports a failure."""

    num_failed = 0

    def load(self, order):
        super().load(order)
        bad = list(order["blocks"])[len(order["blocks"]) // 2 :]
        for cache_NP in self._pages_NP:
            cache_NP[bad] = 255  # NaN in every floating-point type
        self._report["done"].remove(order["number"])
        self._report["failed"][order["number"]] = bad
        PartialFailureSide.num_failed += 1


class FailingLoadConnector(FakeKVConnector):
    """A connector that stores every block and fails every load."""

    @staticmethod
    def create_worker_side(context):
        return PartialFailureSide()


@pytest.mark.costly
@pytest.mark.parametrize("ahead", [False, True])
def test_blocks_of_failed_loads_are_recomputed(checkpoint, ahead):
    prompt_ids = prompts()
    PartialFailureSide.num_failed = 0
    with engine(checkpoint, FailingLoadConnector, async_scheduling=ahead) as llm:
        first = generate(llm, prompt_ids)
        runs = recorded(llm)
        assert llm.reset_prefix_cache()
        outputs = llm.generate(prompt_ids, GREEDY, use_tqdm=False)
        assert llm.reset_prefix_cache(), "blocks are left in use"
    check_tokens(checkpoint, first, runs)
    assert PartialFailureSide.num_failed == sum(whole_blocks(length) > 0 for length in PROMPT_LENS)
    for output in outputs:
        check_greedy(checkpoint, output.prompt_token_ids, output.outputs[0].token_ids)


class EndlessSide(FakeSchedulerSide):
    """A scheduler side that accepts every load and never finishes one."""

    num_loads = 0

    def load(self, transfer):
        EndlessSide.num_loads += 1
        return True


class EndlessConnector(FakeKVConnector):
    @staticmethod
    def create_scheduler_side(context):
        return EndlessSide()


@pytest.mark.parametrize("checkpoint", [FULL], indirect=True)
def test_blocks_of_loads_that_time_out_are_recomputed(checkpoint):
    prompt_ids = prompts()
    EndlessSide.num_loads = 0
    with engine(checkpoint, EndlessConnector, kv_transfer_timeout_s=0.1) as llm:
        first = [
            item.outputs[0].token_ids for item in llm.generate(prompt_ids, GREEDY, use_tqdm=False)
        ]
        assert llm.reset_prefix_cache()
        outputs = llm.generate(prompt_ids, GREEDY, use_tqdm=False)
    assert EndlessSide.num_loads == sum(whole_blocks(length) > 0 for length in PROMPT_LENS)
    assert [output.outputs[0].token_ids for output in outputs] == first
    assert [output.num_cached_tokens for output in outputs] == [0] * len(prompt_ids)


def ranked(connector, *marks, **changes):
    return pytest.param(connector, changes, marks=marks)


UNEVEN = "dovetail_devkit.harnesses.uneven_connector:UnevenConnector"


@pytest.mark.costly
@pytest.mark.sampled(4)
@pytest.mark.parametrize("checkpoint", [FULL], indirect=True)
@pytest.mark.parametrize(
    ("connector", "changes"),
    [
        ranked("memory", async_scheduling=True),
        ranked(UNEVEN, plugin_options={UNEVEN: {"asynchronous": True}}),
        ranked("memory", pytest.mark.slow, plugin_options={"memory": {"asynchronous": True}}),
        ranked(UNEVEN, pytest.mark.slow),
        ranked(UNEVEN, pytest.mark.slow, async_scheduling=True),
        ranked(
            UNEVEN,
            pytest.mark.slow,
            plugin_options={UNEVEN: {"asynchronous": True}},
            async_scheduling=True,
        ),
    ],
)
def test_two_ranks_use_only_blocks_that_both_have_loaded(checkpoint, connector, changes):
    """A block counts as loaded when all ranks have loaded it. Here one rank is late or fails."""
    prompt_ids = prompts()
    with engine(checkpoint, connector, tensor_parallel_size=2, worker_cls="auto", **changes) as llm:
        first, second, third = (generate_after_reset(llm, prompt_ids) for _ in range(3))
        assert llm.reset_prefix_cache(), "blocks are left in use"
    for outputs in (first, second, third):
        for output in outputs:
            check_greedy(checkpoint, output.prompt_token_ids, output.outputs[0].token_ids)
    assert not any(output.num_cached_tokens for output in first)
    due = [whole_blocks(length) for length in PROMPT_LENS]
    cached = [output.num_cached_tokens for output in second]
    assert cached == due if connector == "memory" else 0 < sum(cached) < sum(due)


def generate_after_reset(llm, prompt_ids):
    assert llm.reset_prefix_cache(), "blocks are left in use"
    return llm.generate(prompt_ids, GREEDY, use_tqdm=False)


def test_a_connector_that_the_scheduler_does_not_support_is_rejected(checkpoint):
    with pytest.raises(ContractError, match="the scheduler FakeScheduler would ignore it"):
        engine(checkpoint, scheduler_cls=FakeScheduler)
    with pytest.raises(ConfigError, match="enable_prefix_caching=False"):
        engine(checkpoint, enable_prefix_caching=False)
