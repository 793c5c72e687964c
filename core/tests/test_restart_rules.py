"""When an engine is started again, and which requests are not run again."""

import pytest

from dovetail.clock import ManualClock
from dovetail.engine.supervision.restarts import Restarts
from dovetail.engine.supervision.rules import SupervisionRules
from dovetail.engine.supervision.suspects import Suspects
from dovetail.errors import RequestError, UserError


def test_restarts_come_later_each_time_and_then_no_more():
    rules = SupervisionRules(max_restarts=5, first_delay_s=0.5, max_delay_s=3)
    restarts = Restarts(rules, ManualClock())
    assert [restarts.next_delay_s() for _ in range(6)] == [0.5, 1, 2, 3, 3, None]
    assert restarts.num_deaths == 6


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_restarts": -1},
        {"max_restarts": 1.5},
        {"max_deaths": 0},
        {"max_silence_s": 0},
        {"window_s": float("inf")},
        {"first_delay_s": "x"},
        {"kill_step_s": True},
        {"max_silence_s": 31, "kill_silence_s": 30},
        {"first_delay_s": 11},
    ],
)
def test_rules_that_cannot_be_kept_are_refused_by_name(wrong):
    with pytest.raises(UserError, match=next(iter(wrong))):
        SupervisionRules(**wrong)


def test_deaths_of_long_ago_are_forgiven():
    clock = ManualClock()
    restarts = Restarts(SupervisionRules(max_restarts=1, window_s=60, first_delay_s=1), clock)
    assert restarts.next_delay_s() == 1
    for _ in range(3):
        clock.advance(61_000_000_000)
        assert restarts.next_delay_s() == 1
    clock.advance(59_000_000_000)
    assert restarts.next_delay_s() is None


def test_a_request_is_refused_after_so_many_deaths():
    suspects = Suspects(max_deaths=2)
    suspects.accuse(["a", "b"])
    suspects.check("a")
    suspects.accuse(["a"])
    with pytest.raises(RequestError, match=r"'a' was under way when the engine died, 2 times"):
        suspects.check("a")
    suspects.check("b")
    suspects.check("unheard of")


def test_suspects_are_bounded_and_the_latest_are_kept():
    suspects = Suspects(max_deaths=1)
    suspects.accuse(str(number) for number in range(10_000))
    suspects.check("0")
    with pytest.raises(RequestError):
        suspects.check("9999")
