"""Grants: the results of a policy's actions. Equal grants share one object if possible."""

from __future__ import annotations

from functools import cache

from dovetail.interfaces.policy import Denied, Grant
from dovetail.kv_cache.hit import Hit
from dovetail.request import Request

DENIALS = {reason: Grant(denied=reason) for reason in Denied}
DONE = Grant()


@cache
def granted(num_tokens: int) -> Grant:
    """Return the grant of `num_tokens` tokens."""
    return Grant(num_tokens=num_tokens)


def admitted(request: Request, hit: Hit, num_tokens: int) -> Grant:
    """Return the grant of an admission. Its `num_tokens` is 0 if blocks must be loaded first."""
    return Grant(num_tokens=num_tokens if request.row >= 0 else 0, num_cached=hit.num_tokens)
