"""`dovetail plugins explain`: explains which plugin an engine would use, and why.

No engine is created and no weights are opened. The exit code is 1 if no plugin can be used.
"""

from __future__ import annotations

import re
from dataclasses import field as dataclass_field
from dataclasses import fields, make_dataclass
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from dovetail.cli.engine_options import ENGINE_GROUP, EngineOptions, engine_args
from dovetail.cli.plugins_table import print_json, print_line, print_table
from dovetail.engine.choice import explain_choice
from dovetail.plugins.contracts.declared import SEED_NOTE
from dovetail.plugins.resolving.reference import reference_text
from dovetail.plugins.selection import UNKNOWN, Explanation, Verdict

if TYPE_CHECKING:
    from dovetail.interfaces import AttentionRequirements

_KIND_HELP = "The kind of plugin, such as attention; `dovetail plugins list` shows all kinds."
_JSON_HELP = "Write a JSON object instead of a table."
_ASSUME_HELP = "Explain for a device that is not here: PLATFORM:ARCHITECTURE, such as cuda:sm_90."
_MODEL_HELP = "Directory or name of a model; not needed for all kinds of plugins."
_ENGINE = Parameter(name="*")

if TYPE_CHECKING:
    Options = EngineOptions
    NO_OPTIONS: EngineOptions
else:
    _MODEL = Annotated[str | None, Parameter(help=_MODEL_HELP, group=ENGINE_GROUP)]
    Options = make_dataclass(
        "Options",
        [("model", _MODEL, dataclass_field(default=None))],
        bases=(EngineOptions,),
        frozen=True,
        kw_only=True,
    )
    Options.__module__ = __name__
    NO_OPTIONS = Options()


def explain(
    kind: Annotated[str, Parameter(help=_KIND_HELP)],
    /,
    *,
    as_json: Annotated[bool, Parameter(name="--json", negative="", help=_JSON_HELP)] = False,
    assume: Annotated[str, Parameter(help=_ASSUME_HELP)] = "",
    engine: Annotated[Options, _ENGINE] = NO_OPTIONS,
) -> int:
    """Explain which plugin an engine would use, and why it would not use the others.

    Only plugins that the engine could use are loaded.
    """
    explanation = _explained(kind, assume, engine)
    if as_json:
        print_json(_facts(explanation))
    else:
        _show(explanation)
    return 1 if explanation.error else 0


def _explained(kind: str, assume: str, engine: EngineOptions) -> Explanation:
    if engine.model is not None:
        return explain_choice(kind, engine_args(engine), assume=assume)
    args = engine_args(engine)
    options = {
        field.name: getattr(args, field.name) for field in fields(args) if field.name != "model"
    }
    return explain_choice(kind, assume=assume, **options)


def _facts(explanation: Explanation) -> dict[str, Any]:
    criteria = explanation.criteria
    return {
        "kind": explanation.kind,
        "platform": criteria.platform_name,
        "references": [reference_text(reference) for reference in criteria.references],
        "why": criteria.why,
        "requirements": criteria.requirements,
        "chosen": [verdict.name for verdict in explanation.chosen],
        "error": explanation.error,
        "verdicts": [verdict.facts() for verdict in explanation.verdicts],
    }


def _show(explanation: Explanation) -> None:
    criteria = explanation.criteria
    print_line(_headline(explanation), style="bold")
    if any(verdict.batch_invariant is False for verdict in explanation.chosen):
        print_line(SEED_NOTE)
    if criteria.requirements is not None:
        print_line(f"Requirements: {_requirements_text(criteria.requirements)}.")
    if explanation.verdicts:
        print()
        headings = ("", "", explanation.kind, "distribution", "why")
        print_table(headings, [_row(verdict) for verdict in explanation.verdicts])
    if explanation.error:
        print()
        print_line(explanation.error, style="red")


def _headline(explanation: Explanation) -> str:
    kind, criteria = explanation.kind.replace("_", " "), explanation.criteria
    where = f" on the platform {criteria.platform_name}" if criteria.platform else ""
    if criteria.platform is not None and criteria.platform.assumed:
        where += f" with an assumed device {criteria.platform.assumed}"
    names = ", ".join(verdict.name for verdict in explanation.chosen)
    if names:
        return f"{kind}{where}: {names} ({criteria.why})."
    unknown = [verdict.name for verdict in explanation.verdicts if verdict.state == UNKNOWN]
    if unknown and not explanation.error:
        first = f"an engine tries {unknown[0]} first"
        return f"{kind}{where}: not known before an engine starts; {first} ({criteria.why})."
    if explanation.error:
        return f"{kind}{where}: no plugin can be used ({criteria.why})."
    return f"{kind}{where}: none ({criteria.why})."


def _requirements_text(required: AttentionRequirements) -> str:
    parts = [
        f"head size {required.head_size}",
        f"{required.num_heads} query heads over {required.num_kv_heads} key-value heads",
        required.dtype,
        f"KV cache in {required.kv_cache_dtype} with blocks of {required.block_size} tokens",
        f"device {required.device_type} {required.architecture}".rstrip(),
        *sorted(required.features),
    ]
    return ", ".join(parts)


def _row(verdict: Verdict) -> tuple[str, ...]:
    rank = f"rank {verdict.rank}" if verdict.rank else ""
    # Line breaks in an error would break the table.
    reasons = [re.sub(r"\s*\n\s*", " ", reason).rstrip(".") for reason in verdict.reasons]
    why = "; ".join(part for part in (verdict.standing, rank, *reasons) if part)
    distribution = f"{verdict.distribution} {verdict.version}".strip() or "–"
    rank_text = str(verdict.place) if verdict.place else "–"
    return rank_text, verdict.state, verdict.name, distribution, why
