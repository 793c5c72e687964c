"""Draws the state of a server as lines of text, for a terminal of any width.

Strings from the server are drawn without control characters, and cut to the width.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rich.text import Text

from dovetail_client_tools.engine_steps.reader import ServerNames, one_line
from dovetail_client_tools.engine_steps.records import Stats, Step
from dovetail_client_tools.top.engine_view import (
    DECODE,
    ENDED,
    PREEMPTED,
    PREFILL,
    EngineView,
    RequestRow,
    marks,
)

STYLES = {PREFILL: "blue", DECODE: "green", PREEMPTED: "bold red", ENDED: "dim", "": "dim"}
SIGNS = {PREFILL: "█", DECODE: "▪", PREEMPTED: "!", ENDED: "■", "": "·"}
LEGEND = (
    (PREFILL, "prompt tokens"),
    (DECODE, "one token"),
    (PREEMPTED, "preempted"),
    (ENDED, "ended"),
)
MAX_MARKS = 100
MIN_MARKS = 8
NUM_LAST_STEPS = 100
"""Number of steps whose durations are summarized."""
MAX_WIDTH, MAX_HEIGHT = 400, 300
_MS = 1e6


class _Column(NamedTuple):
    heading: str
    width: int


@dataclass(frozen=True, kw_only=True)
class Picture:
    """The state that is drawn. problem: why the server cannot be read at the moment, or ""."""

    names: ServerNames
    view: EngineView
    problem: str = ""
    time: str = ""


def draw(picture: Picture, width: int, height: int) -> Text:
    """Return the lines of a picture: at most `height`, each of at most `width` cells."""
    width, height = max(1, min(width, MAX_WIDTH)), max(1, min(height, MAX_HEIGHT))
    lines = list(_head(picture, width))
    if picture.view.stats is not None or picture.view.steps:
        lines += _requests(picture.view, width, height - len(lines))
    for line in lines:
        line.truncate(width, overflow="ellipsis")
        line.no_wrap = True
    return Text("\n").join(lines[:height])


def _head(picture: Picture, width: int) -> Iterator[Text]:
    view, stats = picture.view, picture.view.stats
    title = Text("dovetail top", style="bold")
    policy = f"policy {one_line(stats.policy)}" if stats is not None and stats.policy else ""
    for part in (picture.names.url, picture.names.model, policy, picture.time):
        title.append(f"  {part}" if part else "", style="not bold")
    yield title
    if picture.problem:
        for sentence in picture.problem.splitlines()[:2]:
            yield Text(one_line(sentence, 400), style="yellow")
    elif stats is None and not view.steps:
        yield Text("The engine has executed no step yet.", style="dim")
    if stats is None:
        return
    yield from _wrapped(_figures(view, stats), width)
    yield _cache(stats, width)
    if stats.policy_failures:
        text = f"The policy failed {stats.policy_failures:,} times; FCFS replaces it."
        yield Text(text, style="bold red")
    if view.steps:
        yield from _wrapped(_last_step(view.steps[-1]), width)
        yield from _wrapped(_durations(list(view.steps)[-NUM_LAST_STEPS:]), width)


def _figures(view: EngineView, stats: Stats) -> list[tuple[str, str]]:
    rates = view.rates()
    shown = ("–", "–", "–") if rates is None else (f"{rate:,.1f}" for rate in rates)
    new, computed, steps = shown
    return [
        ("running", f"{stats.num_running:,}"),
        ("waiting", f"{stats.num_waiting:,}"),
        ("new tokens/s", new),
        ("computed tokens/s", computed),
        ("steps/s", steps),
        ("prefix hits", percent(stats.prefix_hits, stats.prefix_queries)),
        ("preemptions", f"{stats.num_preemptions:,}"),
    ]


def _cache(stats: Stats, width: int) -> Text:
    used, total = min(stats.num_used_blocks, stats.num_blocks), stats.num_blocks
    length = max(0, min(30, width - 44))
    filled = round(length * used / total) if total else 0
    line = Text("KV cache ", style="dim")
    line.append(percent(used, total), style="bold")
    if length:
        line.append(" ")
        line.append("█" * filled, style="red" if used > 0.9 * total else "cyan")
        line.append("░" * (length - filled), style="dim")
    line.append(f" {used:,} of {total:,} blocks", style="dim")
    return line


def _last_step(step: Step) -> list[tuple[str, str]]:
    shown = [("last step", f"{step.step_id:,}"), ("time", f"{step.duration_ns / _MS:.2f} ms")]
    shown.append(("prompt tokens", f"{step.num_prefill_tokens:,} of {len(step.prefills)} requests"))
    shown.append(("decodes", f"{len(step.decodes or ()) + len(step.verified):,}"))
    counts = {"joined": step.joined, "preempted": step.preempted, "ended": step.ended}
    return shown + [(name, f"{len(items):,}") for name, items in counts.items() if items]


def _durations(steps: Sequence[Step]) -> list[tuple[str, str]]:
    durations = [step.duration_ns / _MS for step in steps]
    tokens = statistics.fmean(step.num_tokens for step in steps)
    return [
        (f"last {len(steps)} steps", f"median {statistics.median(durations):.2f} ms"),
        ("max", f"{max(durations):.2f} ms"),
        ("tokens per step", f"{tokens:,.1f}"),
    ]


def _wrapped(pairs: Sequence[tuple[str, str]], width: int) -> Iterator[Text]:
    """Yield lines of names and values. A pair is never split over two lines."""
    line = Text()
    for name, value in pairs:
        size = len(name) + len(value) + 1
        if line and line.cell_len + 3 + size > width:
            yield line
            line = Text()
        line.append(f"{'   ' if line else ''}{name} ", style="dim")
        line.append(value, style="bold")
    yield line


def _requests(view: EngineView, width: int, height: int) -> Iterator[Text]:
    """Yield the table of requests: unfinished ones, then the latest ended ones."""
    rows = view.running()
    rows.sort(key=lambda row: row.number)
    num_rows = max(0, height - 2)
    if len(rows) < num_rows:
        ended = [row for row in view.requests.values() if row.state == ENDED]
        rows += ended[::-1][: num_rows - len(rows)]
    columns = [column for column in _COLUMNS if column.width]
    while len(columns) > 2 and _width(columns) > width:
        columns.pop()
    num_marks = min(MAX_MARKS, width - _width(columns) - 2)
    steps = list(view.steps)[-num_marks:] if num_marks >= MIN_MARKS else []
    yield _legend(width) if steps else Text()
    line = Text("".join(f"{column.heading:>{column.width}}" for column in columns), style="bold")
    line.append(f"  last {len(steps)} steps" if steps else "")
    yield line
    shown = rows[:num_rows]
    done = marks(steps, [row.number for row in shown])
    for row in shown:
        cells = _cells(row)
        line = Text(style=STYLES[ENDED] if row.state == ENDED else "")
        for column in columns:
            line.append(f"{cells[column.heading]:>{column.width}}")
        line.append("  " if steps else "")
        for state, length in _runs(done[row.number]):
            line.append(SIGNS[state] * length, style=STYLES[state])
        yield line


_COLUMNS = (
    _Column("request", 8),
    _Column("state", 11),
    _Column("output", 8),
    _Column("prompt", 8),
    _Column("tokens/s", 10),
    _Column("cached", 8),
)
"""The columns of the table. In a narrow terminal, the rightmost ones are omitted first."""


def _width(columns: Sequence[_Column]) -> int:
    return sum(column.width for column in columns)


def _cells(row: RequestRow) -> dict[str, str]:
    state = one_line(row.reason, 10) or ENDED if row.state == ENDED else row.state
    prompt = "" if row.num_prompt is None else f"{row.num_prompt:,}"
    if row.state == PREFILL and row.num_prompt:
        state = f"{PREFILL} {min(99, 100 * row.num_computed // max(1, row.num_known))}%"
    return {
        "request": str(row.number),
        "state": state,
        "output": f"{'' if row.num_known else '≥'}{row.num_output:,}",
        "prompt": prompt,
        "cached": "" if row.num_cached is None else f"{row.num_cached:,}",
        "tokens/s": f"{row.output_rate:,.1f}" if row.output_rate else "",
    }


def _legend(width: int) -> Text:
    line = Text()
    for state, words in LEGEND:
        line.append(SIGNS[state], style=STYLES[state])
        line.append(f" {words}  ", style="dim")
    line.truncate(width)
    return line


def _runs(states: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Yield each run of equal states with its length, so that a line has few parts."""
    begin = 0
    for index in range(1, len(states) + 1):
        if index == len(states) or states[index] != states[begin]:
            yield states[begin], index - begin
            begin = index


def percent(part: int, total: int) -> str:
    """Return a share as text."""
    return f"{100 * min(part, total) / total:.1f} %" if total else "–"
