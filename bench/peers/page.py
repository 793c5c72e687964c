"""Writes the page docs/performance.md from results: machine, method, tables.

This module does not measure anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from textwrap import fill
from typing import Any

from peers.accuracy import MAX_TIMES_OURS, Accuracy
from peers.tables import markdown

HEAD = """# Performance on the CPU

This page compares Dovetail with other engines on a CPU. Do not edit this page: the command
`python bench/cpu_vs.py --results … --write-docs docs/performance.md` writes it, except for the
sections from "Through HTTP" on. Absolute measurements are valid only for one machine at one time,
so compare only the ratios within a run.
"""

HTTP_HEADING = "## Through HTTP"
"""The first of the sections that are written manually, at the end of the page."""

METHOD = """## Method

- Each engine runs in a separate process, with the same checkpoint and the same prompts as token
  ids. The checkpoint has random weights in the shape of the named model; it is converted if an
  engine needs another file format. Sampling is greedy, ignores the end-of-text token, and generates
  an exact number of tokens. No prompt occurs twice.
- The engines run alternately: in each round, every engine runs each case. A cell is the median of
  the rounds, with the minimum and the maximum in brackets. `*` means that in at least one round
  other processes or the hypervisor used more than 3 % of the machine during each attempt.
- "1 request" is the rate of the steps after the first token, with 32 prompt tokens and 128 output
  tokens. "16 at once" has 128 prompt tokens and 64 output tokens per request. "64 mixed" has 16 to
  256 prompt tokens and 16 to 128 output tokens. "prefill" is one prompt and one output token.
- "Cold start" is the time from the start of the process to its first token, with the files in the
  page cache. "Peak RSS" is the sum over the engine's processes; of a mapped file, it counts the
  pages that were accessed. Dovetail keeps the KV blocks of finished requests for later prefix
  hits, so its memory grows up to the size of its cache (2 GiB), also if no prompt occurs twice.
- "Same first token" counts for how many of 16 fixed prompts the engine and Dovetail in bf16
  generate the same first token. If bf16 was not run, Dovetail in the same format is the reference.
  This column shows whether all engines compute the same model. With random weights the logits of
  the most likely tokens are similar, so quantization to 4 bits often changes the first token.
- The limit of a case is computed step by step, from measurements before and after each repetition.
  The time of a step is at least the time to read its bytes at the measured bandwidth, and at least
  the time of its FLOPs at the rate of a 2,048³ GEMM.
- "With a busy core" means that another process keeps one of the cores busy all the time.
- The engines differ in some respects. OpenVINO keeps its cache in 8 bits (its default) and computes
  with its 16-bit weights in bf16. llama.cpp is called through its C API, with our continuous
  batching and one stream per request; ik_llama.cpp in the same way, but with one cache for all
  requests, and it repacks its weights when it loads them. vLLM's int8 is W8A8 with a bf16 head.
  transformers runs one padded batch. In int4, the head has six bits (Q6_K) in Dovetail and in the
  file of llama.cpp (Q4_0), and eight bits in OpenVINO; [quantization.md](quantization.md) shows
  the accuracy.
"""


RULE = f"""- "KL to float32" is the mean KL divergence of the same engine and format over four texts
  (`bench/quality.py`, [quantization.md](quantization.md)). A peer counts in a ratio if it is at
  most {MAX_TIMES_OURS} × that of Dovetail in the same format; without a measurement, it does not
  count. In bf16 every peer counts. The ratios to all peers are in the row below.
"""


def http_section(page: str) -> str:
    """Return the section "Through HTTP" of an existing page, or ""."""
    _, actual, rest = page.partition(f"\n{HTTP_HEADING}\n")
    return actual + rest


def performance_page(
    runs: Sequence[Mapping[str, Any]], note: str = "", accuracy: Accuracy | None = None
) -> str:
    """Return the page for the results of runs of `cpu_vs.py`. note: text at the top.

    accuracy: results of `quality.py` that are shown next to the speed, and determine the compared
    engines.

    Results of one machine, commit and model are combined in one section.
    """
    parts = [HEAD, *([f"{_wrapped(note)}\n"] if note else []), METHOD]
    if accuracy is not None:
        parts += [RULE, f"{_wrapped(f'Accuracy: {accuracy.origin}.')}\n"]
    for _, group in groupby(runs, key=lambda run: run["machine"]):
        alike = list(group)
        parts += [_machine(alike), *(markdown(item, accuracy) for item in _by_model(alike))]
    return "\n".join(parts)


def _by_model(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return one result for each model and number of threads.

    Rounds of later runs are numbered continuously. The peak memory of an engine is the maximum over
    runs.
    """
    created: dict[tuple[str, int], dict[str, Any]] = {}
    for result in (result for run in runs for result in run["results"]):
        whole = created.setdefault(
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
    for whole in created.values():
        whole["rounds"] = _max_rounds(whole["turns"])
    return list(created.values())


def _max_rounds(turns: Sequence[Mapping[str, Any]]) -> int:
    """Return the largest number of rounds of a case."""
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
