"""The results of all ranks are combined. A transfer is finished when all ranks finished it."""

from array import array

import pytest

from dovetail.errors import ContractError
from dovetail.executors.output_aggregator import OutcomeAggregator, RankedSide, aggregate_outputs
from dovetail.interfaces import KVOutcome
from dovetail.result import ModelRunnerOutput
from dovetail_devkit.fakes.kv_connector import FakeSchedulerSide


def output(kv_transfer=b"", tokens=(7,)):
    sampled = array("B", [1] * len(tokens))
    return ModelRunnerOutput(
        step_id=3, num_sampled=sampled, token_ids=array("i", tokens), kv_transfer=kv_transfer
    )


class Side(FakeSchedulerSide):
    """A fake connector: `b"1 2 -3"` means that transfers 1 and 2 ended and transfer 3 failed."""

    def update(self, response, rank=0):
        ended = [int(number) for number in response.split()]
        return KVOutcome(
            done=tuple(number for number in ended if number > 0),
            failed={-number: (-10 * number + rank,) for number in ended if number < 0},
        )


def test_the_result_of_rank_0_is_returned_with_the_kv_transfers_of_all_ranks():
    whole = aggregate_outputs([output(b"a"), output(b"b", tokens=())])
    assert list(whole.token_ids) == [7] and whole.step_id == 3
    message = []

    class RecordingSide(FakeSchedulerSide):
        def update(self, response, rank=0):
            message.append((rank, response))
            return KVOutcome()

    RankedSide(RecordingSide(2), 2).update(whole.kv_transfer)
    assert message == [(0, b"a"), (1, b"b")]


def test_without_kv_transfers_the_result_of_rank_0_is_returned_unchanged():
    first = output()
    assert aggregate_outputs([first, output(tokens=())]) is first


def test_a_transfer_finishes_when_all_ranks_have_finished_it():
    side = RankedSide(Side(3), 3)

    def step(*results):
        return side.update(
            aggregate_outputs([output(response) for response in results]).kv_transfer
        )

    assert step(b"1", b"1 2", b"") == KVOutcome()
    assert step(b"2", b"", b"1") == KVOutcome(done=(1,))
    assert step(b"-3", b"3", b"") == KVOutcome()
    assert step(b"", b"-4", b"2 -3") == KVOutcome(done=(2,), failed={3: (30, 32)})
    assert step(b"4", b"", b"4") == KVOutcome(failed={4: (41,)})


def test_a_rank_that_reports_a_transfer_twice_raises_a_contract_error():
    outcomes = OutcomeAggregator(2)
    outcomes.add(0, KVOutcome(done=(1,)))
    with pytest.raises(ContractError, match="rank 0 reports the end of transfer 1 twice"):
        outcomes.add(0, KVOutcome(done=(1,)))


@pytest.mark.parametrize("gathered", [[b"1"], [b"1", b"", b""]], ids=["one rank", "three"])
def test_an_aggregated_result_of_too_few_or_too_many_ranks_is_rejected(gathered):
    result = aggregate_outputs([output(item) for item in gathered]).kv_transfer
    with pytest.raises(ContractError, match="of 2 ranks"):
        RankedSide(Side(2), 2).update(result)


def test_a_result_that_was_not_aggregated_over_the_ranks_is_rejected():
    with pytest.raises(ContractError, match=r"reports of only 1 of 2 ranks.*aggregate_outputs"):
        RankedSide(Side(2), 2).update(b"1")
