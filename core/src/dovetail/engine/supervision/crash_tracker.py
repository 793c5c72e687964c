"""Finds requests that crash an engine: counts its crashes by request, and rejects such requests.

A crash counts against every unfinished request, by three keys: the user's id, the prompt with its
parameters, and the prompt alone. A request that ends normally clears its keys. Counts older than
the window of the rules are dropped. The rule, for `max_deaths` = N:

- A key with N crashes (the prompt alone: N + 1) is suspected.
- It is banned, until the window has passed, if an engine fails while its request is the only
  unfinished one, or the only suspect. A banned request is rejected with RequestError.
- While more than `FEW_RESTARTS` restarts would be left if every crash counted, two events are not
evidence: that a process was killed from outside (SIGKILL), and that several requests with one
prompt were unfinished. With fewer restarts left, both are evidence, and only one suspect runs at a
time, so that the next crash identifies it; other suspects get UnavailableError and may retry.

A request is to blame for a failure if it was the only unfinished one, or if another request has
ended normally within the window, which shows that the engine works. A SIGKILL from outside is
attributed to no request.

Crashing requests therefore cannot use up all restarts, even if each is a different request, and a
request that merely ran at the same time is not rejected permanently.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from dovetail.clock import Clock
from dovetail.engine.supervision.rules import SupervisionRules
from dovetail.errors import RequestError, UnavailableError
from dovetail.request import EngineCoreRequest

FEW_RESTARTS = 2
_MAX_KEYS = 8192
_ID, _REQUEST, _PROMPT = "id", "request", "prompt"

Key = tuple[str, str]


@dataclass(slots=True)
class _Record:
    """Crashes while a request with the key was unfinished. last_ns: the time of the last crash."""

    num_failures: int = 0
    last_ns: int = 0
    is_banned: bool = False


class CrashTracker:
    """Counts crashes by request. See the module docstring. Not thread-safe.

    restarts_left: number of restarts left after the last crash; set by the owner.
    """

    def __init__(self, rules: SupervisionRules, clock: Clock) -> None:
        self.restarts_left = rules.max_restarts
        self._max_deaths = rules.max_deaths
        self._window_ns = int(rules.window_s * 1e9)
        self._clock = clock
        self._last_normal_end_ns: int | None = None
        self._records: dict[Key, _Record] = {}
        # Unfinished requests: core id to hash of prompt and parameters.
        self._suspects: dict[str, str] = {}

    def admit(self, user_id: str, request: EngineCoreRequest) -> None:
        """Record a request that is about to run, before it is sent to the engine.

        Raises RequestError if it is banned, UnavailableError if it has to wait for a suspect.
        """
        if not self._records:
            return
        keys = _keys(user_id, request)
        suspected = [key for key in keys if self._is_suspected(key)]
        banned = next((key for key in suspected if self._records[key].is_banned), None)
        if banned is not None:
            raise self._rejection(user_id, banned)
        if not suspected or self.restarts_left > FEW_RESTARTS:
            return
        fingerprint = keys[1][1]
        if any(other != fingerprint for other in self._suspects.values()):
            raise UnavailableError(
                f"request {user_id!r} was unfinished when the engine failed, and so was another "
                "one that is running now. Only one of them may run at a time; retry later."
            )
        self._suspects[request.request_id] = fingerprint

    def record_end(self, user_id: str, request: EngineCoreRequest, *, is_normal: bool) -> None:
        """Record that a request has ended.

        is_normal: whether it ended without an abort or an error.
        """
        self._suspects.pop(request.request_id, None)
        if is_normal:
            self._last_normal_end_ns = self._clock.now_ns()
        if is_normal and self._records:
            for key in _keys(user_id, request):
                self._records.pop(key, None)

    def blames_request(
        self, under_way: Sequence[tuple[str, EngineCoreRequest]], *, was_killed: bool
    ) -> bool:
        """Return whether an unfinished request is to blame for a failure."""
        if was_killed or not under_way:
            return False
        last_ns = self._last_normal_end_ns
        if last_ns is not None and self._clock.now_ns() - last_ns <= self._window_ns:
            return True
        return len({_keys(user_id, request)[1] for user_id, request in under_way}) == 1

    def record_crash(
        self, under_way: Iterable[tuple[str, EngineCoreRequest]], *, was_killed: bool
    ) -> None:
        """Record that an engine failed with these requests unfinished, by user id.

        was_killed: whether a SIGKILL from outside the supervisor killed it.
        """
        keys_of = {request.request_id: _keys(user_id, request) for user_id, request in under_way}
        now_ns = self._clock.now_ns()
        for key in {key for keys in keys_of.values() for key in keys}:
            record = self._records.pop(key, None)
            if record is None or now_ns - record.last_ns > self._window_ns:
                record = _Record()
            self._records[key] = record
            record.num_failures += 1
            record.last_ns = now_ns
        suspects = [keys_of[core_id] for core_id in self._suspects if core_id in keys_of]
        self._suspects.clear()
        accused = suspects or list(keys_of.values())
        is_proof = len(accused) == 1 and not was_killed
        if is_proof or self.restarts_left <= FEW_RESTARTS:
            self._ban(accused)
        while len(self._records) > _MAX_KEYS:
            del self._records[next(iter(self._records))]

    def _ban(self, accused: Sequence[tuple[Key, Key, Key]]) -> None:
        """Ban the suspected key, if only one request can be the cause."""
        if len({fingerprint for _, fingerprint, _ in accused}) != 1:
            return
        for key in {key for keys in accused for key in keys}:
            self._records[key].is_banned = self._is_suspected(key)

    def _is_suspected(self, key: Key) -> bool:
        record = self._records.get(key)
        if record is None or self._clock.now_ns() - record.last_ns > self._window_ns:
            return False
        return record.num_failures >= self._max_deaths + (key[0] == _PROMPT)

    def _rejection(self, user_id: str, key: Key) -> RequestError:
        what = {_ID: "a request with this id", _REQUEST: "it", _PROMPT: "its prompt"}[key[0]]
        return RequestError(
            f"request {user_id!r} is rejected: {what} was unfinished at "
            f"{self._records[key].num_failures} failures of the engine, and no other request can "
            "be the cause. If it is not the cause, retry later, or with another id, prompt or "
            "parameters.",
            parameter="request_id" if key[0] == _ID else "prompt",
        )


def _keys(user_id: str, request: EngineCoreRequest) -> tuple[Key, Key, Key]:
    prompt = hashlib.blake2b(",".join(map(str, request.prompt_token_ids)).encode(), digest_size=16)
    whole = prompt.copy()
    params = replace(request.sampling_params, n=1, seed=None)  # equal in all completions
    whole.update(repr((params, request.max_tokens, request.lora_id)).encode())
    return (_ID, user_id), (_REQUEST, whole.hexdigest()), (_PROMPT, prompt.hexdigest())
