"""Converts the results of trial processes into findings with remedies."""

from __future__ import annotations

import re
from collections.abc import Iterator

from dovetail_devkit.doctor.finding import BROKEN, NOTE, OK, WARNING, Finding
from dovetail_devkit.doctor.trial_run import Trial

_AREA = "plugins"
_MAX_SHOWN = 160
_NOISY = re.compile(r"Importing \S+ (printed|took) ")


def check_trial(trial: Trial) -> Iterator[Finding]:
    """Yield the findings of a trial: whether the plugin loads, then further problems."""
    plugin = trial.plugin
    subject = f"{plugin.kind}:{plugin.reference}"
    if trial.error:
        yield Finding(
            area=_AREA,
            subject=subject,
            verdict=BROKEN,
            text=_broken_text(trial),
            remedy=_remedy(trial),
        )
    elif trial.refusals:
        text = f"the plugin loads, but cannot be used on this machine: {'; '.join(trial.refusals)}"
        yield Finding(area=_AREA, subject=subject, verdict=NOTE, text=text)
    else:
        text = f"loads in {trial.took_ns / 1e9:.2f} s"
        yield Finding(area=_AREA, subject=subject, verdict=OK, text=text)
    if trial.noise and not trial.error:
        yield Finding(
            area=_AREA,
            subject=subject,
            verdict=WARNING,
            text=f"the plugin writes to the terminal when it is loaded: {_shown(trial.noise)}",
            remedy="ask the author to remove this text; it is mixed with the output of your "
            "programs",
        )
    for note in trial.notes:
        noisy = bool(_NOISY.match(note))
        remedy = (
            "ask the author to move this work into the constructor of the plugin" if noisy else ""
        )
        verdict = WARNING if noisy else NOTE
        yield Finding(area=_AREA, subject=subject, verdict=verdict, text=note, remedy=remedy)


def _broken_text(trial: Trial) -> str:
    text = re.sub(r"\s*\n\s*", " ", trial.error)
    return f"{text}; it wrote {_shown(trial.noise)}" if trial.noise else text


def _remedy(trial: Trial) -> str:
    plugin = trial.plugin
    rule = f"{plugin.kind}:{plugin.reference}"
    return (
        f"run pip install --upgrade {plugin.distribution}, or pip uninstall {plugin.distribution}; "
        f"to disable the plugin until then, add the option --plugins-deny '{rule}'"
    )


def _shown(text: str) -> str:
    line = re.sub(r"\s*\n\s*", " | ", text.strip())
    return repr(line if len(line) <= _MAX_SHOWN else f"{line[: _MAX_SHOWN - 1]}…")
