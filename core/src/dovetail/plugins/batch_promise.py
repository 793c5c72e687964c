"""Whether a class promises equal bits in every batch: what the seed of a request relies on.

A part that does not promise it may give a seeded request other tokens when other requests run
beside it. Reads what classes declare; computes nothing.
"""

from __future__ import annotations

from typing import Any

from dovetail.interfaces.ops import ROUNDED, overridden_operations

FEATURE = "batch_invariant"
"""The attention feature of this name."""
SEED_NOTE = (
    "It does not promise equal bits in every batch: a seeded request may get other tokens when "
    "other requests run beside it."
)
"""What a part without the promise means for users."""


def promises_equal_bits(kind: str, cls: type[Any], dtype: str) -> bool | None:
    """Return whether `cls` promises it for models of `dtype`.

    dtype: a name such as "bfloat16"; "" if it is not known. None for kinds without the promise, and
    where it depends on a dtype that is not known.
    """
    if kind == "attention":
        capabilities = cls.capabilities
        promised = capabilities.dtypes if FEATURE in capabilities.features else frozenset()
    elif kind == "ops":
        # What the provider leaves out runs in torch, which promises nothing.
        promised = cls.batch_invariant if overridden_operations(cls) >= ROUNDED else frozenset()
    elif kind == "linear_method":
        promised = cls.batch_invariant
    else:
        return None
    if not dtype and promised:
        return None
    return dtype in promised


def missing_promise(dtype: str) -> str:
    """Return the reason text for a class that does not promise it."""
    return f"it does not promise equal bits in every batch in {dtype or 'any dtype'}"
