"""Runs jobs in worker processes, one per core, each with a time limit.

A run that exceeds the limit is ended together with its process, and another process continues with
the next job. No job can stop the others.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from dovetail.clock import Clock
from dovetail_lab.experiments.job import Job
from dovetail_lab.experiments.run_files import RunFolder, RunRecord

COMMAND = (sys.executable, "-m", "dovetail_lab.experiments.worker")
_NS = 1_000_000_000
_STOP_S = 5.0
_LOG_TAIL = 2000

OnDone = Callable[[RunRecord], None]
"""Called with each finished run."""


class WorkerPool:
    """Runs jobs on several processes."""

    def __init__(
        self,
        num_workers: int,
        time_limit_s: float,
        clock: Clock,
        log: Path,
        *,
        command: Sequence[str] = COMMAND,
    ) -> None:
        """num_workers: processes. log: receives what they write to standard error."""
        self._num_workers = num_workers
        self._limit_ns = round(time_limit_s * _NS)
        self._clock = clock
        self._log = log
        self._command = command

    def run(self, jobs: Iterable[Job], on_done: OnDone) -> None:
        """Run all jobs. If this is interrupted, no process remains."""
        waiting = deque(jobs)
        workers: list[_Worker] = []
        with selectors.DefaultSelector() as selector, self._log.open("ab") as log:
            try:
                while waiting or workers:
                    while waiting and len(workers) < self._num_workers:
                        worker = _Worker(self._command, log, selector)
                        workers.append(worker)
                        worker.start(waiting.popleft(), self._clock.now_ns())
                    self._step(selector, workers, waiting, on_done)
            finally:
                for worker in workers:
                    worker.stop(selector, kill=True)

    def _step(
        self,
        selector: selectors.BaseSelector,
        workers: list[_Worker],
        waiting: deque[Job],
        on_done: OnDone,
    ) -> None:
        """Wait for a reply, the end of a process or a time limit, and handle it."""
        deadline = min(worker.started_ns for worker in workers) + self._limit_ns
        left_s = max(0.0, (deadline - self._clock.now_ns()) / _NS)
        for key, _ in selector.select(left_s + 0.01):
            worker: _Worker = key.data
            job, alive = worker.job, worker.receive()
            record = RunFolder(Path(job.folder)).read(job.run_id) if alive else None
            if record is None:
                record = self._lost(job, worker.exit_text())
            on_done(record)
            if alive and waiting:
                worker.start(waiting.popleft(), self._clock.now_ns())
            else:
                worker.stop(selector)
                workers.remove(worker)
        now_ns = self._clock.now_ns()
        for worker in [one for one in workers if now_ns - one.started_ns >= self._limit_ns]:
            worker.stop(selector, kill=True)
            workers.remove(worker)
            limit_s = self._limit_ns / _NS
            text = f"the run exceeded the time limit of {limit_s:g} s (time_limit_s)"
            on_done(self._lost(worker.job, text))

    def _lost(self, job: Job, error: str) -> RunRecord:
        record = RunRecord(run_id=job.run_id, key=job.key, status="failed", error=error)
        RunFolder(Path(job.folder)).write(record)
        return record


class _Worker:
    """A process and the job that it runs."""

    job: Job
    started_ns = 0

    def __init__(
        self, command: Sequence[str], log: IO[bytes], selector: selectors.BaseSelector
    ) -> None:
        environment = {**os.environ, "PYTHONHASHSEED": "0"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment
        )
        assert self._process.stdout is not None and self._process.stdin is not None
        self._replies, self._orders = self._process.stdout, self._process.stdin
        selector.register(self._replies, selectors.EVENT_READ, self)

    def start(self, job: Job, now_ns: int) -> None:
        """Send a job. A process that has exited is noticed by `receive`."""
        self.job, self.started_ns = job, now_ns
        try:
            self._orders.write(json.dumps(job.plain()).encode() + b"\n")
            self._orders.flush()
        except BrokenPipeError:
            return

    def receive(self) -> bool:
        """Read a reply; return False if the process has exited instead."""
        return bool(self._replies.readline())

    def exit_text(self) -> str:
        """Return how the process ended."""
        try:
            code = self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            return "the process closed its output"
        return f"the process of the run exited with code {code}"

    def stop(self, selector: selectors.BaseSelector, *, kill: bool = False) -> None:
        """End the process and close its pipes."""
        selector.unregister(self._replies)
        if kill:
            self._process.kill()
        with suppress(BrokenPipeError):
            self._orders.close()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._replies.close()
