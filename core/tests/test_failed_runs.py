"""Requests that fail in the worker end with an error. Other requests continue."""

from dataclasses import replace

import pytest

MESSAGE = "the extension failed"


def settle_with_error(driver, *names):
    """Process the result of the oldest plan, in which these requests failed."""
    row_of = {name: row for row, name in driver.worker.names.items()}
    row_of |= {join.request_id: join.row for join in driver.out[0].joins}
    rows = [*driver.out[0].rows]
    errors = {rows.index(row_of[name]): MESSAGE for name in names}
    execute = driver.worker.execute
    driver.worker.execute = lambda plan: replace(execute(plan), errors=errors)
    outputs = driver.settle()
    driver.worker.execute = execute
    return outputs


@pytest.mark.parametrize("num_steps", [0, 3])
def test_a_request_that_fails_in_a_step_ends_and_no_other_request_ends(drive, alone, num_steps):
    driver = drive()
    prompts = {name: driver.add(name, 5, max_tokens=8) for name in "abc"}
    for _ in range(num_steps):
        driver.step()
    driver.plan()
    outputs = settle_with_error(driver, "b")
    (ended,) = outputs.finished
    assert (ended.request_id, str(ended.reason), ended.message) == ("b", "error", MESSAGE)
    assert outputs.request_ids == ["a", "c"]
    driver.run()
    for name in "ac":
        assert driver.tokens[name] == alone(prompts[name], 8)
    assert driver.scheduler.reset_prefix_cache()


def test_a_failed_chunk_of_a_prompt_ends_its_request(drive):
    driver = drive(max_num_batched_tokens=8)
    driver.add("a", 20)
    driver.plan()
    (ended,) = settle_with_error(driver, "a").finished
    assert str(ended.reason) == "error" and not driver.plan()


def test_at_depth_2_the_next_result_of_a_failed_request_is_dropped(drive, alone):
    driver = drive()
    prompts = {name: driver.add(name, 5, max_tokens=8) for name in "ab"}
    driver.step()
    driver.plan()
    driver.plan()
    settle_with_error(driver, "a")
    outputs = settle_with_error(driver, "a")  # the worker reports the failure again
    assert outputs.request_ids == ["b"] and not outputs.finished
    driver.run(depth=2)
    assert driver.tokens["b"] == alone(prompts["b"], 8)


def test_an_aborted_request_that_fails_in_a_step_is_not_ended_twice(drive):
    driver = drive()
    driver.add("a", 5)
    driver.plan()
    driver.scheduler.abort_requests(["a"])
    assert not settle_with_error(driver, "a").finished
