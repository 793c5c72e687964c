"""Runs the engines alternately, case by case and round by round.

Weight formats are run one by one. Within a format all engines stay loaded and wait while one runs
(or, one at a time, are restarted for each round). The probes run before and after each repetition,
and the CPU time of other processes is read. If other processes used more than `MAX_LOST_SHARE` of
the machine, the repetition is marked as disturbed and measured again, as often as allowed. A
failure is recorded and not retried. The result is plain data, for `tables` and for JSON.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cases import Case

from peers.child import Child, ChildError
from peers.engine_pool import EnginePool
from peers.limits import MachineLimits, ModelShape
from peers.measures import ALL_CASES, MEASURES, START_UP, warm_up
from peers.process_tree import CpuTime, ticks_of
from peers.roster import Contender

MAX_LOST_SHARE = 0.03
MIN_LOST_S = 0.03
"""Shorter times are below three clock ticks and not reliable."""

PROBE_DEADLINE_S = 60.0
SETTLE_STEP_S = 0.1
MAX_SETTLE_S = 5.0
"""Maximum wait: some engines keep spinning for a second after their response."""

LOADING = "load"
"""Case name of a failure before the first case."""

Report = Callable[[str], None]


class ProbeError(Exception):
    """The probe has stopped responding, so the run is invalid."""


@dataclass(frozen=True, kw_only=True)
class RacePlan:
    """The settings of a run. attempts: maximum repetitions of a disturbed measurement."""

    checkpoint: Path
    formats: tuple[str, ...]
    cases: tuple[str, ...]
    threads: int
    rounds: int
    deadline_s: float
    load_deadline_s: float
    attempts: int
    one_at_a_time: bool = False


@dataclass(frozen=True, kw_only=True)
class Turn:
    """The measurement of one engine in one case, in round `number`."""

    contender: Contender
    weights: str
    case: str
    number: int


class Race:
    """Compares all engines on one checkpoint. Call `run` once, then `close`, then `result`."""

    def __init__(self, plan: RacePlan, contenders: Sequence[Contender], report: Report) -> None:
        """Start the probe. contenders: Dovetail first. Raises ChildError if it does not start."""
        self._plan, self._contenders, self._report = plan, contenders, report
        self._shape = ModelShape.of(plan.checkpoint)
        self._repeats = itertools.count()
        self._rows: list[dict[str, Any]] = []
        self._failures: dict[tuple[str, str, str], str] = {}
        self._pool = EnginePool(plan.checkpoint, plan.threads, plan.load_deadline_s)
        self._warm: set[tuple[Child, str]] = set()
        self._probe = Child(contenders[0].python, "peers.probe")
        self._probe.ask("start", PROBE_DEADLINE_S, threads=plan.threads)

    def run(self) -> None:
        """Run every measurement in its order."""
        for weights in self._plan.formats:
            for turn in self._order(weights):
                self._take(turn)
            self._pool.close_all()

    def result(self) -> dict[str, Any]:
        """Return measurements, engines and failures so far. After `close`, also the peak memory."""
        failures = [
            {"engine": name, "weights": weights, "case": case, "reason": reason}
            for (name, weights, case), reason in self._failures.items()
        ]
        return {
            "model": self._plan.checkpoint.name,
            "threads": self._plan.threads,
            "rounds": self._plan.rounds,
            "step_bytes": {w: self._shape.step_bytes(w) for w in self._plan.formats},
            "engines": list(self._pool.seen.values()),
            "failures": failures,
            "turns": self._rows,
        }

    def close(self) -> None:
        """Terminate every process."""
        self._pool.close_all()
        self._probe.close()

    def _order(self, weights: str) -> Iterator[Turn]:
        present = [
            contender
            for contender in self._contenders
            if contender.model_for(self._plan.checkpoint, weights)
        ]
        rounds, cases = range(self._plan.rounds), self._plan.cases
        if self._plan.one_at_a_time:
            for number, contender, case in itertools.product(rounds, present, cases):
                yield Turn(contender=contender, weights=weights, case=case, number=number)
            return
        for number, case in itertools.product(rounds, cases):
            # Each round begins with another engine, so that the order of engines varies.
            first = number % max(1, len(present))
            for contender in (*present[first:], *present[:first]):
                yield Turn(contender=contender, weights=weights, case=case, number=number)

    def _take(self, turn: Turn) -> None:
        engine = (turn.contender.name, turn.weights)
        over = {(*engine, turn.case), (*engine, LOADING)} & self._failures.keys()
        if over or turn.case in turn.contender.skip:
            return
        try:
            if turn.case == START_UP:
                self._start_up(turn)
            else:
                self._measure(turn)
        except ChildError as failure:
            loaded = engine in self._pool.seen or turn.case == START_UP
            self._failures[(*engine, turn.case if loaded else LOADING)] = str(failure)
            self._report(f"{' '.join(engine)} {turn.case}: {failure}")
            self._pool.close(turn.contender.name)

    def _measure(self, turn: Turn) -> None:
        if self._plan.one_at_a_time:
            self._pool.close_all(but=turn.contender.name)
        child = self._pool.get(turn.contender, turn.weights)

        def send(case: Case) -> float:
            return self._ask(child, case)

        case = ALL_CASES[turn.case]
        if (child, turn.case) not in self._warm:
            warm_up(send, case)
            self._warm.add((child, turn.case))
        for _ in range(self._plan.attempts):
            row = self._watched(turn, child, lambda: MEASURES[turn.case].run(send, case))
            self._record(turn, row)
            if not row["disturbed"]:
                return

    def _ask(self, child: Child, case: Case) -> float:
        response = child.ask(
            "generate",
            self._plan.deadline_s,
            prompts=case.prompts_of(next(self._repeats)),
            output_lens=list(case.output_lens),
        )
        seconds: float = response["seconds"]
        return seconds

    def _watched(
        self, turn: Turn, child: Child, run: Callable[[], dict[str, float]]
    ) -> dict[str, Any]:
        """Run a repetition between two probes and return its results, probes and CPU times."""
        probes = [self._probed()]
        settle(self._everybody())
        with Watch(self._everybody(but=child)) as watch:
            figures = run()
        probes.append(self._probed())
        middle = {name: statistics.mean(p[name] for p in probes) for name in probes[0]}
        bound, limits = MEASURES[turn.case].bound, MachineLimits.of(middle, turn.weights)
        limit = None
        if bound and limits:
            limit = bound(ALL_CASES[turn.case], self._shape, turn.weights, limits)
        return {**figures, **watch.seen(), "probes": probes, "limit": limit}

    def _everybody(self, but: Child | None = None) -> list[int]:
        return [*self._pool.pids(but), self._probe.pid]

    def _probed(self) -> dict[str, float]:
        settle(self._everybody())
        try:
            return self._probe.ask("measure", PROBE_DEADLINE_S)
        except ChildError as failure:  # not a failure of the engine
            raise ProbeError(str(failure)) from None

    def _start_up(self, turn: Turn) -> None:
        """Measure a new process from its start to its first token, then close it."""
        contender = turn.contender
        if self._plan.one_at_a_time:
            self._pool.close_all()
        settle(self._everybody())
        with Watch(self._everybody()) as watch:
            child = Child(contender.python, contender.adapter, contender.env)
            try:
                loaded = self._pool.load(child, contender, turn.weights)
                self._ask(child, replace(ALL_CASES["decode1"], output_lens=(1,)))
                seconds = time.monotonic() - watch.begin
            finally:
                child.close()
        self._record(turn, {"value": seconds, "load_s": loaded["seconds"], **watch.seen()})

    def _record(self, turn: Turn, row: dict[str, Any]) -> None:
        key = {
            "engine": turn.contender.name,
            "weights": turn.weights,
            "case": turn.case,
            "round": turn.number,
        }
        self._rows.append({**key, **row})
        mark = " (disturbed)" if row["disturbed"] else ""
        self._report(f"{key['engine']} {turn.weights} {turn.case}: {row['value']:.4g}{mark}")


def settle(pids: Sequence[int]) -> None:
    """Wait until these processes are idle."""
    end = time.monotonic() + MAX_SETTLE_S
    before = sum(map(ticks_of, pids))
    while time.monotonic() < end:
        time.sleep(SETTLE_STEP_S)
        now = sum(map(ticks_of, pids))
        if now - before <= 1:
            return
        before = now


class Watch:
    """A time span, and the CPU time of other processes and the hypervisor in it."""

    def __init__(self, idle: Sequence[int]) -> None:
        """idle: processes that should be idle. Their CPU time counts as lost."""
        self._idle = idle

    def __enter__(self) -> Watch:
        self._cpu = CpuTime.now(os.getpid(), self._idle)
        self.begin = time.monotonic()
        return self

    def __exit__(self, *exception: object) -> None:
        self._seconds = time.monotonic() - self.begin
        self._lost_s = CpuTime.now(os.getpid(), self._idle).lost_since(self._cpu)

    def seen(self) -> dict[str, Any]:
        """Return {"seconds", "lost_s", "disturbed"} of the time span, which must have ended."""
        maximum = max(MIN_LOST_S, MAX_LOST_SHARE * self._seconds * (os.cpu_count() or 1))
        return {
            "seconds": self._seconds,
            "lost_s": self._lost_s,
            "disturbed": self._lost_s > maximum,
        }
