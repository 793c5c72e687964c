"""The margin rule rejects every kind of difference and accepts rounding errors."""

from __future__ import annotations

import pytest
import torch

from parity.commit_seed import commit_seed
from parity.margin_rule import TOLERANCE, Agreement, Sequenced, measure
from parity.recording import RecordedRun

NUM_PROMPT, NUM_TOKENS, VOCAB_SIZE = 4, 44, 50


@pytest.fixture(name="reference_TV")
def reference() -> torch.Tensor:
    return torch.randn((NUM_TOKENS, VOCAB_SIZE), generator=torch.Generator().manual_seed(3))


@pytest.fixture
def token_ids(reference_TV: torch.Tensor) -> list[int]:
    """Return a prompt followed by the most likely tokens."""
    return [7, 8, 9, 10, *reference_TV.argmax(-1).tolist()[NUM_PROMPT - 1 : -1]]


def agreement_of(
    ours_TV: torch.Tensor, reference_TV: torch.Tensor, token_ids: list[int]
) -> Agreement:
    """Compare two runs, as if the prompt were split after its third token."""
    request = Sequenced(
        token_ids=tuple(token_ids), num_prompt=NUM_PROMPT, num_cached=0, greedy=True
    )
    runs = [
        RecordedRun(request_id="a", start=0, logits=ours_TV[:3]),
        RecordedRun(request_id="a", start=3, logits=ours_TV[3 : NUM_TOKENS - 1]),
    ]
    return measure({"a": request}, runs, lambda _: reference_TV)


def test_rounding_errors_are_accepted(reference_TV: torch.Tensor, token_ids: list[int]) -> None:
    noise = (torch.rand_like(reference_TV) * 2 - 1) * 0.9 * TOLERANCE
    agreement = agreement_of(reference_TV + noise, reference_TV, token_ids)
    agreement.check()
    assert agreement.positions == NUM_TOKENS - 1
    assert agreement.tokens == NUM_TOKENS - NUM_PROMPT
    assert agreement.missing == 0
    assert 0.5 * TOLERANCE < agreement.max_error < TOLERANCE


@pytest.mark.parametrize("value", [2 * TOLERANCE, float("nan")])
@pytest.mark.parametrize("position", [0, 2, 3, NUM_TOKENS - 2])
def test_one_wrong_logit_violates_the_rule(
    reference_TV: torch.Tensor, token_ids: list[int], value: float, position: int
) -> None:
    ours_TV = reference_TV.clone()
    ours_TV[position, 5] += value
    with pytest.raises(AssertionError, match="logits differ"):
        agreement_of(ours_TV, reference_TV, token_ids).check()


def test_a_wrong_token_violates_the_rule(reference_TV: torch.Tensor, token_ids: list[int]) -> None:
    token_ids[20] = (token_ids[20] + 1) % VOCAB_SIZE
    with pytest.raises(AssertionError, match="tokens differ"):
        agreement_of(reference_TV, reference_TV, token_ids).check()


def test_either_token_of_a_tie_is_accepted(
    reference_TV: torch.Tensor, token_ids: list[int]
) -> None:
    reference_TV[19, 5] = reference_TV[19].max() + TOLERANCE
    agreement = agreement_of(reference_TV, reference_TV, token_ids)
    agreement.check()
    assert agreement.tokens_qualifying == agreement.tokens - 1
    assert agreement.qualifying == agreement.positions - 1


def test_a_comparison_with_too_many_ties_is_rejected(
    reference_TV: torch.Tensor, token_ids: list[int]
) -> None:
    reference_TV[:20, 5] = reference_TV[:20].amax(-1)
    with pytest.raises(AssertionError, match="too few positions qualify"):
        agreement_of(reference_TV, reference_TV, token_ids).check()


def test_a_position_that_was_not_computed_violates_the_rule(
    reference_TV: torch.Tensor, token_ids: list[int]
) -> None:
    request = Sequenced(
        token_ids=tuple(token_ids), num_prompt=NUM_PROMPT, num_cached=2, greedy=True
    )
    run = RecordedRun(request_id="a", start=3, logits=reference_TV[3:-1])
    agreement = measure({"a": request}, [run], lambda _: reference_TV)
    assert agreement.missing == 1
    with pytest.raises(AssertionError, match="never computed"):
        agreement.check()


def test_an_empty_comparison_is_rejected() -> None:
    with pytest.raises(AssertionError, match="nothing was compared"):
        Agreement().check()


def test_the_seed_of_the_parity_tests_is_defined_without_git(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "")
    seed, source = commit_seed.__wrapped__()
    assert source.startswith("no git checkout")
    assert (seed, source) == commit_seed.__wrapped__()
