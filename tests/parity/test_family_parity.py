"""Compares the engine with transformers for every dense family, by the margin rule.

Each family runs in four configurations: unchunked prefill; chunked prefill with preemptions and
async scheduling; chunked prefill with prefix-cache hits; tensor parallelism over two ranks.
If ties of routers exclude too many positions from the comparison, other prompts run.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail import LLM, SamplingParams
from dovetail.interfaces import KVCacheConfig, SchedulerStats
from dovetail.kv_cache.demand import sequence_blocks
from dovetail.kv_cache.grouping import group_layers
from parity.checkpoints import VOCAB_SIZE, Checkpoint
from parity.commit_seed import commit_seed
from parity.family_checkpoints import FAMILIES, make_family
from parity.margin_rule import Agreement, Sequenced, measure
from parity.rank_threads import TORCH_PARTS, RankThreads
from parity.recording import RecordedRun
from parity.recording_worker import RecordingWorker
from parity.test_engine_parity import SPARE_BLOCKS, longest_request, table_row

NUM_NEW_TOKENS = 16
MAX_DRAWS = 4
PROMPT_LENS = (17, 600, 1, 500, 333, 16)
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=1.0, seed=1)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The configuration of a run.

    budget: tokens per step. room: requests that fit into the cache, 0 for all. is_repeated: whether
    the prompts run again with different endings, to hit the prefix cache.
    """

    budget: int
    options: dict[str, Any]
    room: int = 0
    is_repeated: bool = False


RUN_CONFIGS = {
    "unchunked prefill": RunConfig(budget=2048, options={"enable_prefix_caching": False}),
    "chunked prefill, preemptions, async scheduling": RunConfig(
        budget=64, options={"async_scheduling": True}, room=1
    ),
    "chunked prefill, prefix-cache hits": RunConfig(budget=64, options={}, is_repeated=True),
    "two ranks": RunConfig(
        budget=256,
        options={"tensor_parallel_size": 2, "executor_backend": RankThreads, **TORCH_PARTS},
    ),
}


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """The results of a run. recorded: the recorded logits of each rank."""

    requests: dict[str, Sequenced]
    recorded: list[list[RecordedRun]]
    stats: SchedulerStats


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """Return the checkpoint of the case.

    It is created once, because cases are sorted by checkpoint.
    """
    folder: Path = tmp_path_factory.mktemp("family")
    return make_family(request.param, folder, commit_seed()[0])


def answer(llm: LLM, prompts: list[list[int]]) -> dict[str, Sequenced]:
    params = [GREEDY if number % 2 else SAMPLED for number in range(len(prompts))]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return {
        output.request_id: Sequenced(
            token_ids=(*prompt, *output.outputs[0].token_ids),
            num_prompt=len(prompt),
            num_cached=output.num_cached_tokens,
            greedy=request_params is GREEDY,
        )
        for prompt, request_params, output in zip(prompts, params, outputs, strict=True)
    }


def start(checkpoint: Checkpoint, run_config: RunConfig, max_len: int, blocks: int) -> LLM:
    return LLM(
        str(checkpoint.folder),
        dtype="float32",
        skip_tokenizer_init=True,
        use_tqdm_on_load=False,
        max_model_len=max_len,
        max_num_seqs=8,
        max_num_batched_tokens=run_config.budget,
        num_threads=1,
        worker_cls=RecordingWorker,
        block_size=16,
        num_gpu_blocks_override=blocks,
        **run_config.options,
    )


def longest_with_states(checkpoint: Checkpoint, run_config: RunConfig, max_len: int) -> int:
    """Return the number of blocks of the longest request, from the specs of a worker."""
    with start(checkpoint, run_config, max_len, 400) as llm:
        specs = llm.llm_engine.collective_rpc("get_kv_cache_spec")
    groups = group_layers(
        specs, block_size=16, max_model_len=max_len, max_step_tokens=run_config.budget
    )
    cache = KVCacheConfig(num_blocks=2, groups=groups)
    return sequence_blocks(cache, max_len, max_step_tokens=run_config.budget)


def make_prompts(source: random.Random, max_len: int) -> list[list[int]]:
    lengths = [min(length, max_len - 2 * NUM_NEW_TOKENS) for length in PROMPT_LENS]
    return [[source.randrange(VOCAB_SIZE) for _ in range(count)] for count in lengths]


def prompt_source(draw: int) -> random.Random:
    """Return the source of the prompts of a draw. It depends on the commit."""
    return random.Random(commit_seed()[0] + (draw << 32))


def run_engine(
    checkpoint: Checkpoint, run_config: RunConfig, max_len: int, draw: int = 0
) -> RunResult:
    source = prompt_source(draw)
    prompts = make_prompts(source, max_len)
    blocks = 400
    if run_config.room:
        longest = longest_request(checkpoint, run_config.budget)
        if checkpoint.has_states:
            longest = longest_with_states(checkpoint, run_config, max_len)
        blocks = run_config.room * longest + SPARE_BLOCKS
    with start(checkpoint, run_config, max_len, blocks) as llm:
        requests = answer(llm, prompts)
        if run_config.is_repeated:
            longer = [
                [*request.token_ids[: len(prompt)], *(source.randrange(VOCAB_SIZE) for _ in "abc")]
                for request, prompt in zip(requests.values(), prompts, strict=True)
            ]
            requests |= answer(llm, longer)
        recorded = llm.llm_engine.collective_rpc("take_recorded")
        stats = llm.llm_engine.last_stats
    assert stats is not None
    return RunResult(requests=requests, recorded=recorded, stats=stats)


def compare(
    checkpoint: Checkpoint, run_config: RunConfig, max_len: int
) -> tuple[RunResult, Agreement]:
    """Run the engine and compare the first rank with transformers.

    The prompts are drawn again if too many positions are excluded, up to `MAX_DRAWS` times. Every
    draw must agree at the positions that are compared. The caller checks the last one.
    """
    for draw in range(MAX_DRAWS):
        ran = run_engine(checkpoint, run_config, max_len, draw)
        agreement = measure(
            ran.requests, ran.recorded[0], checkpoint.logits, checkpoint.router_gaps
        )
        agreement.draws = draw + 1
        if agreement.is_covered:
            break
        agreement.check_compared()
    return ran, agreement


def cases() -> Iterator[Any]:
    for name in FAMILIES:
        for label in RUN_CONFIGS:
            yield pytest.param(name, label, id=f"{name}; {label}")


@pytest.mark.sampled(80)
@pytest.mark.parametrize(("checkpoint", "label"), list(cases()), indirect=["checkpoint"])
def test_a_model_family_agrees_with_transformers(
    checkpoint: Checkpoint, label: str, record_property
) -> None:
    run_config = RUN_CONFIGS[label]
    ran, agreement = compare(checkpoint, run_config, FAMILIES[checkpoint.name].max_len)
    first, *others = ran.recorded
    for other in others:
        assert all(
            torch.equal(item.logits, two.logits) for item, two in zip(first, other, strict=True)
        ), "ranks have different logits"
    case = f"{checkpoint.name}; {label}"
    record_property("parity", table_row(agreement, run_config.budget, case, ran.stats))
    assert bool(ran.stats.prefix_hits) == run_config.is_repeated
    if not all(checkpoint.windows):  # layers with windows need few blocks
        assert bool(ran.stats.num_preemptions) == bool(run_config.room)
    agreement.check()
