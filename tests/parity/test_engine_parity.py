"""Compares the whole engine with transformers: logits at every position, tokens by the margin rule.

Each case combines a checkpoint, the token budget of a step and a configuration. `make test` runs
each checkpoint and configuration with one budget; `make soak` runs all combinations.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail import LLM, SamplingParams
from dovetail.interfaces import FullAttentionSpec, KVCacheConfig, SchedulerStats
from dovetail.kv_cache.demand import sequence_blocks
from dovetail.kv_cache.grouping import group_layers
from dovetail.plan import SchedulerOutput
from parity.checkpoints import (
    CHECKPOINTS,
    LLAMA3_ROPE,
    MAX_LEN,
    VOCAB_SIZE,
    Checkpoint,
    make_checkpoint,
)
from parity.commit_seed import commit_seed
from parity.margin_rule import TOLERANCE, Agreement, Sequenced, measure
from parity.recording import RecordedRun
from parity.recording_worker import RecordingWorker

NUM_NEW_TOKENS = 64
PROMPT_LENS = (17, 600, 1, 333, 16, 2, 100, 15)
MAX_PROMPT_LEN = max(PROMPT_LENS)
BUDGETS = (64, 256, 2048)
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=1.0, seed=1)
"""The sampling parameters of some requests, because greedy texts of random models soon repeat
themselves."""

Prompts = list[list[int]]
BLOCK_SIZE = 16
SPARE_BLOCKS = 4
"""Number of blocks of a small cache in addition to those of the longest request."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The configuration of a run.

    hits_prefixes: the run must hit the prefix cache. room: number of requests of maximum length
    that fit into the cache, so that the run must preempt; 0 if all requests fit.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    room: int = 0
    hits_prefixes: bool = False


NO_PREFIX_CACHE = {"enable_prefix_caching": False}
RUN_CONFIGS = (
    RunConfig(name="plain", options=NO_PREFIX_CACHE),
    RunConfig(name="space for one request", options=NO_PREFIX_CACHE, room=1),
    RunConfig(name="space for two requests", options=NO_PREFIX_CACHE, room=2),
    RunConfig(name="prefix hits", hits_prefixes=True),
    RunConfig(
        name="space for one request, prefix cache, one step ahead",
        options={"async_scheduling": True},
        room=1,
    ),
    RunConfig(name="space for three requests, prefix cache", room=3),
)


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """The results of a run."""

    requests: dict[str, Sequenced]
    recorded: list[RecordedRun]
    stats: SchedulerStats


def random_tokens(source: random.Random, count: int) -> list[int]:
    return [source.randrange(VOCAB_SIZE) for _ in range(count)]


def make_prompts() -> Prompts:
    """Return two prompts of each length. The first half is for greedy requests."""
    source = random.Random(commit_seed()[0])
    return [random_tokens(source, length) for length in PROMPT_LENS * 2]


def follow_ups(prompts: Prompts, answered: list[Sequenced]) -> Prompts:
    """Return prompts that share prefixes with computed sequences. They alternate between the same
    prompt, its first half with a different ending, and the next turn of a conversation.
    """
    source = random.Random(commit_seed()[0] + 1)
    collected = []
    for index, prompt in enumerate(prompts):
        if index % 3 == 0:
            follow_up = [*answered[index].token_ids, *random_tokens(source, 5)]
        elif index % 3 == 1:
            follow_up = prompt
        else:
            follow_up = prompt[: len(prompt) // 2] + random_tokens(source, 20)
        collected.append(follow_up[:MAX_PROMPT_LEN])
    return collected


def answer(llm: LLM, prompts: Prompts) -> dict[str, Sequenced]:
    half = len(prompts) // 2
    params = [GREEDY] * half + [SAMPLED] * half
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


def start(checkpoint: Checkpoint, budget: int, run_config: RunConfig, worker_cls: type) -> LLM:
    options = {
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "use_tqdm_on_load": False,
        "max_model_len": MAX_LEN,
        "max_num_seqs": 16,
        "max_num_batched_tokens": budget,
        # On a shared machine, two threads take ten times as long for such small matrices.
        "num_threads": 1,
        "worker_cls": worker_cls,
        # Enough blocks for all requests, and far less than the default share of the memory.
        "block_size": BLOCK_SIZE,
        "num_gpu_blocks_override": 2000,
    }
    if run_config.room:
        blocks = run_config.room * longest_request(checkpoint, budget)
        options["num_gpu_blocks_override"] = blocks + SPARE_BLOCKS
    return LLM(str(checkpoint.folder), **(options | run_config.options))


def longest_request(checkpoint: Checkpoint, budget: int) -> int:
    """Return the number of blocks of the longest request, with steps of `budget` tokens."""
    specs = {
        str(layer): FullAttentionSpec(
            block_size=BLOCK_SIZE,
            num_kv_heads=1,
            head_size=1,
            dtype="float32",
            sliding_window=window,
        )
        for layer, window in enumerate(checkpoint.windows)
    }
    groups = group_layers([specs], block_size=BLOCK_SIZE, max_model_len=MAX_LEN)
    cache = KVCacheConfig(num_blocks=2, groups=groups)
    return sequence_blocks(cache, MAX_LEN, max_step_tokens=budget)


def run_engine(
    checkpoint: Checkpoint,
    budget: int,
    run_config: RunConfig,
    worker_cls: type = RecordingWorker,
) -> RunResult:
    prompts = make_prompts()
    with start(checkpoint, budget, run_config, worker_cls) as llm:
        requests = answer(llm, prompts)
        if run_config.hits_prefixes:
            requests |= answer(llm, follow_ups(prompts, list(requests.values())))
        (recorded,) = llm.llm_engine.collective_rpc("take_recorded")
        stats = llm.llm_engine.last_stats
    assert stats is not None
    return RunResult(requests=requests, recorded=recorded, stats=stats)


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
    folder: Path = tmp_path_factory.mktemp("checkpoint")
    return make_checkpoint(request.param, folder, commit_seed()[0])


def cases() -> Iterator[Any]:
    """Yield every case. All budgets but one of a checkpoint and configuration are marked slow."""
    for i, name in enumerate(CHECKPOINTS):
        for j, run_config in enumerate(RUN_CONFIGS):
            for k, budget in enumerate(BUDGETS):
                marks = () if k == (i + j) % len(BUDGETS) else (pytest.mark.slow,)
                label = f"{name}; {run_config.name}; {budget}"
                yield pytest.param(name, run_config, budget, id=label, marks=marks)


@pytest.mark.costly
@pytest.mark.sampled(16)
@pytest.mark.parametrize(
    ("checkpoint", "run_config", "budget"), list(cases()), indirect=["checkpoint"]
)
def test_engine_agrees_with_transformers(
    checkpoint: Checkpoint, run_config: RunConfig, budget: int, record_property
) -> None:
    ran = run_engine(checkpoint, budget, run_config)
    agreement = measure(ran.requests, ran.recorded, checkpoint.logits)
    case = f"{checkpoint.name}; {run_config.name}"
    record_property("parity", table_row(agreement, budget, case, ran.stats))
    assert all(
        len(request.token_ids) == request.num_prompt + NUM_NEW_TOKENS
        for request in ran.requests.values()
    )
    # Layers with sliding windows need few blocks after the prompt. If a whole prompt is computed in
    # one step, or all layers have windows, space for a few prompts is then enough for all requests.
    in_pieces = budget < MAX_LEN
    if not any(checkpoint.windows) or (
        in_pieces and (run_config.room <= 1 or not all(checkpoint.windows))
    ):
        assert bool(ran.stats.num_preemptions) == bool(run_config.room), ran.stats
    assert run_config.hits_prefixes == any(r.num_cached for r in ran.requests.values())
    if run_config.hits_prefixes:
        assert ran.stats.prefix_hits >= sum(r.num_cached for r in ran.requests.values()) > 0
    agreement.check()


def table_row(
    agreement: Agreement, budget: int, case: str, stats: SchedulerStats
) -> tuple[object, ...]:
    happened = ""
    if stats.num_preemptions:
        happened = f" ({stats.num_preemptions} preemptions)"
    elif stats.prefix_hits:
        happened = f" ({stats.prefix_hits} tokens hit)"
    if agreement.draws > 1:
        happened += f" (draw {agreement.draws} of the prompts)"
    return (
        budget,
        agreement.positions,
        agreement.excluded,
        f"{agreement.max_error:.1e}",
        f"{agreement.qualifying} {agreement.qualifying / agreement.positions:7.2%}",
        agreement.tokens,
        agreement.tokens_qualifying,
        agreement.tokens_equal,
        case + happened,
    )


class MixingWorker(RecordingWorker):
    """Replaces all blocks that a request gets in a step with one block."""

    def execute_model(self, plan: SchedulerOutput) -> None:
        """Execute the plan with wrong blocks."""
        blocks = tuple(
            replace(columns, block_ids=array("i", columns.block_ids[:1] * len(columns.block_ids)))
            for columns in plan.blocks
        )
        super().execute_model(replace(plan, blocks=blocks))


@pytest.mark.costly
@pytest.mark.parametrize("checkpoint", list(CHECKPOINTS)[:1], indirect=True)
def test_wrong_kv_cache_blocks_violate_the_margin_rule(checkpoint: Checkpoint) -> None:
    ran = run_engine(checkpoint, 64, RUN_CONFIGS[0], MixingWorker)
    agreement = measure(ran.requests, ran.recorded, checkpoint.logits)
    assert agreement.max_error > 1000 * TOLERANCE
    with pytest.raises(AssertionError, match="logits differ"):
        agreement.check()


@pytest.mark.costly
@pytest.mark.parametrize(
    ("checkpoint", "overrides"),
    [
        ("mistral: window 37, 8/2 heads of 8", {"sliding_window": 38}),
        ("llama: llama3 rope, 4/2 heads", {"rope_parameters": LLAMA3_ROPE | {"factor": 7.9}}),
        ("qwen2: biases, window 45 above layer 0", {"max_window_layers": 2, "layer_types": None}),
    ],
    indirect=["checkpoint"],
)
def test_a_slightly_wrong_model_violates_the_margin_rule(
    checkpoint: Checkpoint, overrides: dict[str, Any]
) -> None:
    run_config = RunConfig(name="wrong", options={**NO_PREFIX_CACHE, "hf_overrides": overrides})
    ran = run_engine(checkpoint, 256, run_config)
    agreement = measure(ran.requests, ran.recorded, checkpoint.logits)
    assert agreement.max_error > 50 * TOLERANCE


@pytest.mark.costly
@pytest.mark.parametrize("checkpoint", list(CHECKPOINTS)[-1:], indirect=True)
def test_logprobs_equal_those_of_transformers(checkpoint: Checkpoint) -> None:
    prompts, params = make_prompts(), replace(GREEDY, logprobs=0, prompt_logprobs=0)
    with start(checkpoint, 64, RUN_CONFIGS[0], RecordingWorker) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        (completion,) = output.outputs
        token_ids = [*prompt, *completion.token_ids]
        assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
        reported = [*output.prompt_logprobs[1:], *(completion.logprobs or [])]
        ours_N = torch.tensor(
            [entry[token].logprob for entry, token in zip(reported, token_ids[1:], strict=True)]
        )
        reference_NV = checkpoint.logits(token_ids)[:-1].log_softmax(-1)
        reference_N = reference_NV.gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0]
        torch.testing.assert_close(ours_N, reference_N, rtol=0, atol=TOLERANCE)
