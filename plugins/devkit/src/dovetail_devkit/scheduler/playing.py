"""Runs the scheduler calls of a random program. `SchedulerDriver` checks each step."""

from __future__ import annotations

from random import Random

from dovetail.interfaces.scheduler import PauseScope
from dovetail.plan import SchedulerOutput
from dovetail_devkit.scheduler.program import SchedulerDriver
from dovetail_devkit.scheduler.random_programs import Program, random_request


def _pause_or_open(rng: Random, driver: SchedulerDriver) -> None:
    """Pause, resume or open a gate, at random."""
    if rng.random() < 0.04:
        driver.pause(rng.choice(list(PauseScope)))
    elif rng.random() < 0.3:
        driver.resume()
    held = driver.holds.gate.held
    if held and rng.random() < 0.3:
        driver.open_gate(rng.choice(held), fails=rng.random() < 0.2)


def play(program: Program, driver: SchedulerDriver) -> list[SchedulerOutput]:
    """Run `program` and return its plans. Raise AssertionError for the first violated rule."""
    rng = Random(program.seed)
    for turn in range(program.num_turns):
        if rng.random() < 0.4:
            driver.add(random_request(rng, f"r{turn}", driver.limits))
        if rng.random() < 0.08:
            known = [f"r{number}" for number in range(turn + 2)]
            driver.abort([*rng.choices(known, k=2), "nobody"])
        if rng.random() < 0.04:
            driver.reset()
        if program.holds:
            _pause_or_open(rng, driver)
        full = driver.num_out == program.depth
        if not full and rng.random() < 0.9:
            driver.schedule()
        elif driver.num_out:
            driver.settle()
    driver.drain()
    driver.reset()
    driver.add(random_request(rng, "r0", driver.limits))
    driver.drain()
    driver.scheduler.shutdown()
    driver.scheduler.shutdown()
    return driver.plans
