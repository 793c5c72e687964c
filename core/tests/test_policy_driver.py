"""Single actions of a policy are granted, denied, or rejected as illegal."""

import pytest

from dovetail.errors import PolicyError
from dovetail.interfaces import (
    CONTINUE,
    Denied,
    Evict,
    Grant,
    Hold,
    Policy,
    PreemptAndAdmit,
    Run,
)
from dovetail.request import EngineCoreRequest, Request
from dovetail.sampling_params import SamplingParams


class Scripted(Policy):
    """A policy that plans each step with the next script, and uses the default plan without one.

    A script is a function that takes the view of the step and returns a generator of actions.
    """

    def __init__(self):
        self.scripts, self.answers = [], []

    def rank(self, request, view):
        return request.priority, request.sequence

    def victim(self, running, view):
        return max(running, key=lambda request: self.rank(request, view))

    def plan(self, view):
        if not self.scripts:
            yield from super().plan(view)
            return
        script, response = self.scripts.pop(0)(view), None
        while True:
            try:
                response = yield script.send(response)
            except StopIteration:
                return
            self.answers.append(response)


def by_name(requests):
    return {request.request_id: request for request in requests}


@pytest.fixture
def steer(drive):
    """Return a driver with a scripted policy.

    `driver.plan_by(script)` returns scheduled tokens and grants.
    """

    def make(*, running="", waiting="", prompt=4, max_tokens=9, **limits):
        driver = drive(policy=Scripted, **{"strict": True, **limits})
        policy = driver.scheduler.policy

        def plan_by(*scripts):
            policy.scripts, policy.answers = list(scripts), []
            runs = driver.plan()
            return runs, policy.answers

        driver.plan_by, driver.policy = plan_by, policy
        for name in running:
            driver.add(name, prompt, max_tokens=max_tokens, priority=ord(name))
        if running:
            driver.step()
        for name in waiting:
            driver.add(name, prompt, max_tokens=max_tokens, priority=ord(name))
        return driver

    return make


def action(*names_and_actions):
    """Return a script that yields actions. Each argument is (request name, action class)."""

    def script(view):
        known = by_name([*view.running, *view.waiting])
        for name, make in names_and_actions:
            yield make(known[name])

    return script


def script_of(*actions):
    def script(view):
        return (item for item in actions)

    return script


# --- grants --------------------------------------------------------------------------


def test_granted_actions_form_the_plan_in_order(steer):
    driver = steer(running="abc", waiting="de")
    runs, grants = driver.plan_by(action(("c", Run), ("e", Run), ("a", Run)))
    assert list(runs.items()) == [("c", (4, 1)), ("e", (0, 4)), ("a", (4, 1))]
    assert grants == [Grant(num_tokens=1), Grant(num_tokens=4), Grant(num_tokens=1)]


def test_the_continue_action_covers_all_requests_that_are_neither_granted_nor_held(steer):
    driver = steer(running="abcd")

    def script(view):
        known = by_name(view.running)
        yield Hold(known["b"])
        yield Run(known["d"])
        yield CONTINUE
        yield CONTINUE

    runs, grants = driver.plan_by(script)
    assert list(runs) == ["a", "c", "d"]  # running requests that decode are first in the plan
    assert [response.num_tokens for response in grants] == [0, 1, 2, 0] and all(grants)
    assert driver.running() == list("abcd")


def test_a_policy_is_notified_of_the_prefix_hit_of_an_admission(steer):
    driver = steer()
    driver.add("a", [7] * 9, max_tokens=1)
    driver.run()
    driver.add("b", [7] * 9, max_tokens=1)
    _, grants = driver.plan_by(action(("b", Run)))
    assert grants == [Grant(num_tokens=1, num_cached=8)]


def test_a_chunk_is_limited_by_the_action_the_token_budget_and_the_prefill_threshold(steer):
    driver = steer(waiting="ab", prompt=20, max_num_batched_tokens=16, max_num_seqs=8)
    runs, _ = driver.plan_by(action(("b", lambda item: Run(item, 5)), ("a", Run)))
    assert runs == {"b": (0, 5), "a": (0, 11)}
    driver.settle()
    runs, _ = driver.plan_by(
        action(("b", lambda item: Run(item, 3)), ("a", lambda item: Run(item, 99)))
    )
    assert runs == {"b": (5, 3), "a": (11, 9)}
    driver = steer(waiting="a", prompt=20, long_prefill_token_threshold=6)
    runs, _ = driver.plan_by(action(("a", Run)))
    assert runs == {"a": (0, 6)}


def test_a_run_action_with_whole_grants_the_complete_prompt_or_nothing(steer):
    driver = steer(waiting="ab", prompt=20, max_num_batched_tokens=16)
    runs, grants = driver.plan_by(
        action(
            ("a", lambda item: Run(item, whole=True)), ("b", lambda item: Run(item, 9, whole=True))
        )
    )
    assert runs == {"b": (0, 9)} and [a.denied for a in grants] == [Denied.BUDGET, None]


def test_a_reservation_allocates_at_most_the_blocks_that_can_be_needed(steer):
    driver = steer(waiting="ab", num_blocks=10)
    free = driver.scheduler.view
    driver.plan_by(action(("a", lambda item: Run(item, reserve=9))))
    assert free.num_free_blocks == 10 - 3
    driver.settle()
    driver.plan_by(action(("a", lambda item: Run(item, reserve=10**9))))
    assert free.num_free_blocks == 10 - 4  # 4 blocks hold 4 prompt tokens and 9 output tokens
    driver.run()


def test_evicting_a_granted_request_rolls_its_grant_back(steer):
    driver = steer(running="ab", waiting="cde", num_blocks=20, max_num_batched_tokens=8)
    free = driver.scheduler.view.num_free_blocks
    runs, grants = driver.plan_by(
        action(("c", Run), ("a", Run), ("c", Evict), ("a", Evict), ("b", Run), ("e", Run))
    )
    assert runs == {"b": (4, 1), "e": (0, 4)}
    assert all(grants)
    assert driver.waiting() == ["a", "c", "d"]
    assert driver.worker.names == {0: "a", 1: "b"}  # the plan is not executed yet
    driver.settle()
    # a's blocks are freed; b and e have a new block each
    assert driver.scheduler.view.num_free_blocks == free + 1 - 1 - 1
    assert driver.stats.num_preemptions == 2
    driver.run()
    # c had computed no token; a's cached block was a hit
    assert driver.stats.num_recomputed_tokens == 0
    assert driver.reasons.keys() == set("abcde")


# --- denials ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "script", "denied"),
    [
        ({"max_num_batched_tokens": 16}, ("c", "d", "e"), [None, None, Denied.BUDGET]),
        ({"max_num_seqs": 3}, ("c", "d"), [None, Denied.SEATS]),
        ({"num_blocks": 6}, ("c", "d"), [None, Denied.BLOCKS]),
    ],
)
def test_admissions_are_denied_when_a_resource_is_used_up(steer, limits, script, denied):
    driver = steer(running="ab", waiting="cde", prompt=8, **limits)
    _, grants = driver.plan_by(action(*((name, Run) for name in script)))
    assert [response.denied for response in grants] == denied


def test_an_evicted_request_is_not_admitted_in_the_same_step(steer):
    driver = steer(running="ab")
    _, grants = driver.plan_by(action(("a", Evict), ("a", Run), ("a", PreemptAndAdmit)))
    assert [response.denied for response in grants] == [None, Denied.NOT_READY, Denied.NOT_READY]


def test_a_request_with_its_last_token_in_flight_has_nothing_to_compute(steer):
    driver = steer(running="a", max_tokens=2)
    driver.plan()
    runs, grants = driver.plan_by(action(("a", Run)))
    assert runs == {} and grants[0].denied is Denied.NOTHING
    assert driver.scheduler.view.num_uncomputed_tokens(driver.scheduler.view.running[0]) == 0


def test_a_step_that_preempts_a_request_for_blocks_admits_no_request(steer):
    driver = steer(running="ab", num_blocks=2, waiting="0")
    runs, grants = driver.plan_by(
        action(("a", Run), ("b", Run), ("0", Run), ("0", PreemptAndAdmit))
    )
    assert runs == {"a": (4, 1)}  # b was the victim and waits
    assert [a.denied for a in grants] == [None, *[Denied.PRESSURE] * 3]


def test_an_explicit_eviction_does_not_block_admissions(steer):
    driver = steer(running="ab", waiting="c", max_num_seqs=2)
    runs, _ = driver.plan_by(action(("a", Evict), ("c", Run), ("b", Run)))
    assert runs.keys() == {"b", "c"}


# --- preemption -------------------------------------------------------------------------------


def test_as_few_victims_as_possible_are_preempted_in_the_order_of_the_policy(steer):
    driver = steer(running="abc", waiting="0", num_blocks=3, prompt=4)
    runs, grants = driver.plan_by(action(("0", PreemptAndAdmit)))
    assert runs == {"0": (0, 4)} and all(grants)
    assert driver.running() == ["a", "b", "0"] and driver.waiting() == ["c"]


def test_no_request_is_preempted_if_that_frees_too_few_blocks(steer):
    driver = steer(running="az", num_blocks=6, prompt=8)
    driver.add("m", 20, priority=ord("m"))
    runs, grants = driver.plan_by(action(("m", PreemptAndAdmit), ("a", Run), ("z", Run)))
    assert grants[0].denied is Denied.BLOCKS
    assert runs.keys() == {"a", "z"} and driver.running() == ["a", "z"]


def test_only_requests_with_worse_ranks_are_preempted(steer):
    driver = steer(running="ab", waiting="z", max_num_seqs=2)
    _, grants = driver.plan_by(action(("z", PreemptAndAdmit)))
    assert grants[0].denied is Denied.SEATS and driver.running() == ["a", "b"]


def test_shared_blocks_do_not_count_as_freed(steer):
    driver = steer(num_blocks=8, prompt=4)
    for name in "yz":  # two requests share four blocks and own one block each
        driver.add(name, [7] * 17, max_tokens=3, priority=ord(name))
        driver.step()
    driver.add("a", 16, priority=0)
    driver.add("m", [9] * 20, priority=ord("m"))
    assert driver.scheduler.view.num_free_blocks == 2
    _, grants = driver.plan_by(action(("a", PreemptAndAdmit)))
    assert grants[0] and driver.running() == ["a"]  # one victim would have freed only one block


# --- illegal actions --------------------------------------------------------------------------


def foreign(name="x"):
    requested = EngineCoreRequest(
        request_id=name,
        prompt_token_ids=(1,),
        sampling_params=SamplingParams(),
        max_tokens=1,
    )
    return Request(requested, max_model_len=8)


ILLEGAL = {
    "no tuple": script_of("run a"),
    "a short tuple": script_of((0, None)),
    "no kind": action(("a", lambda item: (9, item, 0, 0, False))),
    "no request": script_of(Run(None)),
    "unknown": script_of(Run(foreign())),
    "foreign": script_of(Run(foreign("a"))),
    "granted twice": action(("a", Run), ("a", Run)),
    "admitted twice": action(("c", Run), ("c", Run)),
    "held after its grant": action(("a", Run), ("a", Hold)),
    "run after a hold": action(("a", Hold), ("a", Run)),
    "evicted after a hold": action(("a", Hold), ("a", Evict)),
    "held twice": action(("a", Hold), ("a", Hold)),
    "evicted waiting": action(("c", Evict)),
    "evicted twice": action(("a", Evict), ("a", Evict)),
    "held waiting": action(("c", Hold)),
    "preempting for a running request": action(("a", PreemptAndAdmit)),
    "negative tokens": action(("a", lambda item: Run(item, -1))),
    "a negative reserve": action(("c", lambda item: Run(item, reserve=-1))),
    "a negative preemption": action(("c", lambda item: PreemptAndAdmit(item, -1))),
    "half a token": action(("a", lambda item: Run(item, 0.5))),
}


@pytest.mark.parametrize("script", ILLEGAL.values(), ids=ILLEGAL)
def test_an_illegal_action_raises_in_strict_mode(steer, script):
    driver = steer(running="ab", waiting="c")
    with pytest.raises(
        PolicyError,
        match=r"policy Scripted violated its contract at step 1: the action .* is illegal",
    ):
        driver.plan_by(script)


@pytest.mark.parametrize("script", ILLEGAL.values(), ids=ILLEGAL)
def test_an_illegal_action_is_denied_and_counted_without_strict_mode(steer, script):
    driver = steer(running="ab", waiting="c", strict=False)
    _, grants = driver.plan_by(script)
    assert grants[-1].denied is Denied.ILLEGAL and all(grants[:-1])
    driver.settle()
    assert driver.stats.num_illegal_actions == 1 and driver.stats.policy_failures == 0
    driver.run()
    assert driver.reasons.keys() == set("abc")


# --- idle steps -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "script", "idle"),
    [
        ({"running": "a"}, script_of(), 1),
        ({"waiting": "a"}, script_of(), 1),
        ({"running": "a"}, action(("a", Hold)), 1),
        ({}, script_of(), 0),
        ({"running": "a"}, script_of(CONTINUE), 0),
    ],
)
def test_a_step_that_schedules_no_request_is_counted_as_idle(steer, setting, script, idle, caplog):
    driver = steer(**setting)
    driver.plan_by(script)
    driver.settle()
    assert driver.stats.num_idle_steps == idle
    assert len(caplog.records) == idle
    driver.plan_by(script)
    assert len(caplog.records) == idle


def test_a_step_in_which_no_request_could_run_is_not_idle(steer):
    driver = steer(running="a", waiting="b", max_tokens=2, max_num_seqs=1)
    driver.plan_by(script_of(CONTINUE))
    driver.plan_by(script_of())  # a's last token is in flight, and b has no batch slot
    driver.settle()
    assert driver.stats.num_idle_steps == 0


def test_idle_steps_of_a_non_work_conserving_policy_are_allowed(steer, caplog):
    driver = steer(running="a")
    driver.policy.work_conserving = False
    driver.plan_by(script_of())
    driver.settle()
    assert driver.stats.num_idle_steps == 0 and not caplog.records


# --- the view ---------------------------------------------------------------------------------


def test_the_view_of_a_policy_is_updated_after_each_action(steer):
    driver = steer(running="ab", waiting="dc", max_num_batched_tokens=10, max_num_seqs=4)
    seen = []

    def look(view):
        running, waiting = list(by_name(view.running)), list(by_name(view.waiting))
        seen.append((running, waiting, view.tokens_left, view.seats_left))

    def script(view):
        look(view)
        yield Run(view.waiting[0])
        look(view)
        yield Evict(view.running[0])
        look(view)
        assert view.waiting[-1] is view.waiting[:1][0] and len(view.waiting) == 1
        with pytest.raises(IndexError):
            view.waiting[1]
        assert (view.step_id, view.block_size, view.num_waiting) == (1, 4, 2)
        assert view.num_uncomputed_tokens(view.waiting[0]) == 4

    driver.plan_by(script)
    assert seen == [
        (["a", "b"], ["c", "d"], 10, 2),
        (["a", "b", "c"], ["d"], 6, 1),
        (["b", "c"], ["d"], 6, 2),
    ]


def test_the_random_numbers_of_a_policy_are_seeded_by_the_engine(drive):
    draws = [drive(seed=seed).scheduler.view.rng.random() for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]
