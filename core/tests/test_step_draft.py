import pytest

from dovetail.interfaces import SchedulerLimits
from dovetail.plan import StepBuilder
from dovetail.request import EngineCoreRequest, Request
from dovetail.sampling_params import SamplingParams
from dovetail.scheduling.draft import StepDraft
from dovetail.scheduling.encoder_budget import EncoderBudget


def request(row, num_tokens=6, *, computed=0, blocks=(1, 2)):
    requested = EngineCoreRequest(
        request_id=f"r{row}",
        prompt_token_ids=tuple(range(num_tokens)),
        sampling_params=SamplingParams(),
        max_tokens=8,
    )
    new_request = Request(requested, max_model_len=64)
    new_request.row, new_request.generation = row, 1
    new_request.num_computed_tokens = computed
    new_request.blocks = [list(blocks)]
    return new_request


@pytest.fixture
def draft():
    limits = SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64)
    return StepDraft(16, EncoderBudget(limits))


def test_each_grant_reduces_the_token_budget_and_adds_a_request_to_the_plan(draft):
    whole, chunk = request(0), request(1)
    draft.grant(whole, 6)
    draft.grant(chunk, 4)
    assert draft.tokens_left == 6
    plan, _ = draft.emit(StepBuilder())
    assert plan.rows.tolist() == [0, 1]
    assert plan.starts.tolist() == [0, 0]
    assert plan.num_tokens.tolist() == [6, 4]
    assert plan.samples.tolist() == [1, 0]


def test_the_state_of_a_request_does_not_change_before_the_plan_is_emitted(draft):
    first = request(0, computed=2)
    draft.grant(first, 4)
    assert (first.num_computed_tokens, first.num_tokens_with_pending) == (2, 6)
    draft.emit(StepBuilder())
    assert (first.num_computed_tokens, first.num_tokens_with_pending) == (6, 7)


def test_a_partial_prefill_has_no_pending_token(draft):
    first = request(0)
    draft.grant(first, 5)
    draft.emit(StepBuilder())
    assert (first.num_computed_tokens, first.num_tokens_with_pending) == (5, 6)


def test_a_plan_has_all_blocks_of_a_new_request_and_only_new_blocks_of_a_running_request(
    draft,
):
    joining, growing = request(3, blocks=(1, 2)), request(4, blocks=(5, 6))
    draft.join(joining)
    draft.grow(growing, [[6]])
    plan, _ = draft.emit(StepBuilder())
    assert [new.row for new in plan.joins] == [3]
    (blocks,) = plan.blocks
    assert dict(zip(blocks.rows, blocks.counts, strict=True)) == {3: 2, 4: 1}
    assert sorted(blocks.block_ids) == [1, 2, 6]


@pytest.mark.parametrize("joined", [True, False])
def test_a_revoked_grant_is_undone_completely(draft, joined):
    revoked, stays = request(0), request(1)
    if joined:
        draft.join(revoked)
    draft.grow(revoked, [[2]])
    draft.grant(revoked, 6)
    draft.grow(stays, [[2]])
    draft.grant(stays, 1)
    assert draft.revoke(revoked) is joined
    assert draft.tokens_left == 15
    plan, _ = draft.emit(StepBuilder())
    assert plan.rows.tolist() == [1] and plan.joins == ()
    assert plan.blocks[0].rows.tolist() == [1]
    assert revoked.num_computed_tokens == 0


def test_revoking_a_request_without_a_grant_has_no_effect(draft):
    stays = request(1)
    draft.grant(stays, 2)
    assert draft.revoke(request(0)) is False
    assert draft.tokens_left == 14 and draft.counts == {stays: 2}
