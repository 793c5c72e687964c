"""Formats results as tables: medians with spread, ratios to the best engine, shares of the limit.

A result is the return value of `Race.result`. Disturbed repetitions are used only if all
repetitions of a round were disturbed; such results are marked with `*`. Ratios compare
Dovetail with the best other engine (by median) in the same round; the median over rounds is shown.
All functions are pure and return text.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from peers.accuracy import Accuracy
from peers.measures import MEASURES, START_UP
from peers.roster import OURS

Row = Mapping[str, Any]
MISSING = "–"
RATES = ("decode1", "conc16", "varied64", "prefill1024")


def markdown(result: Row, accuracy: Accuracy | None = None) -> str:
    """Return all tables of one result: one per format, with notes.

    accuracy: decides which engines are part of ratios; None to show only ratios to all engines.
    """
    counts = f"{result['threads']} threads, at most {result['rounds']} rounds per case"
    parts = [f"## {result['model']}, {counts}"]
    for weights in result["step_bytes"]:
        parts += _format_section(result, weights, accuracy)
    return "\n\n".join(parts) + "\n"


def medians(result: Row, weights: str, case: str) -> dict[str, float]:
    """Return the median result by engine in a case, best first (shortest for startup)."""
    results = {
        engine: statistics.median(by_round.values())
        for engine, by_round in _by_engine(result, weights, case, "value").items()
    }
    order = sorted(results, key=lambda name: results[name], reverse=case != START_UP)
    return {name: results[name] for name in order}


def ratio_to_best(
    result: Row, weights: str, case: str, accuracy: Accuracy | None = None
) -> tuple[str, float] | None:
    """Return the best other engine and the median ratio of Dovetail to it, or None without one.

    accuracy: if given, only engines that are accurate enough are considered.
    """
    peers = [
        name
        for name in medians(result, weights, case)
        if not name.startswith(OURS) and (accuracy is None or accuracy.counts(name, weights))
    ]
    figures = _by_engine(result, weights, case, "value")
    if not peers or OURS not in figures:
        return None
    ours, theirs = figures[OURS], figures[peers[0]]
    ratios = [ours[number] / theirs[number] for number in ours.keys() & theirs.keys()]
    return (peers[0], statistics.median(ratios)) if ratios else None


def share_of_limit(result: Row, weights: str, case: str, engine: str) -> float | None:
    """Return the median share of the limit that an engine reached, or None without a limit."""
    values = _by_engine(result, weights, case, "value").get(engine, {})
    limits = _by_engine(result, weights, case, "limit").get(engine, {})
    shares = [values[number] / limits[number] for number in values.keys() & limits.keys()]
    return statistics.median(shares) if shares else None


def _format_section(result: Row, weights: str, accuracy: Accuracy | None) -> list[str]:
    turns = [turn for turn in result["turns"] if turn["weights"] == weights]
    cases = [case for case in RATES if any(turn["case"] == case for turn in turns)]
    failures = [entry for entry in result["failures"] if entry["weights"] == weights]
    megabytes = result["step_bytes"][weights] / 1e6
    parts = [f"### {weights}: {megabytes:,.0f} MB of weights read per step"]
    if turns:
        parts += [_main_table(result, weights, cases, accuracy), _probe_line(turns)]
    if any(turn["case"] == "hog" for turn in turns):
        parts.append(_hog_table(result, weights))
    if failures:
        lines = (f"- {f['engine']}, {f['case']}: {f['reason']}" for f in failures)
        parts.append("Failed:\n\n" + "\n".join(lines))
    return parts if turns or failures else []


def _main_table(result: Row, weights: str, cases: Sequence[str], accuracy: Accuracy | None) -> str:
    engines = [engine for engine in result["engines"] if engine["weights"] == weights]
    titles = [MEASURES[case].title for case in cases]
    started = bool(medians(result, weights, START_UP))
    ends = ["cold start to first token, s"] * started + [
        "peak RSS, MiB",
        "same first token as Dovetail",
        *["KL to float32, nats"] * (accuracy is not None),
    ]
    rows = []
    loaded = {engine["engine"]: engine for engine in engines}
    only_started = [name for name in medians(result, weights, START_UP) if name not in loaded]
    for name in [*loaded, *only_started]:
        cells = [_cell(result, weights, case, name) for case in cases]
        cells += [_cell(result, weights, START_UP, name)] * started
        if name in loaded:
            engine = loaded[name]
            cells += [f"{engine['peak_rss_mib']:,.0f}", _agreement(result, engine)]
        else:
            cells += [""] * 2
        if accuracy is not None:
            cells.append(_divergence(accuracy, name, weights))
        rows.append([name, *cells])
    ours = any(engine["engine"] == OURS for engine in engines)
    summary = _summary(result, weights, cases, accuracy) if ours else []
    limits = [_span(_figures(result, weights, case, "limit")) for case in cases]
    summary.append(["limit of this machine", *limits])
    blank = [""] * len(ends)
    return _table(["", *titles, *ends], [*rows, *([*row, *blank] for row in summary)])


def _summary(
    result: Row, weights: str, cases: Sequence[str], accuracy: Accuracy | None
) -> list[list[str]]:
    """Return the rows of ratios, beginning with their titles."""
    rules = {f"**{OURS} ÷ fastest other engine**": None}
    if accuracy is not None:
        rules = {f"**{OURS} ÷ fastest engine that counts**": accuracy, **rules}
    rows = [
        [title, *(_ratio_cell(result, weights, case, rule) for case in cases)]
        for title, rule in rules.items()
    ]
    shares = [_share_cell(result, weights, case) for case in cases]
    return [*rows, [f"**{OURS} ÷ limit**", *shares]]


def _divergence(accuracy: Accuracy, engine: str, weights: str) -> str:
    kl = accuracy.kl.get((engine, weights))
    figure = MISSING if kl is None else f"{kl:.4f}"
    is_peer = not engine.startswith(OURS)
    return figure + " (does not count)" * (is_peer and not accuracy.counts(engine, weights))


def _agreement(result: Row, engine: Row) -> str:
    """Return for how many check prompts an engine's first token equals Dovetail's in bf16.

    If bf16 was not run, Dovetail in the engine's own format is the reference.
    """
    ours = {e["weights"]: e["first_tokens"] for e in result["engines"] if e["engine"] == OURS}
    requested = "bf16" if "bf16" in ours else engine["weights"]
    if requested not in ours or (engine["engine"], engine["weights"]) == (OURS, requested):
        return ""
    same = sum(a == b for a, b in zip(ours[requested], engine["first_tokens"], strict=True))
    return f"{same} of {len(ours[requested])}"


def _hog_table(result: Row, weights: str) -> str:
    rows = []
    others = _by_engine(result, weights, "hog", "value")
    alone = _by_engine(result, weights, "hog", "alone")
    for name, figures in others.items():
        kept = statistics.median(figures[n] / alone[name][n] for n in figures)
        spans = [_span(alone[name].values()), _cell(result, weights, "hog", name)]
        rows.append([name, *spans, f"{kept:.0%}"])
    titles = [
        "4 requests at once, 32 tokens in, 32 out, tok/s",
        "alone",
        "with a busy core",
        "ratio",
    ]
    return _table(titles, rows)


def _probe_line(turns: Iterable[Row]) -> str:
    probes = [probe for turn in turns for probe in turn.get("probes", ())]
    if not probes:
        return "The limits of the machine were not measured."
    names = {"read_gbps": "read GB/s", "bf16_gflops": "bf16 GFLOP/s", "int8_gflops": "int8 GOP/s"}
    spans = (
        f"{title} {_span(probe[name] for probe in probes)}"
        for name, title in names.items()
        if name in probes[0]
    )
    return f"Measured limits: {'; '.join(spans)}."


def _by_engine(result: Row, weights: str, case: str, key: str) -> dict[str, dict[int, float]]:
    """Return result `key` by engine and round, preferably of the last undisturbed repetition."""
    results: dict[str, dict[int, float]] = {}
    turns = [t for t in result["turns"] if (t["weights"], t["case"]) == (weights, case)]
    for turn in sorted(turns, key=lambda turn: not turn["disturbed"]):
        if turn.get(key) is not None:
            results.setdefault(turn["engine"], {})[turn["round"]] = turn[key]
    return {
        name: results[name] for name in dict.fromkeys(t["engine"] for t in turns) if name in results
    }


def _figures(result: Row, weights: str, case: str, key: str) -> list[float]:
    engines = _by_engine(result, weights, case, key).values()
    return [figure for by_round in engines for figure in by_round.values()]


def _cell(result: Row, weights: str, case: str, engine: str) -> str:
    figures = _by_engine(result, weights, case, "value").get(engine)
    if not figures:
        return MISSING
    turns = [
        turn
        for turn in result["turns"]
        if (turn["engine"], turn["weights"], turn["case"]) == (engine, weights, case)
    ]
    clean = {turn["round"] for turn in turns if not turn["disturbed"]}
    return _span(figures.values()) + "*" * (not figures.keys() <= clean)


def _ratio_cell(result: Row, weights: str, case: str, accuracy: Accuracy | None) -> str:
    actual = ratio_to_best(result, weights, case, accuracy)
    return MISSING if actual is None else f"**{actual[1]:.2f}×** ({actual[0]})"


def _share_cell(result: Row, weights: str, case: str) -> str:
    share = share_of_limit(result, weights, case, OURS)
    return MISSING if share is None else f"{share:.0%}"


def _span(figures: Iterable[float]) -> str:
    ordered = sorted(figures)
    if not ordered:
        return MISSING
    median = _number(statistics.median(ordered))
    if len(ordered) == 1:
        return median
    return f"{median} ({_number(ordered[0])}–{_number(ordered[-1])})"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
