"""`dovetail demo`: a batch of questions, answered twice, with different parts of the engine.

Shows that parts are chosen by name or by class path, that the answers stay the same, which plugin
filled each place, and why. Needs no download.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Group, Parameter

from dovetail.cli.demo_questions import Subject, demo_subject
from dovetail.cli.demo_run import PLUGIN_FIELDS, DemoRun, Part, run_demo
from dovetail.cli.terminal import forgive_encodings, printable
from dovetail.config import EngineArgs
from dovetail.engine.plugin_picks import check_picks, make_registry
from dovetail.plugins import PluginRegistry
from dovetail.plugins.platform_answers import preferred_names
from dovetail.plugins.selection import AUTO, choose_platform

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_GROUP = Group("Parts of the second run: a name, name@distribution, or package.module:Class")


def _option(text: str) -> Parameter:
    return Parameter(help=text, group=_GROUP)


@dataclass(frozen=True, kw_only=True)
class SecondParts:
    """The parts of the second run; None: another scheduler, and attention by its class path."""

    scheduler_cls: Annotated[str | None, _option("Scheduler or policy.")] = None
    attention_backend: Annotated[str | None, _option("Attention backend.")] = None
    worker_cls: Annotated[str | None, _option("Worker.")] = None
    executor_backend: Annotated[str | None, _option("Executor.")] = None
    linear_method: Annotated[str | None, _option("Linear method.")] = None
    ops: Annotated[str | None, _option("Op provider.")] = None


DEFAULT_PARTS = SecondParts()
_PIPE_WIDTH = 110
_TRUST_HELP = "Run parts that are named as ./file.py:Class."
_MODEL_HELP = "A model to run instead of the demo model."


def demo(
    *,
    model: Annotated[str | None, Parameter(help=_MODEL_HELP)] = None,
    second: Annotated[SecondParts, Parameter(name="*")] = DEFAULT_PARTS,
    trust_local_code: Annotated[bool, Parameter(negative="", help=_TRUST_HELP)] = False,
) -> int:
    """Show what an engine made of plugins does."""
    forgive_encodings()
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _PIPE_WIDTH
    with demo_subject(model) as subject:
        asked = {name: pick for name, pick in vars(second).items() if pick is not None}
        # A wrong name is told now, not after the first run.
        args = EngineArgs(subject.model, trust_local_code=trust_local_code, **asked)
        config = args.create_engine_config()
        check_picks(config, make_registry(config))
        console.print(f"[bold]Dovetail[/] asks {subject.description}.\n")
        first = run_demo(subject, {})
        _print_answers(console, subject, first)
        picks = _second_picks(asked, first)
        told = "\n".join(f"  {name} = {reference}" for name, reference in picks.items())
        console.print(f"\n[bold]Again, with other parts[/]\n{told}", soft_wrap=True)
        again = run_demo(subject, picks, trust_local_code=trust_local_code)
        _print_comparison(console, subject, first, again)
    _print_parts(console, first, again)
    _print_settings(console, first)
    return 0


def _second_picks(asked: dict[str, str], first: DemoRun) -> dict[str, str]:
    """Return the options of the second run: those asked for, else parts that the first had not."""
    registry = PluginRegistry()
    found: dict[str, str] = {}
    for candidate in registry.automatic("scheduler"):
        if candidate.name != first.parts["scheduler"].resolution.name:
            found.setdefault("scheduler_cls", candidate.name)
    if "attention" in first.parts:
        found["attention_backend"] = _other_attention(registry, first.parts["attention"])
    return {**found, **asked}


def _other_attention(registry: PluginRegistry, first: Part) -> str:
    """Return the class path of another backend that suits here, or of the same one.

    The first run took the best that does; those that the platform prefers to it were refused.
    """
    preferred = list(preferred_names(choose_platform(registry, AUTO), "attention"))
    able = registry.automatic("attention", preferred)
    targets = {found.name: found.target for found in reversed(able)}
    chosen = first.resolution.name
    others = preferred[preferred.index(chosen) + 1 :] if chosen in preferred else preferred
    return next((targets[name] for name in others if name in targets), first.resolution.target)


def _print_answers(console: Console, subject: Subject, run: DemoRun) -> None:
    table = _table("question", "answer")
    num_right = num_graded = 0
    for question, text in zip(subject.questions, run.texts, strict=True):
        mark = ""
        if question.is_right is not None:
            right = question.is_right(text)
            num_graded += 1
            num_right += right
            mark = "✓ " if right else "✗ "
        table.add_row(_plain(question.text), _plain(f"{mark}{text}"))
    console.print(table)
    if num_graded:
        console.print(f"\n{num_right} of {num_graded} are right, as a program checks.")
    console.print(f"\n{_speed(run)}")


def _print_comparison(console: Console, subject: Subject, first: DemoRun, again: DemoRun) -> None:
    num_equal, count = first.num_equal(again), len(subject.questions)
    if num_equal == count:
        console.print(f"[green]All {count} answers are the same, token by token.[/]")
    else:
        console.print(
            f"[yellow]{num_equal} of {count} answers are the same, token by token;[/] parts that "
            "round differently may part ways where two tokens are almost equally likely."
        )
    console.print(f"{_speed(again)}\n")


def _speed(run: DemoRun) -> str:
    rate = run.num_tokens / run.total_s
    return (
        f"{len(run.outputs)} answers at once, {run.num_tokens} tokens in {run.total_s:.2f} s: "
        f"{rate:,.0f} tokens/s"
    )


def _print_parts(console: Console, first: DemoRun, again: DemoRun) -> None:
    console.print("[bold]Who filled each place[/]")
    table = _table("place", "plugin", "of", "because", "second run")
    for column in table.columns[:3]:
        column.no_wrap = True
    for kind in dict.fromkeys([*first.parts, *again.parts]):
        before, after = first.parts.get(kind), again.parts.get(kind)
        found = None if before is None else before.resolution
        table.add_row(
            kind,
            "nobody" if found is None else found.name,
            "" if found is None else found.distribution or found.target,
            "" if before is None else before.reason,
            "" if after is None or after == before else _plain(after.resolution.name),
        )
    console.print(table)


def _print_settings(console: Console, run: DemoRun) -> None:
    console.print("\n[bold]What was set for you[/]")
    table = _table("setting", "value", "because")
    for change in run.changes:
        if change.field in PLUGIN_FIELDS.values():
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
    """Return `text` for rich to print as it is: what a model wrote is no markup."""
    from rich.text import Text

    return Text(printable(text))
