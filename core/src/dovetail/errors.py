"""The hierarchy of errors. Every error that Dovetail raises deliberately is a `DovetailError`.

    DovetailError
    ├── UserError                 an input is invalid; also a ValueError
    │   ├── ConfigError           an engine option is unknown, invalid or conflicts with another
    │   ├── RequestError          one request is rejected; other requests continue
    │   └── ModelError            a model directory or its architecture cannot be used
    │       └── WeightError       a weight or its file is missing, truncated, unexpected or invalid
    ├── PluginError               a plugin cannot be found, loaded or used
    │   ├── UnfitPluginError      the plugin that the user named is not suitable; also a ConfigError
    │   ├── AttentionUnknownError the attention requirements are unknown until the model is loaded
    │   ├── PluginNotFoundError   no plugin has that name
    │   ├── PluginLoadError       importing or constructing a plugin failed
    │   └── ContractError         a plugin violates its contract
    ├── PolicyError               a scheduling policy violates its contract; in strict mode only
    ├── CapacityError             a valid request or configuration does not fit (memory, blocks)
    ├── TransportError            a message between processes was not delivered
    │   ├── MessageError          the bytes are not a message of this version
    │   └── PeerLostError         the other process has exited
    ├── StartError                the engine could not start, for a reason without its own class
    ├── UnavailableError          the engine is restarting; retry later
    ├── StalledError              a process does not respond; it may recover
    └── EngineDeadError           the engine has failed; has a summary without prompts

A message gives the value, the problem and the remedy. `assert` is for invariants only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches
from itertools import islice


class DovetailError(Exception):
    """The base class of all errors that Dovetail raises deliberately.

    phase: the startup phase in which it was raised, or "".
    """

    phase: str = ""

    def __str__(self) -> str:
        """Return the message and the startup phase, if any."""
        text = super().__str__()
        return f"{text} (startup phase: {self.phase})" if self.phase else text


class UserError(DovetailError, ValueError):
    """An input of the user is invalid."""


class ConfigError(UserError):
    """An engine option is unknown, invalid or conflicts with another."""


class RequestError(UserError):
    """One request is rejected. Other requests are not affected.

    parameter: the invalid field, or "" if the whole request is rejected.
    """

    def __init__(self, message: str, *, parameter: str = "") -> None:
        super().__init__(message)
        self.parameter = parameter

    def with_name(self, name: str, *, replaced: str = "prompt") -> RequestError:
        """Return the error with `name` instead of the parameter `replaced`.

        name: the caller's argument or field, such as "documents[1]". Errors of other parameters are
        returned unchanged.
        """
        if self.parameter != replaced:
            return self
        message = str(self)
        if message.startswith(replaced):
            return RequestError(name + message.removeprefix(replaced), parameter=name)
        return RequestError(f"{name}: {message}", parameter=name)


class ModelError(UserError):
    """A model directory or its architecture cannot be used."""


class WeightError(ModelError):
    """A weight or its file is missing, truncated, unexpected or has a wrong shape."""


class PluginError(DovetailError):
    """A plugin cannot be found, loaded or used."""


class UnfitPluginError(ConfigError, PluginError):
    """A plugin that the user named does not support this configuration or model."""


class PluginNotFoundError(PluginError, LookupError):
    """No plugin has the requested name."""


class PluginLoadError(PluginError, ImportError):
    """A plugin was found, but importing or constructing it failed."""


class ContractError(PluginError, TypeError):
    """A plugin violates its contract."""


class AttentionUnknownError(PluginError):
    """The attention requirements of a model are not known before it is loaded."""


class PolicyError(DovetailError):
    """A scheduling policy violates its contract. Only strict schedulers raise it."""


class CapacityError(DovetailError):
    """A valid request or configuration does not fit. The message states what would fit."""


class TransportError(DovetailError):
    """A message between processes was not delivered."""


class MessageError(TransportError, ValueError):
    """Received bytes are not a message of this version. None of the bytes were used."""


class PeerLostError(TransportError, ConnectionError):
    """The other process of a connection has exited."""


class StartError(DovetailError):
    """The engine could not start: a phase timed out or failed for an unexpected reason."""


class UnavailableError(DovetailError):
    """The engine is restarting and ignored the call. Retry after `retry_after_s` seconds."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class StalledError(DovetailError):
    """A process is alive but does not respond. It may recover."""


class EngineDeadError(DovetailError):
    """The engine has failed and cannot be used any more.

    digest: a summary of the failed step (rows, counts, sizes), without contents of prompts.
    """

    def __init__(self, message: str, *, digest: str = "") -> None:
        super().__init__(f"{message}\n{digest}" if digest else message)
        self.digest = digest


_MAX_TYPED = 200
"""Maximum length of a name that is compared with known names."""
_MAX_KNOWN = 2000
"""Maximum number of known names; each comparison takes up to 0.1 ms."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return " Did you mean 'x'?" for the most similar known name, or an empty string.

    Prefers a name that differs only in case and separators ("deadline_fair", "Deadline-Fair").
    """
    if len(name) > _MAX_TYPED:
        return ""
    names = [item for item in islice(known, _MAX_KNOWN) if len(item) <= _MAX_TYPED]
    same = [item for item in names if _letters(item) == _letters(name)]
    folded = {item.casefold(): item for item in reversed(names)}
    close = [
        folded[close_match]
        for close_match in get_close_matches(name.casefold(), folded, n=1, cutoff=0.6)
    ]
    matches = same or close
    return f" Did you mean {matches[0]!r}?" if matches else ""


def _letters(name: str) -> str:
    return re.sub(r"[\W_]+", "", name).casefold()


def describe_failure(error: BaseException) -> str:
    """Return an error and its location on one line: "KeyError: 'a', in acme.queue:Fair.rank"."""
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
