"""Blocks that come back from a KV connector: the same tokens, fewer of them computed."""

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


def ask(llm, asked):
    outputs = llm.generate(asked, GREEDY, use_tqdm=False)
    return {
        output.request_id: Sequenced(
            token_ids=(*prompt, *output.outputs[0].token_ids),
            num_prompt=len(prompt),
            num_cached=output.num_cached_tokens,
            greedy=True,
        )
        for prompt, output in zip(asked, outputs, strict=True)
    }


def recorded(llm):
    (runs,) = llm.llm_engine.collective_rpc("take_recorded")
    return runs


def check_tokens(checkpoint, requests, runs):
    """Hold logits and tokens against transformers, by the margin rule."""
    measure(requests, runs, checkpoint.logits).check()


def check_greedy(checkpoint, prompt, tokens):
    """Hold greedy tokens against transformers: each is the best but for a tie within rounding."""
    logits_TV = checkpoint.logits([*prompt, *tokens])[len(prompt) - 1 : -1]
    chosen_T = logits_TV.gather(1, torch.tensor(list(tokens))[:, None])[:, 0]
    assert len(tokens) == NUM_NEW
    assert (logits_TV.amax(1) - chosen_T).max() <= 10 * TOLERANCE


def whole_blocks(length):
    return (length - 1) // BLOCK_SIZE * BLOCK_SIZE


CASES = {
    "the step waits": ("memory", {}),
    "requests wait": ("memory", {"plugin_options": {"memory": {"asynchronous": True}}}),
    "a step ahead": ("memory", {"async_scheduling": True}),
    "requests wait, a step ahead": (
        "memory",
        {"plugin_options": {"memory": {"asynchronous": True}}, "async_scheduling": True},
    ),
    "the fake": ("dovetail_devkit.fakes.kv_connector:FakeKVConnector", {}),
}


@pytest.mark.parametrize(("connector", "changes"), CASES.values(), ids=CASES.keys())
def test_what_a_reset_forgot_is_loaded_back(checkpoint, connector, changes):
    asked = prompts()
    with engine(checkpoint, connector, **changes) as llm:
        first = ask(llm, asked)
        runs = recorded(llm)
        num_first = sum(len(run.logits) for run in runs)
        assert llm.reset_prefix_cache()
        second = ask(llm, asked)
        again = recorded(llm)
        assert llm.reset_prefix_cache(), "blocks are left in use"
    check_tokens(checkpoint, first | second, runs + again)
    assert not any(request.num_cached for request in first.values())
    due = [whole_blocks(length) for length in PROMPT_LENS]
    assert [request.num_cached for request in second.values()] == due
    assert num_first - sum(len(run.logits) for run in again) == sum(due)


def test_another_engine_of_the_process_finds_what_the_first_computed(checkpoint):
    asked = prompts()
    with engine(checkpoint) as one, engine(checkpoint) as two:
        ask(one, asked)
        ask(two, [[7]])  # its first answer brings the news of what there is
        recorded(two)
        found = ask(two, asked)
        check_tokens(checkpoint, found, recorded(two))
    assert [request.num_cached for request in found.values()] == list(
        map(whole_blocks, PROMPT_LENS)
    )


def test_engines_that_compute_otherwise_share_nothing(checkpoint):
    asked = prompts()
    with engine(checkpoint) as one, engine(checkpoint, dtype="bfloat16") as two:
        ask(one, asked)
        ask(two, [[7]])
        assert not any(request.num_cached for request in ask(two, asked).values())


def test_what_is_dropped_meanwhile_is_computed_again(checkpoint):
    asked = prompts()
    tiny = {"plugin_options": {"memory": {"capacity_bytes": 40_000}}}
    with engine(checkpoint, **tiny) as llm:
        first = ask(llm, asked)
        assert llm.reset_prefix_cache()
        second = ask(llm, asked)
        assert llm.reset_prefix_cache(), "blocks are left in use"
        runs = recorded(llm)
    check_tokens(checkpoint, first | second, runs)


class SpoilingSide(FakeWorkerSide):
    """Writes NaN to the second half of what it is to load, and says that it failed."""

    num_failed = 0

    def load(self, order):
        super().load(order)
        bad = list(order["blocks"])[len(order["blocks"]) // 2 :]
        for cache_NP in self._pages_NP:
            cache_NP[bad] = 255  # NaN, in any floating type
        self._told["done"].remove(order["number"])
        self._told["failed"][order["number"]] = bad
        SpoilingSide.num_failed += 1


class SpoilingConnector(FakeKVConnector):
    """Keeps everything, and fails every load."""

    @staticmethod
    def create_worker_side(context):
        return SpoilingSide()


@pytest.mark.parametrize("ahead", [False, True])
def test_loads_that_fail_cost_a_computation_and_no_answer(checkpoint, ahead):
    asked = prompts()
    SpoilingSide.num_failed = 0
    with engine(checkpoint, SpoilingConnector, async_scheduling=ahead) as llm:
        first = ask(llm, asked)
        runs = recorded(llm)
        assert llm.reset_prefix_cache()
        outputs = llm.generate(asked, GREEDY, use_tqdm=False)
        assert llm.reset_prefix_cache(), "blocks are left in use"
    check_tokens(checkpoint, first, runs)
    assert SpoilingSide.num_failed == sum(whole_blocks(length) > 0 for length in PROMPT_LENS)
    for output in outputs:
        check_greedy(checkpoint, output.prompt_token_ids, output.outputs[0].token_ids)


class EndlessSide(FakeSchedulerSide):
    """Says that every load takes, and has none done."""

    num_loads = 0

    def load(self, transfer):
        EndlessSide.num_loads += 1
        return True


class EndlessConnector(FakeKVConnector):
    @staticmethod
    def create_scheduler_side(context):
        return EndlessSide()


@pytest.mark.parametrize("checkpoint", [FULL], indirect=True)
def test_loads_that_never_end_cost_their_time_and_no_answer(checkpoint):
    asked = prompts()
    EndlessSide.num_loads = 0
    with engine(checkpoint, EndlessConnector, kv_transfer_timeout_s=0.1) as llm:
        first = [one.outputs[0].token_ids for one in llm.generate(asked, GREEDY, use_tqdm=False)]
        assert llm.reset_prefix_cache()
        outputs = llm.generate(asked, GREEDY, use_tqdm=False)
    assert EndlessSide.num_loads == sum(whole_blocks(length) > 0 for length in PROMPT_LENS)
    assert [one.outputs[0].token_ids for one in outputs] == first
    assert [one.num_cached_tokens for one in outputs] == [0] * len(asked)


def ranked(connector, *marks, **changes):
    return pytest.param(connector, changes, marks=marks)


UNEVEN = "dovetail_devkit.rigs.uneven_connector:UnevenConnector"


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
def test_two_ranks_load_what_both_have_and_compute_what_one_fails(checkpoint, connector, changes):
    """A block counts as loaded when all ranks have it; one rank is late, or fails."""
    asked = prompts()
    with engine(checkpoint, connector, tensor_parallel_size=2, worker_cls="auto", **changes) as llm:
        first, second, third = (ask_after_reset(llm, asked) for _ in range(3))
        assert llm.reset_prefix_cache(), "blocks are left in use"
    for outputs in (first, second, third):
        for output in outputs:
            check_greedy(checkpoint, output.prompt_token_ids, output.outputs[0].token_ids)
    assert not any(output.num_cached_tokens for output in first)
    due = [whole_blocks(length) for length in PROMPT_LENS]
    cached = [output.num_cached_tokens for output in second]
    assert cached == due if connector == "memory" else 0 < sum(cached) < sum(due)


def ask_after_reset(llm, asked):
    assert llm.reset_prefix_cache(), "blocks are left in use"
    return llm.generate(asked, GREEDY, use_tqdm=False)


def test_a_connector_that_nobody_would_use_is_refused(checkpoint):
    with pytest.raises(ContractError, match="scheduler FakeScheduler does not declare"):
        engine(checkpoint, scheduler_cls=FakeScheduler)
    with pytest.raises(ConfigError, match="enable_prefix_caching=False"):
        engine(checkpoint, enable_prefix_caching=False)
