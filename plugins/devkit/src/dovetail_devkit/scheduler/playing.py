"""Makes the scheduler calls of a random program and checks each step with a `Referee`."""

from __future__ import annotations

from random import Random

from dovetail.interfaces.scheduler import PauseScope
from dovetail.plan import SchedulerOutput
from dovetail_devkit.scheduler.program import Referee
from dovetail_devkit.scheduler.random_programs import Program, random_request


def _pause_or_open(rng: Random, referee: Referee) -> None:
    """Pause, resume or open a gate, at random."""
    if rng.random() < 0.04:
        referee.pause(rng.choice(list(PauseScope)))
    elif rng.random() < 0.3:
        referee.resume()
    held = referee.holds.gate.held
    if held and rng.random() < 0.3:
        referee.open_gate(rng.choice(held), fails=rng.random() < 0.2)


def play(program: Program, referee: Referee) -> list[SchedulerOutput]:
    """Run `program` and return its plans; raise AssertionError for the first violated rule."""
    rng = Random(program.seed)
    for turn in range(program.num_turns):
        if rng.random() < 0.4:
            referee.add(random_request(rng, f"r{turn}", referee.limits))
        if rng.random() < 0.08:
            known = [f"r{number}" for number in range(turn + 2)]
            referee.abort([*rng.choices(known, k=2), "nobody"])
        if rng.random() < 0.04:
            referee.reset()
        if program.holds:
            _pause_or_open(rng, referee)
        full = referee.num_out == program.depth
        if not full and rng.random() < 0.9:
            referee.schedule()
        elif referee.num_out:
            referee.settle()
    referee.drain()
    referee.reset()
    referee.add(random_request(rng, "r0", referee.limits))
    referee.drain()
    referee.scheduler.shutdown()
    referee.scheduler.shutdown()
    return referee.plans
