"""Positions at which rounding errors select the experts are excluded, and no others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from parity.checkpoints import Checkpoint
from parity.family_checkpoints import FAMILIES, make_model
from parity.margin_rule import TOLERANCE, Agreement, Sequenced, measure
from parity.recording import RecordedRun
from parity.router_gaps import MIN_GAP, RouterGaps, first_tie
from parity.test_family_parity import (
    MAX_DRAWS,
    RUN_CONFIGS,
    RunResult,
    compare,
    make_prompts,
    one_thread,
    prompt_source,
    run_engine,
)

MAX_LEN = 200
SEED = 3
RUN_CONFIG = RUN_CONFIGS["unchunked prefill"]
WITH_EXPERTS = [
    name for name, family in FAMILIES.items() if any("expert" in field for field in family.fields)
]
__all__ = ["one_thread"]


def gaps_of(scores: torch.Tensor, k: int) -> list[float]:
    with RouterGaps(len(scores)) as gaps:
        torch.topk(scores, k, dim=-1)
    return gaps.smallest_T.tolist()


def test_the_gap_is_between_the_last_selected_expert_and_the_next_one() -> None:
    logits = torch.tensor([[3.0, -1.0, 2.5, 2.0], [0.0, 0.5, -4.0, 4.0]], dtype=torch.float64)
    assert gaps_of(logits, 2) == [0.5, 0.5]
    assert gaps_of(logits, 3) == [3.0, 4.0]
    assert gaps_of(logits, 4) == [float("inf")] * 2


def test_the_gap_of_probabilities_is_that_of_their_logits() -> None:
    logits = torch.tensor([[3.0, -1.0, -2.0, -2.0 - 2e-5], [0.0, 0.5, -4.0, -3.9]])
    assert gaps_of(logits.double().softmax(-1), 3) == pytest.approx([2e-5, 0.1], rel=0.06)


def test_masked_groups_have_no_ties() -> None:
    scores = torch.tensor([[1.5, 0.5, float("-inf"), float("-inf")]])
    assert gaps_of(scores, 2) == gaps_of(scores, 3) == [float("inf")]


def test_sums_of_the_largest_scores_of_groups_are_not_selections() -> None:
    with RouterGaps(6) as gaps:
        torch.zeros(6, 1, 4).topk(2, dim=-1)[0].sum(-1)
    assert gaps.num_selections == 0


@pytest.mark.parametrize("name", WITH_EXPERTS)
@torch.inference_mode()
def test_the_routers_of_every_family_with_experts_are_recorded(name: str) -> None:
    model = make_model(FAMILIES[name], name, SEED)
    num_layers = sum(part.endswith(".experts") for part, _ in model.named_modules())
    with RouterGaps(9) as gaps:
        model(torch.arange(9)[None], use_cache=False)
    has_groups = name.startswith("deepseek_v3") or name == "deepseek_v2"
    assert gaps.num_selections == num_layers * (2 if has_groups else 1) > 0
    assert gaps.smallest_T.isfinite().all()


def compare_with_tie(position: int, ours_TV: torch.Tensor, reference_TV: torch.Tensor) -> Agreement:
    """Compare a request of 4 prompt tokens and 40 greedy ones, with a tie at a position."""
    gap_T = torch.full((44,), 0.1)
    gap_T[position] = MIN_GAP / 2
    tokens = [1, 2, 3, 4, *reference_TV.argmax(-1).tolist()[3:-1]]
    request = Sequenced(token_ids=tuple(tokens), num_prompt=4, num_cached=0, greedy=True)
    runs = [
        RecordedRun(request_id="a", start=0, logits=ours_TV[:4]),
        RecordedRun(request_id="a", start=4, logits=ours_TV[4:-1]),
    ]
    return measure({"a": request}, runs, lambda _: reference_TV, lambda _: gap_T)


@pytest.mark.parametrize("position", [0, 2, 4, 20, 42])
def test_a_sequence_is_compared_up_to_its_first_tie(position: int) -> None:
    reference_TV = torch.randn((44, 50), generator=torch.Generator().manual_seed(3))
    ours_TV = reference_TV.clone()
    ours_TV[position:] += 1.0
    agreement = compare_with_tie(position, ours_TV, reference_TV)
    assert (agreement.positions, agreement.excluded) == (position, 43 - position)
    assert agreement.tokens == max(position - 3, 0)
    agreement.check_compared()
    if position < 40:
        with pytest.raises(AssertionError, match=r"too many positions|nothing was compared"):
            agreement.check()
    else:
        agreement.check()
    ours_TV[42] = float("nan")
    with pytest.raises(AssertionError, match="logits differ"):
        compare_with_tie(position, ours_TV, reference_TV).check_compared()
    if position:
        ours_TV = reference_TV.clone()
        ours_TV[position - 1] += 1.0
        with pytest.raises(AssertionError, match="logits differ"):
            compare_with_tie(position, ours_TV, reference_TV).check_compared()


@torch.inference_mode()
def disagreeing_checkpoint(folder: Path, margin: float) -> Checkpoint:
    """Return a checkpoint whose saved router prefers another expert than its reference.

    At the first token of the second prompt of draw 0, the logit of the third expert is by `margin`
    larger than that of the second in the saved router of layer 0, and smaller in the reference.
    """
    name = "mixtral"
    model = make_model(FAMILIES[name], name, SEED)
    gate = model.model.layers[0].mlp.gate
    inputs: list[Any] = []
    hook = gate.register_forward_pre_hook(lambda _, args: inputs.append(args[0].reshape(-1)))
    model(torch.tensor([make_prompts(prompt_source(0), MAX_LEN)[1][:1]]), use_cache=False)
    hook.remove()
    x = inputs[0].double()
    logits = gate.weight.double() @ x
    _, second, third = logits.topk(3).indices.tolist()
    row = gate.weight[third].double() + x * (logits[second] - logits[third]) / x.dot(x)
    gate.weight[third] = (row + x * margin / x.dot(x)).float()
    model.save_pretrained(folder)
    gate.weight[third] = (row - x * margin / x.dot(x)).float()
    return Checkpoint(name=name, folder=folder, oracle=model)


@pytest.fixture
def fixed_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parity.test_family_parity.commit_seed", lambda: (SEED, "fixed"))


def largest_error(checkpoint: Checkpoint, ran: RunResult) -> float:
    return measure(ran.requests, ran.recorded[0], checkpoint.logits).max_error


@pytest.mark.costly
def test_prompts_with_a_tie_are_drawn_again(tmp_path: Path, fixed_seed: None) -> None:
    checkpoint = disagreeing_checkpoint(tmp_path, MIN_GAP / 4)
    ran = run_engine(checkpoint, RUN_CONFIG, MAX_LEN)
    assert largest_error(checkpoint, ran) > 100 * TOLERANCE
    assert [first_tie(checkpoint.router_gaps(r.token_ids)) for r in ran.requests.values()][1] == 0

    ran, agreement = compare(checkpoint, RUN_CONFIG, MAX_LEN)
    agreement.check()
    assert 1 < agreement.draws <= MAX_DRAWS
    assert largest_error(checkpoint, ran) <= TOLERANCE or agreement.excluded


@pytest.mark.costly
def test_ties_in_every_draw_are_reported(
    tmp_path: Path, fixed_seed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = disagreeing_checkpoint(tmp_path, MIN_GAP / 4)
    monkeypatch.setattr("parity.test_family_parity.MAX_DRAWS", 1)
    _, agreement = compare(checkpoint, RUN_CONFIG, MAX_LEN)
    with pytest.raises(AssertionError, match="too many positions are excluded"):
        agreement.check()


@pytest.mark.costly
def test_a_wrong_expert_with_a_clear_gap_is_detected(tmp_path: Path, fixed_seed: None) -> None:
    checkpoint = disagreeing_checkpoint(tmp_path, 2 * MIN_GAP)
    ran, agreement = compare(checkpoint, RUN_CONFIG, MAX_LEN)
    assert agreement.draws == 1
    with pytest.raises(AssertionError, match="logits differ"):
        agreement.check()
    # The change of the router itself is too small to be detected in the other requests.
    wrong = list(ran.requests)[1]
    others = [run for run in ran.recorded[0] if not run.request_id.startswith(wrong)]
    assert others
    assert measure(ran.requests, others, checkpoint.logits).max_error <= TOLERANCE
