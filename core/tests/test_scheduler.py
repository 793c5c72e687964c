"""The plans that the scheduler makes for given requests. The strict worker is in conftest.py."""

import pytest

from dovetail.errors import RequestError
from dovetail.sampling_params import SamplingParams


def test_a_prompt_runs_in_one_step_and_then_decodes_token_by_token(drive, alone):
    driver = drive()
    prompt = driver.add("a", 5, max_tokens=3)
    assert [driver.step() for _ in range(3)] == [{"a": (0, 5)}, {"a": (5, 1)}, {"a": (6, 1)}]
    assert driver.tokens["a"] == alone(prompt, 3)
    assert driver.reasons == {"a": "length"}
    assert driver.plan() == {}  # an idle scheduler returns empty plans
    driver.settle()
    depth = driver.scheduler.depth()
    assert (depth.num_waiting, depth.num_running) == (0, 0)


def test_requests_are_added_to_and_removed_from_a_running_batch(drive):
    driver = drive()
    driver.add("a", 3, max_tokens=3)
    assert driver.step() == {"a": (0, 3)}
    driver.add("b", 4, max_tokens=3)
    assert driver.step() == {"a": (3, 1), "b": (0, 4)}  # one plan has a decode and a prefill
    assert driver.step() == {"a": (4, 1), "b": (4, 1)}
    assert driver.step() == {"b": (5, 1)}


def test_a_long_prompt_is_chunked_to_the_remaining_budget(drive, alone):
    driver = drive(max_num_batched_tokens=8)
    driver.add("a", 3, max_tokens=9)
    prompt = driver.add("b", 17, max_tokens=2)
    assert driver.step() == {"a": (0, 3), "b": (0, 5)}
    assert driver.step() == {"a": (3, 1), "b": (5, 7)}
    driver.add("c", 4)
    assert driver.step() == {"a": (4, 1), "b": (12, 5), "c": (0, 2)}
    assert driver.step() == {"a": (5, 1), "b": (17, 1), "c": (2, 2)}
    assert driver.tokens["b"] == alone(prompt, 2)


def test_only_the_last_chunk_of_a_prompt_samples_a_token(drive):
    driver = drive(max_num_batched_tokens=8)
    driver.add("a", 20)
    driver.step()
    assert driver.tokens["a"] == []


def test_long_prefill_token_threshold_limits_the_chunks_of_all_requests(drive):
    driver = drive(long_prefill_token_threshold=4)
    driver.add("long", 10, max_tokens=1)
    driver.add("short", 3, max_tokens=5)
    assert driver.step() == {"long": (0, 4), "short": (0, 3)}
    assert driver.step() == {"long": (4, 4), "short": (3, 1)}
    assert driver.step() == {"long": (8, 2), "short": (4, 1)}


def test_without_chunked_prefill_a_prompt_waits_for_a_step_with_enough_budget(drive):
    driver = drive(enable_chunked_prefill=False, max_num_batched_tokens=10, max_model_len=10)
    driver.add("a", 6, max_tokens=2)
    driver.add("b", 6, max_tokens=2)
    driver.add("c", 1, max_tokens=2)
    assert driver.step() == {"a": (0, 6)}  # c is not admitted before b
    assert driver.step() == {"a": (6, 1), "b": (0, 6), "c": (0, 1)}


def test_at_most_max_num_seqs_requests_run_at_a_time(drive):
    driver = drive(max_num_seqs=2)
    for name in "abc":
        driver.add(name, 3, max_tokens=2)
    assert driver.step().keys() == {"a", "b"}
    assert driver.step().keys() == {"a", "b"}
    assert driver.step() == {"c": (0, 3)}


def test_no_request_is_admitted_before_the_first_waiting_request(drive):
    driver = drive(num_blocks=6, enable_prefix_caching=False)
    driver.add("a", 12, max_tokens=3)
    driver.add("head", 16, max_tokens=1)
    driver.add("small", 1, max_tokens=1)
    assert driver.step() == {"a": (0, 12)}
    assert driver.waiting() == ["head", "small"]
    driver.run()
    assert list(driver.reasons) == ["a", "head", "small"]


def test_a_long_prompt_allocates_only_the_blocks_of_its_current_chunk(drive):
    driver = drive(num_blocks=10, max_num_batched_tokens=8)
    driver.add("a", 30)
    driver.step()
    assert driver.scheduler.view.num_free_blocks == 8


@pytest.mark.parametrize(
    ("num_tokens", "limits", "words"),
    [
        (0, {}, "the allowed range is 1 to 255"),
        (256, {"max_num_batched_tokens": 999}, "the allowed range is 1 to 255"),
        (
            40,
            {"num_blocks": 10},
            "the allowed range is 1 to 39",
        ),  # the cache has 40 slots: none is left for an output token
        (65, {"enable_chunked_prefill": False}, "raise max_num_batched_tokens"),
    ],
)
def test_a_request_that_can_never_run_is_rejected(drive, num_tokens, limits, words):
    driver = drive(**limits)
    with pytest.raises(RequestError, match=words) as rejection:
        driver.add("a", num_tokens)
    assert rejection.value.parameter == "prompt"
    assert driver.scheduler.depth().num_waiting == 0


def test_a_request_id_in_use_is_rejected_until_the_request_ends(drive):
    driver = drive()
    driver.add("a", 3, max_tokens=2)
    with pytest.raises(RequestError, match="'a' is in use"):
        driver.add("a", 4)
    driver.step()
    with pytest.raises(RequestError, match="'a' is in use"):
        driver.add("a", 4)
    driver.step()
    driver.reasons.clear()
    driver.add("a", 4)
    driver.run()


def test_a_request_ends_when_the_cache_is_full(drive):
    driver = drive(num_blocks=3)
    driver.add("a", 5, max_tokens=100)
    driver.run()
    assert len(driver.tokens["a"]) == 7 and driver.reasons == {"a": "length"}


def test_a_stop_token_ends_a_request(drive, alone):
    driver = drive()
    expected = alone(range(5), 6)
    driver.add("a", range(5), max_tokens=6, stop=[expected[3]])
    driver.run()
    end = expected.index(expected[3]) + 1
    assert driver.tokens["a"] == expected[:end] and driver.reasons == {"a": "stop"}


# --- prefix caching ---------------------------------------------------------------------------


def test_a_prefix_is_found_after_its_owner_has_finished(drive, alone):
    driver = drive()
    driver.add("a", range(10), max_tokens=2)
    driver.run()
    driver.add("b", [*range(9), 77, 78], max_tokens=2)
    assert driver.step() == {"b": (8, 3)}
    driver.run()
    assert driver.cached == {"a": 0, "b": 8}
    assert driver.tokens["b"] == alone([*range(9), 77, 78], 2)


def test_a_prefix_is_found_while_its_owner_runs(drive):
    driver = drive()
    driver.add("a", range(10), max_tokens=20)
    driver.step()
    free = driver.scheduler.view.num_free_blocks
    driver.add("b", range(9), max_tokens=4)
    assert driver.step()["b"] == (8, 1)
    assert driver.scheduler.view.num_free_blocks == free - 1  # two of its three blocks are shared
    driver.run()


def test_generated_tokens_can_be_prefix_hits(drive, alone):
    driver = drive()
    prompt = driver.add("a", 6, max_tokens=7)
    driver.run()  # the last token is not computed, so three blocks are full
    driver.add("b", [*prompt, *alone(prompt, 7)], max_tokens=1)
    assert driver.step() == {"b": (12, 1)}


def test_the_last_prompt_token_is_always_computed(drive):
    driver = drive()
    driver.add("a", range(8), max_tokens=1)
    driver.run()
    driver.add("b", range(8), max_tokens=1)
    assert driver.step() == {"b": (4, 4)}


def test_requests_with_different_salts_share_no_prefix(drive):
    driver = drive()
    for name, salt in (("a", "x"), ("b", "y"), ("c", "x")):
        driver.add(name, range(9), max_tokens=1, cache_salt=salt)
        driver.run()
    assert driver.cached == {"a": 0, "b": 0, "c": 8}


def test_every_position_of_a_request_with_prompt_logprobs_is_computed(drive):
    driver = drive()
    driver.add("a", range(9), max_tokens=1)
    driver.run()
    driver.add("b", range(9), params=SamplingParams(prompt_logprobs=0), max_tokens=1)
    assert driver.step() == {"b": (0, 9)}


def test_prefix_caching_can_be_disabled(drive):
    driver = drive(enable_prefix_caching=False)
    for name in "ab":
        driver.add(name, range(9), max_tokens=1)
        assert driver.step() == {name: (0, 9)}


def test_the_prefix_cache_is_reset_only_when_idle(drive):
    driver = drive()
    driver.add("a", range(9), max_tokens=2)
    driver.step()
    assert not driver.scheduler.reset_prefix_cache()
    driver.run()
    assert driver.scheduler.reset_prefix_cache()
    driver.add("b", range(9), max_tokens=1)
    assert driver.step() == {"b": (0, 9)}


# --- aborts and two plans at a time -----------------------------------------------------------


def test_requests_can_be_aborted_in_every_state(drive):
    driver = drive(max_num_seqs=2, max_num_batched_tokens=8)
    for name in ("decoding", "chunked", "waiting"):
        driver.add(name, 12, max_tokens=8)
    driver.step()
    driver.step()
    driver.step()
    assert driver.waiting() == ["waiting"]
    abort = driver.scheduler.abort_requests
    for name in ("waiting", "chunked", "decoding"):
        assert abort([name]) == [name]
        driver.scheduler.check_integrity()
        assert abort([name, "unknown"]) == []
    driver.run()
    assert driver.scheduler.view.num_free_blocks == 100
    assert driver.reasons == {}  # aborted requests are not reported
    assert driver.plan() == {}
    driver.settle()
    assert not driver.worker.tokens  # an empty plan has informed the worker of the aborts


def test_an_abort_during_a_step_drops_its_result(drive, alone):
    driver = drive()
    driver.add("a", 5, max_tokens=9)
    kept = driver.add("b", 6, max_tokens=3)
    driver.plan()
    assert driver.scheduler.abort_requests(["a"]) == ["a"]
    outputs = driver.settle()
    assert outputs.request_ids == ["b"] and driver.tokens["a"] == []
    driver.add("a", 7, max_tokens=2)  # the id can be used again immediately
    driver.run()
    assert driver.tokens["b"] == alone(kept, 3) and len(driver.tokens["a"]) == 2


def test_a_step_is_planned_before_the_tokens_of_the_previous_step_are_known(drive, alone):
    driver = drive()
    prompt = driver.add("a", 5, max_tokens=3)
    assert driver.plan() == {"a": (0, 5)}
    assert driver.plan() == {"a": (5, 1)}
    driver.settle()
    assert driver.plan() == {"a": (6, 1)}
    driver.settle()
    assert driver.plan() == {}  # the last token is in flight
    driver.run(depth=2)
    assert driver.tokens["a"] == alone(prompt, 3)


def test_the_result_of_a_step_planned_beyond_a_stop_token_is_dropped(drive, alone):
    driver = drive(max_num_seqs=1)
    expected = alone(range(5), 2)
    driver.add("a", range(5), max_tokens=9, stop=[expected[1]])
    driver.add("b", 6, max_tokens=1)
    driver.plan()
    driver.plan()
    driver.settle()
    driver.plan()  # this plan computes the token after the stop token
    driver.settle()
    assert driver.reasons == {"a": "stop"}
    assert driver.plan() == {}  # a plan in flight uses the row
    driver.settle()
    assert driver.plan() == {"b": (0, 6)}
    driver.run(depth=2)
    assert driver.tokens["a"] == expected


def test_freed_rows_are_reported_to_the_worker(drive):
    driver = drive(max_num_seqs=1)
    driver.add("a", 3, max_tokens=1)
    driver.add("b", 3, max_tokens=1)
    driver.step()
    plan = driver.scheduler.schedule()
    assert list(plan.leaves) == [0]
    assert [new.row for new in plan.joins] == [0] and plan.joins[0].generation == 2


# --- statistics and shutdown ------------------------------------------------------------------


def test_statistics_contain_the_counts_of_each_step(drive):
    driver = drive(max_num_seqs=1, num_blocks=10)
    driver.add("a", range(9), max_tokens=2)
    driver.add("b", range(9), max_tokens=2)
    driver.step()
    stats = driver.stats
    assert (stats.step_id, stats.num_running, stats.num_waiting) == (0, 1, 1)
    assert stats.num_scheduled_tokens == 9 and stats.kv_cache_usage == pytest.approx(0.3)
    driver.run()
    stats = driver.stats
    assert (stats.prefix_queries, stats.prefix_hits) == (18, 8)
    assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0.0)
    assert (stats.num_preemptions, stats.num_recomputed_tokens) == (0, 0)


def test_shutdown_frees_all_rows_and_blocks_and_can_be_repeated(drive):
    driver = drive(max_num_seqs=1)
    for name in "ab":
        driver.add(name, 5)
    driver.step()
    driver.scheduler.shutdown()
    driver.scheduler.shutdown()
    driver.scheduler.check_integrity()
    assert driver.scheduler.depth().num_running == driver.scheduler.depth().num_waiting == 0
