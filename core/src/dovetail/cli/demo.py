"""`dovetail demo`: answers a batch of questions, and repeats this with different plugins.

The demo shows that plugins are selected by name or by class path, that the answers stay the same,
which plugin of each kind was selected and why, and how each other plugin changes the speed. This
module needs no download.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Group, Parameter

from dovetail.cli.demo_questions import demo_subject
from dovetail.cli.demo_run import NUM_ROUNDS, DemoRun, Part, run_demo, summary_of
from dovetail.cli.terminal import printable, replace_unencodable
from dovetail.config import EngineArgs
from dovetail.engine.plugin_choices import check_plugin_choices, make_registry
from dovetail.plugin_kinds import KINDS
from dovetail.plugins import PluginRegistry
from dovetail.plugins.platform_results import preferred_names
from dovetail.plugins.selection import AUTO, choose_platform

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_GROUP = Group("Plugins of the second run: a name, name@distribution, or package.module:Class")

SHOWN_ABOVE = frozenset(kind.field for kind in KINDS.values())
"""The settings that select plugins; the demo prints them in a separate table."""


def _option(text: str) -> Parameter:
    return Parameter(help=text, group=_GROUP)


@dataclass(frozen=True, kw_only=True)
class SecondParts:
    """The plugins of the second run.

    If all are None, the demo makes two more runs: one with another scheduler, and one with another
    attention backend, which is selected by its class path.
    """

    scheduler_cls: Annotated[str | None, _option("Scheduler or policy.")] = None
    attention_backend: Annotated[str | None, _option("Attention backend.")] = None
    worker_cls: Annotated[str | None, _option("Worker.")] = None
    executor_backend: Annotated[str | None, _option("Executor.")] = None
    linear_method: Annotated[str | None, _option("Linear method.")] = None
    ops: Annotated[str | None, _option("Op provider.")] = None


DEFAULT_PARTS = SecondParts()
_PIPE_WIDTH = 110
_TRUST_HELP = "Allow plugins that are named as ./file.py:Class."
_MODEL_HELP = "A model to run instead of the demo model."


def demo(
    *,
    model: Annotated[str | None, Parameter(help=_MODEL_HELP)] = None,
    second: Annotated[SecondParts, Parameter(name="*")] = DEFAULT_PARTS,
    trust_local_code: Annotated[bool, Parameter(negative="", help=_TRUST_HELP)] = False,
) -> int:
    """Run a small model with different plugins, and compare answers and speed."""
    replace_unencodable()
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _PIPE_WIDTH
    with demo_subject(model) as subject:
        requested = {name: pick for name, pick in vars(second).items() if pick is not None}
        # Report an unknown name before the first run.
        args = EngineArgs(subject.model, trust_local_code=trust_local_code, **requested)
        config = args.create_engine_config()
        check_plugin_choices(config, make_registry(config))
        console.print(f"[bold]Dovetail[/] {subject.description}.\n")
        first = run_demo(subject, {})
        _print_answers(console, first)
        if requested:
            others = [run_demo(subject, requested, trust_local_code=trust_local_code)]
        else:
            with _without_warnings():
                others = [run_demo(subject, options) for options in _other_options(first)]
        _print_comparison(console, first, others)
    _print_parts(console, first, others)
    _print_settings(console, first)
    return 0


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Log only errors: the user did not choose the plugins that these warnings are about."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        yield
    finally:
        logging.disable(before)


def _other_options(first: DemoRun) -> list[dict[str, str]]:
    """Return the options of more runs, each with one plugin that differs from the first run."""
    registry = PluginRegistry()
    used = first.parts["scheduler"].resolution.name
    schedulers = [
        candidate.name for candidate in registry.automatic("scheduler") if candidate.name != used
    ]
    options = [{"scheduler_cls": name} for name in schedulers[:1]]
    if "attention" in first.parts:
        options.append({"attention_backend": _other_attention(registry, first.parts["attention"])})
    return options


def _other_attention(registry: PluginRegistry, first: Part) -> str:
    """Return the class path of another usable backend, or else of the first run's backend.

    Backends that the platform ranks above the first run's backend are skipped: the first run
    rejected them.
    """
    preferred = list(preferred_names(choose_platform(registry, AUTO), "attention"))
    able = registry.automatic("attention", preferred)
    targets = {plugin.name: plugin.target for plugin in reversed(able)}
    chosen = first.resolution.name
    others = preferred[preferred.index(chosen) + 1 :] if chosen in preferred else preferred
    return next((targets[name] for name in others if name in targets), first.resolution.target)


def _print_answers(console: Console, run: DemoRun) -> None:
    table = _table("question", "answer")
    num_right = num_graded = 0
    for question, text in zip(run.subject.questions, run.texts, strict=True):
        mark = ""
        if question.is_right is not None:
            right = question.is_right(text)
            num_graded += 1
            num_right += right
            mark = "✓ " if right else "✗ "
        table.add_row(_plain(question.text), _plain(f"{mark}{text}"))
    console.print(table)
    if num_graded:
        console.print(f"\n{num_right} of {num_graded} answers are correct, checked by a program.")
    console.print(
        f"\n{len(run.outputs)} requests at once, {run.num_tokens} tokens in {run.total_s:.3f} s: "
        f"{run.rate:,.0f} tokens/s"
    )


def _print_comparison(console: Console, first: DemoRun, others: list[DemoRun]) -> None:
    console.print("\n[bold]The same questions with another plugin[/]")
    table = _table("changed", "answers", "tokens/s", "speed")
    table.add_row("nothing", "", f"{first.rate:,.0f}", "1.00")
    for run in others:
        changed = "\n".join(f"{name} = {value}" for name, value in run.options.items())
        num_equal, count = first.num_equal(run), len(run.outputs)
        equality = (
            f"all {count} are equal" if num_equal == count else f"{num_equal} of {count} are equal"
        )
        speed = f"{run.rate / first.rate:.2f}"
        table.add_row(_plain(changed), equality, f"{run.rate:,.0f}", speed)
    console.print(table)
    console.print(
        f"\nEach value is the median of {NUM_ROUNDS} rounds after a warm-up round, with an empty "
        "prefix cache. A difference of a few per cent is noise."
    )
    for run in others:
        for kind in run.changed_kinds(first):
            before, after = first.parts[kind].resolution, run.parts[kind].resolution
            console.print(f"{kind} {before.name}: {_plain(summary_of(before))}")
            console.print(f"{kind} {after.name}: {_plain(summary_of(after))}")
    if any(first.num_equal(run) < len(run.outputs) for run in others):
        console.print(
            "[yellow]Plugins that round differently can select another token if two tokens are "
            "almost equally likely.[/]"
        )
    console.print()


def _print_parts(console: Console, first: DemoRun, others: list[DemoRun]) -> None:
    console.print("[bold]Selected plugins[/]")
    table = _table("kind", "plugin", "distribution", "reason", "other runs")
    for column in table.columns[:3]:
        column.no_wrap = True
    for kind, part in first.parts.items():
        resolution = part.resolution
        changed = [run.parts[kind].resolution for run in others if kind in run.changed_kinds(first)]
        table.add_row(
            kind,
            resolution.name,
            resolution.distribution or resolution.target,
            part.reason,
            _plain(", ".join(other.name for other in changed)),
        )
    console.print(table)


def _print_settings(console: Console, run: DemoRun) -> None:
    console.print("\n[bold]Resolved settings[/]")
    table = _table("setting", "value", "reason")
    for change in run.changes:
        if change.field in SHOWN_ABOVE:
            continue
        table.add_row(change.field, _plain(str(change.after)), _plain(change.reason))
    console.print(table)


def _table(*headings: str) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table


def _plain(text: str) -> Any:
    """Return `text` for rich without markup, because a model's output may look like markup."""
    from rich.text import Text

    return Text(printable(text))
