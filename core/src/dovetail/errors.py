"""The one tree of errors. Everything that Dovetail raises on purpose is below `DovetailError`.

    DovetailError
    ├── UserError                 somebody asked for what cannot be; also a ValueError
    │   ├── ConfigError           an engine option is unknown, wrong or contradicts another
    │   ├── RequestError          one request is refused; every other request continues
    │   └── ModelError            a model directory, its weights or its architecture
    │       └── WeightError       a file or a weight: missing, truncated, unexpected, wrong shape
    ├── PluginError               a plugin could not be found, loaded or trusted with its contract
    │   ├── UnfitPluginError      named by the user, and cannot do this; also a ConfigError
    │   ├── AttentionUnknownError only loading a model can tell what it asks of attention
    │   ├── PluginNotFoundError   no candidate of that name
    │   ├── PluginLoadError       found, but importing or constructing it failed
    │   └── ContractError         loaded, but it does not do what its contract demands
    ├── PolicyError               a scheduling policy wished for what cannot be; in strict mode only
    ├── CapacityError             it would be right, but it does not fit (memory, blocks)
    ├── TransportError            a message did not get from one process to another
    │   ├── MessageError          bytes that are not a message, or none of this version
    │   └── PeerLostError         the other process is gone
    ├── StartError                the engine could not start, and nobody knows better why
    ├── UnavailableError          the engine is being started again; ask later
    ├── StalledError              a process does not respond; it may come back
    └── EngineDeadError           the engine cannot go on; carries a prompt-free digest

Messages say what was asked, what was found and what would do. `assert` is for invariants only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches


class DovetailError(Exception):
    """The root: catch this to catch everything that Dovetail raises on purpose.

    phase: of an engine's start in which it was raised, or "".
    """

    phase: str = ""

    def __str__(self) -> str:
        """Return the message, with the phase if there is one."""
        text = super().__str__()
        return f"{text} (start-up phase: {self.phase})" if self.phase else text


class UserError(DovetailError, ValueError):
    """Somebody asked for what cannot be."""


class ConfigError(UserError):
    """An engine option is unknown, wrong or contradicts another."""


class RequestError(UserError):
    """One request is refused; every other request continues unharmed.

    `parameter` names the field at fault, or is empty where it is the request as a whole.
    """

    def __init__(self, message: str, *, parameter: str = "") -> None:
        super().__init__(message)
        self.parameter = parameter


class ModelError(UserError):
    """A model directory or its architecture cannot be used."""


class WeightError(ModelError):
    """A weight file or a weight in it is missing, truncated, unexpected or of another shape."""


class PluginError(DovetailError):
    """A plugin could not be found, loaded or trusted with its contract."""


class UnfitPluginError(ConfigError, PluginError):
    """A plugin that the user named cannot do what this configuration and model need of it."""


class PluginNotFoundError(PluginError, LookupError):
    """No candidate goes by that name."""


class PluginLoadError(PluginError, ImportError):
    """The plugin was found, but importing or constructing it failed."""


class ContractError(PluginError, TypeError):
    """The plugin was loaded, but it does not do what its contract demands."""


class AttentionUnknownError(PluginError):
    """What a model asks of attention is known only once it is loaded."""


class PolicyError(DovetailError):
    """A scheduling policy did what its contract forbids; raised by strict schedulers only."""


class CapacityError(DovetailError):
    """The wish is right, but it does not fit; the message states the figure that would."""


class TransportError(DovetailError):
    """A message did not get from one process to another."""


class MessageError(TransportError, ValueError):
    """Bytes that are not a message, or none of this version; nothing of them was used."""


class PeerLostError(TransportError, ConnectionError):
    """The process at the other end is gone."""


class StartError(DovetailError):
    """The engine could not start: a phase failed in an unforeseen way, or took too long."""


class UnavailableError(DovetailError):
    """The engine is being started again; nothing was done. Ask again in `retry_after_s` seconds."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class StalledError(DovetailError):
    """A process lives and shows no sign of it; whether it comes back is not known."""


class EngineDeadError(DovetailError):
    """The engine cannot go on.

    `digest` tells what ran when it died (rows, counts, sizes), never what was in the prompts.
    """

    def __init__(self, message: str, *, digest: str = "") -> None:
        super().__init__(f"{message}\n{digest}" if digest else message)
        self.digest = digest


_MAX_TYPED = 200
"""Characters of a name that somebody typed; longer ones are compared with nothing."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return " Did you mean 'x'?" for the nearest known name, or an empty string.

    A name that differs in case and separators alone ("deadline_fair", "Deadline-Fair") goes first.
    """
    if len(name) > _MAX_TYPED:
        return ""
    names = list(known)
    same = [one for one in names if _letters(one) == _letters(name)]
    folded = {one.casefold(): one for one in reversed(names)}
    close = [folded[one] for one in get_close_matches(name.casefold(), folded, n=1, cutoff=0.6)]
    found = same or close
    return f" Did you mean {found[0]!r}?" if found else ""


def _letters(name: str) -> str:
    return re.sub(r"[\W_]+", "", name).casefold()


def describe_failure(error: BaseException) -> str:
    """Return what was raised and where, on one line: "KeyError: 'a', in acme.queue:Fair.rank"."""
    text = type(error).__name__
    if lines := str(error).splitlines():
        text = f"{text}: {lines[0]}"
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return text
    frame = trace.tb_frame
    return f"{text}, in {frame.f_globals.get('__name__', '?')}:{frame.f_code.co_qualname}"
