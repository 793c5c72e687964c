"""The statistics of each step: requests, blocks, costs and sums."""

import pytest

from dovetail.clock import ManualClock
from dovetail.interfaces import Policy


def test_statistics_count_requests_and_blocks(drive):
    driver = drive(num_blocks=10, max_num_seqs=2)
    for name in "abc":
        driver.add(name, 9, max_tokens=3)
    driver.step()
    stats = driver.stats
    assert (stats.num_running, stats.num_waiting, stats.num_scheduled_tokens) == (2, 1, 18)
    assert (stats.num_blocks, stats.num_used_blocks, stats.num_cached_blocks) == (10, 6, 4)
    assert stats.kv_cache_usage == 0.6
    assert (stats.policy, stats.policy_failures, stats.num_illegal_actions) == ("Policy", 0, 0)
    driver.run()
    assert (driver.stats.num_used_blocks, driver.stats.num_running) == (0, 0)
    assert driver.stats.num_cached_blocks == 6


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
def test_recomputed_tokens_are_counted(drive, caching, depth):
    driver = drive(num_blocks=10, enable_prefix_caching=caching)
    ran = 0
    for name in "abcde":
        driver.add(name, 6, max_tokens=25)
    while driver.out or driver.scheduler.depth().num_active:
        if driver.scheduler.depth().num_active:
            ran += sum(count for _, count in driver.plan().values())
        if len(driver.out) == depth or not driver.scheduler.depth().num_active:
            driver.settle()
    needed = 5 * (6 + 25 - 1)
    assert driver.stats.num_preemptions > 0
    assert driver.stats.num_recomputed_tokens == ran - needed > 0


def test_cumulative_statistics_are_summed_over_steps(drive):
    driver = drive(num_blocks=6)
    for name in ("a", "b"):  # both requests have the same prompt
        driver.add(name, [7] * 9, max_tokens=2)
        driver.run()
    assert (driver.stats.prefix_queries, driver.stats.prefix_hits) == (18, 8)
    assert driver.stats.prefix_hit_rate == 8 / 18
    for name in "cd":  # both requests grow until one is preempted
        driver.add(name, 8, max_tokens=9)
    driver.run()
    assert driver.stats.num_preemptions == 1
    assert driver.stats.num_recomputed_tokens == 4  # 8 of 12 tokens were still cached
    assert driver.stats.num_evictions > 0
    driver.add("e", 4)
    driver.add("f", 4)
    driver.plan()
    driver.scheduler.abort_requests(["e", "nobody", "f"])
    driver.settle()
    assert driver.stats.num_aborted == 2


def test_the_hit_rate_is_undefined_without_lookups(drive):
    driver = drive(enable_prefix_caching=False)
    driver.add("a", 4)
    driver.step()
    assert driver.stats.prefix_hit_rate == 0.0


def test_scheduler_time_is_measured_with_the_injected_clock(drive):
    class Slow(Policy):
        def on_granted(self, request, num_tokens, view):
            clock.advance(7)

        def on_output(self, request, num_tokens, view):
            clock.advance(11)

    driver = drive(policy=Slow)
    clock = driver.clock
    assert isinstance(clock, ManualClock)
    for name in "ab":
        driver.add(name, 4, max_tokens=3)
    driver.plan()
    clock.advance(1000)  # the model needs this time for a step
    driver.plan()
    driver.settle()
    assert (driver.stats.schedule_ns, driver.stats.update_ns) == (14, 22)
    driver.settle()
    assert (driver.stats.schedule_ns, driver.stats.update_ns) == (14, 22)
