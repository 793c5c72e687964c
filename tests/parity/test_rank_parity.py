"""Compares several ranks with one rank: logits at every position, tokens and log-probabilities.

In float32 the margin rule compares them with one rank and with transformers. In bfloat16 their
divergence from float32 is compared with the divergence of one rank.

Dimensions: N positions, V vocabulary.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail import LLM, SamplingParams
from dovetail.engine.input.input_processor import user_request_id
from parity.checkpoints import VOCAB_SIZE, Checkpoint, make_checkpoint
from parity.commit_seed import commit_seed
from parity.margin_rule import MARGIN, TOLERANCE, Sequenced, measure
from parity.rank_threads import TORCH_PARTS, RankThreads
from parity.recording import RecordedRun
from parity.recording_worker import RecordingWorker

BUDGET = 64
MAX_LEN = 200
PROMPT_LENS = (17, 150, 1, 60)
GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=1.0, top_k=50, top_p=0.95, seed=1)
CASES = [
    ("llama: llama3 rope, 4/2 heads", 2),
    ("llama: llama3 rope, 4/2 heads", 4),
    ("llama: all biases, tied, 4/1 heads of 20", 2),
    ("mistral: window 37, 8/2 heads of 8", 2),
    ("qwen2: biases, tied, 6/2 heads", 2),
    ("qwen3: biases, window above, 4/4 heads of 10", 2),
]
BF16_CASES = [case for case in CASES if case[1] == 2 and not case[0].startswith("mistral")]


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """The results of a run. recorded: the recorded logits of each rank."""

    requests: dict[str, Sequenced]
    recorded: list[list[RecordedRun]]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    folder: Path = tmp_path_factory.mktemp("checkpoint")
    return make_checkpoint(request.param, folder, commit_seed()[0])


def start(checkpoint: Checkpoint, num_ranks: int, dtype: str = "float32", **options: object) -> LLM:
    return LLM(
        str(checkpoint.folder),
        dtype=dtype,
        skip_tokenizer_init=True,
        use_tqdm_on_load=False,
        max_model_len=MAX_LEN,
        max_num_seqs=8,
        max_num_batched_tokens=BUDGET,
        num_threads=1,
        block_size=16,
        num_gpu_blocks_override=200,
        enable_prefix_caching=False,
        executor_backend=RankThreads,
        tensor_parallel_size=num_ranks,
        worker_cls=RecordingWorker,
        **TORCH_PARTS,
        **options,
    )


def make_prompts() -> list[list[int]]:
    """Return two prompts of each length. The first half is for greedy requests."""
    source = random.Random(commit_seed()[0])
    return [[source.randrange(VOCAB_SIZE) for _ in range(count)] for count in PROMPT_LENS * 2]


def run(checkpoint: Checkpoint, num_ranks: int, dtype: str = "float32") -> RunResult:
    prompts = make_prompts()
    params = [GREEDY] * len(PROMPT_LENS) + [SAMPLED] * len(PROMPT_LENS)
    with start(checkpoint, num_ranks, dtype) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        recorded = llm.llm_engine.collective_rpc("take_recorded")
    requests = {
        output.request_id: Sequenced(
            token_ids=(*prompt, *output.outputs[0].token_ids),
            num_prompt=len(prompt),
            num_cached=0,
            greedy=request_params is GREEDY,
        )
        for prompt, request_params, output in zip(prompts, params, outputs, strict=True)
    }
    return RunResult(requests=requests, recorded=recorded)


def forced_logits(checkpoint: Checkpoint, ran: RunResult) -> dict[tuple[int, ...], torch.Tensor]:
    """Return the logits of one rank after every token of the sequences except the last."""
    sequences = [request.token_ids for request in ran.requests.values()]
    prompts = [list(token_ids[:-1]) for token_ids in sequences]
    with start(checkpoint, 1) as llm:
        outputs = llm.generate(prompts, replace(GREEDY, max_tokens=1), use_tqdm=False)
        (recorded,) = llm.llm_engine.collective_rpc("take_recorded")
    by_name: dict[str, list[torch.Tensor]] = {output.request_id: [] for output in outputs}
    for part in sorted(recorded, key=lambda part: part.start):
        by_name[user_request_id(part.request_id)].append(part.logits)
    # The margin rule needs a row for the last token, although it does not compare this row.
    nothing = torch.zeros(1, VOCAB_SIZE)
    return {
        token_ids: torch.cat([*by_name[output.request_id], nothing])
        for token_ids, output in zip(sequences, outputs, strict=True)
    }


@pytest.mark.costly
@pytest.mark.sampled(6)
@pytest.mark.parametrize(("checkpoint", "num_ranks"), CASES, indirect=["checkpoint"])
def test_several_ranks_agree_with_one_rank(
    checkpoint: Checkpoint, num_ranks: int, record_property
) -> None:
    ran = run(checkpoint, num_ranks)
    first, *others = ran.recorded
    for other in others:
        assert all(
            torch.equal(item.logits, two.logits) for item, two in zip(first, other, strict=True)
        ), "ranks have different logits"
    reference = forced_logits(checkpoint, ran)
    measure(ran.requests, first, lambda token_ids: reference[tuple(token_ids)]).check()
    agreement = measure(ran.requests, first, checkpoint.logits)
    row = (
        BUDGET,
        agreement.positions,
        agreement.excluded,
        f"{agreement.max_error:.1e}",
        f"{agreement.qualifying} {agreement.qualifying / agreement.positions:7.2%}",
        agreement.tokens,
        agreement.tokens_qualifying,
        agreement.tokens_equal,
        f"{checkpoint.name}; {num_ranks} ranks",
    )
    record_property("parity", row)
    agreement.check()


def divergence(ran: RunResult, checkpoint: Checkpoint) -> tuple[float, float]:
    """Return the mean KL divergence from float32, and the top-1 agreement."""
    divergences, equal = [], []
    for part in ran.recorded[0]:
        token_ids = ran.requests[user_request_id(part.request_id)].token_ids
        reference_NV = checkpoint.logits(token_ids)[part.start : part.start + len(part.logits)]
        log_p_NV, log_q_NV = reference_NV.log_softmax(-1), part.logits.float().log_softmax(-1)
        divergences.append((log_p_NV.exp() * (log_p_NV - log_q_NV)).sum(-1))
        equal.append(reference_NV.argmax(-1) == part.logits.argmax(-1))
    return torch.cat(divergences).mean().item(), torch.cat(equal).float().mean().item()


@pytest.mark.costly
@pytest.mark.sampled(8)
@pytest.mark.parametrize(("checkpoint", "num_ranks"), BF16_CASES, indirect=["checkpoint"])
def test_bfloat16_ranks_are_as_close_to_float32_as_one_rank(
    checkpoint: Checkpoint, num_ranks: int, note: Callable[[str], None]
) -> None:
    first = divergence(run(checkpoint, 1, "bfloat16"), checkpoint)
    several = divergence(run(checkpoint, num_ranks, "bfloat16"), checkpoint)
    shown = " and ".join(f"KL {actual[0]:.1e}, best {actual[1]:.2%}" for actual in (first, several))
    note(f"bf16 compared with float32, one rank and two: {shown} ({checkpoint.name})")
    assert several[0] < 1.5 * first[0] and several[1] > first[1] - 0.02


@pytest.mark.parametrize("checkpoint", [CASES[0][0]], indirect=True)
def test_each_of_two_ranks_holds_half_of_the_weights(checkpoint: Checkpoint) -> None:
    def held(worker: Any) -> tuple[int, int]:
        specs = worker.get_kv_cache_spec().values()
        return (
            sum(parameter.nbytes for parameter in worker._model.parameters()),
            sum(spec.page_size_bytes for spec in specs),
        )

    with start(checkpoint, 1) as llm:
        ((weights, pages),) = llm.llm_engine.collective_rpc(held)
    with start(checkpoint, 2) as llm:
        halves = llm.llm_engine.collective_rpc(held)
    assert all(0.5 <= half / weights + 0.005 < 0.52 for half, _ in halves)
    assert [half for _, half in halves] == [pages // 2] * 2


@pytest.mark.costly
@pytest.mark.parametrize("checkpoint", [CASES[-1][0]], indirect=True)
def test_log_probabilities_of_two_ranks_equal_those_of_one_rank(checkpoint: Checkpoint) -> None:
    check_log_probabilities(checkpoint)


@pytest.mark.costly
@pytest.mark.parametrize("checkpoint", [CASES[0][0]], indirect=True)
def test_a_third_party_model_is_split_by_its_layers(checkpoint: Checkpoint) -> None:
    """The `dummy` loader creates the same random weights for any number of ranks."""
    overrides = {"architectures": ["parity.outside_model:AttentionOnly"]}
    check_log_probabilities(checkpoint, load_format="dummy", hf_overrides=overrides)


def check_log_probabilities(checkpoint: Checkpoint, **options: object) -> None:
    params = replace(GREEDY, logprobs=3, prompt_logprobs=3)
    results = []
    for num_ranks in (1, 2):
        with start(checkpoint, num_ranks, **options) as llm:
            results.append(llm.generate(make_prompts(), params, use_tqdm=False))
    num_compared = 0
    for item, two in zip(*results, strict=True):
        own, other = ([*out.prompt_logprobs[1:], *out.outputs[0].logprobs] for out in (item, two))
        num_alike = common_length(item.outputs[0].token_ids, two.outputs[0].token_ids)
        if num_alike < GREEDY.max_tokens:
            best, second, *_ = sorted(
                (entry.logprob for entry in item.outputs[0].logprobs[num_alike].values()),
                reverse=True,
            )
            assert best - second <= MARGIN, "tokens differ where one is clearly the most likely"
        # The prefixes are equal up to the first differing token.
        num_positions = len(item.prompt_logprobs) - 1 + min(num_alike + 1, GREEDY.max_tokens)
        pairs = zip(own[:num_positions], other[:num_positions], strict=True)
        for left, right in pairs:
            for token in left.keys() & right.keys():
                assert left[token].logprob == pytest.approx(right[token].logprob, abs=TOLERANCE)
                num_compared += 1
    assert num_compared > 3 * sum(PROMPT_LENS)


def common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the number of equal tokens before the first difference."""
    pairs = zip(first, second, strict=True)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), len(first))
