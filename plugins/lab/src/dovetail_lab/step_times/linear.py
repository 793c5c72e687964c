"""The step-time model "linear": constants that need no real machine.

The defaults are rough values for a model of 8 billion parameters on one large GPU. They show how
policies differ; they do not predict the latency of a machine.
"""

from __future__ import annotations

from dovetail.errors import UserError
from dovetail_lab.simulation.step_times import LinearStepTimes

NAME = "linear"
DEFAULTS = {
    "step_ps": 7_000_000_000,
    "prefill_token_ps": 35_000_000,
    "decode_ps": 20_000_000,
    "kv_token_ps": 40_000,
    "prefill_ps": 0,
    "context_pair_ps": 2_000,
    "join_ps": 0,
}
_MAX_PS = 10**15


def make_linear(reference: str) -> LinearStepTimes:
    """Return the model of "linear" or "linear:step_ps=9000000000,kv_token_ps=0".

    Raises UserError for an unknown name or an invalid number.
    """
    values = dict(DEFAULTS)
    for part in filter(None, reference.partition(":")[2].split(",")):
        name, _, number = part.partition("=")
        if name not in DEFAULTS or not number.isdecimal() or int(number) > _MAX_PS:
            raise UserError(
                f"step_times={reference!r}: {part!r} is not of the form NAME=PICOSECONDS with a "
                f"name of {', '.join(DEFAULTS)}."
            )
        values[name] = int(number)
    return LinearStepTimes(name=NAME, **values)
