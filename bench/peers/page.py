"""Writes the page docs/performance.md from results: machine, method, tables. Measures nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from textwrap import fill
from typing import Any

from peers.tables import markdown

HEAD = """# Performance on the CPU

Made by `python bench/cpu_vs.py --results … --write-docs docs/performance.md`; do not edit by hand.
Single figures belong to one machine at one time; ratios within a run are what may be compared.
"""

METHOD = """## Method

- Each engine runs in a process of its own with the same checkpoint (random weights in the shape of
  the named model; converted where the engine needs another file), the same prompts as token ids,
  greedy, past the end of the text, exact numbers of tokens. Prompts never repeat.
- Engines take turns, case by case and round by round. A cell is the median of the rounds, with the
  least and the greatest in brackets. `*`: in at least one round other processes or the hypervisor
  took more than 3 % of the machine during each attempt.
- "1 request" is the rate of the steps after the first token (32 tokens in, 128 out); "16 at once"
  is 128 in, 64 out; "64 mixed" is 16 to 256 in, 16 to 128 out; "prefill" is one prompt and one
  token.
- "Cold start" runs from the start of the process to its first token, with the files in the page
  cache. "Peak RSS" sums the peaks of the engine's processes; a mapped file counts as far as it was
  touched.
- "Same first token": for how many of 16 fixed prompts the engine's first token is that of Dovetail
  in bf16 (where bf16 was not run: in the same format). It tells whether all compute the same model;
  with random weights the best tokens are close, so that 4 bits agree seldom, whoever quantises.
- The limit of a case is the time of its bytes at the read bandwidth, or of its products at the rate
  of a 2,048³ GEMM, step by step whichever is longer, from probes around each repetition.
- The busy core: another process computes on one of the cores all the time.
- What is not alike: OpenVINO keeps its cache in 8 bits (its default) and computes its 16-bit
  weights in bf16; llama.cpp is driven through its C API with continuous batching of our own and one
  stream a request; vLLM's int8 is W8A8 with the head in bf16; transformers runs one padded batch.
  In int4, llama.cpp's file (Q4_0) keeps the head in six bits and OpenVINO's in eight; Dovetail has
  four bits throughout. What that costs in accuracy is in cpu.md.
"""


def performance_page(runs: Sequence[Mapping[str, Any]], note: str = "") -> str:
    """Return the page for the results of one or more runs of `cpu_vs.py`. note: text at the top.

    Results of one machine, commit and model are combined in one section.
    """
    parts = [HEAD, *([f"{_wrapped(note)}\n"] if note else []), METHOD]
    for _, group in groupby(runs, key=lambda run: run["machine"]):
        alike = list(group)
        parts += [_machine(alike), *map(markdown, _by_model(alike))]
    return "\n".join(parts)


def _by_model(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return one result for each model and number of threads.

    Rounds of later runs are numbered continuously. The peak memory of an engine is the maximum over
    runs.
    """
    made: dict[tuple[str, int], dict[str, Any]] = {}
    for result in (result for run in runs for result in run["results"]):
        whole = made.setdefault(
            (result["model"], result["threads"]),
            {**result, "rounds": 0, "step_bytes": {}, "engines": [], "failures": [], "turns": []},
        )
        whole["step_bytes"] |= result["step_bytes"]
        whole["failures"] += result["failures"]
        first = whole["rounds"]
        whole["turns"] += [turn | {"round": first + turn["round"]} for turn in result["turns"]]
        whole["rounds"] += result["rounds"]
        for engine in result["engines"]:
            name = (engine["engine"], engine["weights"])
            known = [e for e in whole["engines"] if (e["engine"], e["weights"]) == name]
            if known:
                known[0]["peak_rss_mib"] = max(known[0]["peak_rss_mib"], engine["peak_rss_mib"])
            else:
                whole["engines"].append(dict(engine))
    for whole in made.values():
        whole["rounds"] = _most_rounds(whole["turns"])
    return list(made.values())


def _most_rounds(turns: Sequence[Mapping[str, Any]]) -> int:
    """Return the number of rounds of the case with the most rounds."""
    rounds: dict[tuple[str, str], set[int]] = {}
    for turn in turns:
        rounds.setdefault((turn["weights"], turn["case"]), set()).add(turn["round"])
    return max(map(len, rounds.values()), default=0)


def _machine(runs: Sequence[Mapping[str, Any]]) -> str:
    lines = [f"- {name}: {value}" for name, value in runs[0]["machine"].items()]
    versions: dict[str, str] = {}
    absent: dict[str, str] = {}
    for run in runs:
        absent |= run["absent"]
        for result in run["results"]:
            for engine in result["engines"]:
                versions |= engine["versions"]
    lines += [f"- {package}: {version}" for package, version in sorted(versions.items())]
    lines += [f"- not run: {name} ({reason})" for name, reason in absent.items()]
    return "\n".join(["## Machine and versions", "", *map(_wrapped, lines), ""])


def _wrapped(text: str) -> str:
    """Return a paragraph or list item in lines of at most 116 columns."""
    indent = "  " if text.startswith("- ") else ""
    return fill(text, 116, subsequent_indent=indent, break_on_hyphens=False)
