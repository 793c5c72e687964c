"""Decides which batch sizes are captured in full graphs, and which in piecewise graphs.

This module does not depend on a device.
"""

from __future__ import annotations

from dataclasses import dataclass

from dovetail_torch.runner.step_limits import StepLimits

GRAPHS = "graphs"
"""Feature of attention backends whose builders are `CapturableBuilder`s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphOptions:
    """The user's options: see `graph_mode` and `max_graph_size` of the engine."""

    mode: str = "full_and_piecewise"
    max_size: int = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphPlan:
    """The sizes of the graphs, ascending.

    decode_sizes: numbers of requests of full graphs, for steps with one token per request.
    mixed_sizes: numbers of tokens of piecewise graphs, which exclude attention, for other steps.
    """

    decode_sizes: tuple[int, ...] = ()
    mixed_sizes: tuple[int, ...] = ()


USUAL_OPTIONS = GraphOptions()


def plan_graphs(options: GraphOptions, limits: StepLimits, *, capturable: bool) -> GraphPlan:
    """Return the sizes of the graphs.

    capturable: whether the attention of decodes can be captured. Without it, decodes use the graphs
    of mixed steps.
    """
    if options.mode == "none":
        return GraphPlan()
    most_tokens = min(limits.max_num_batched_tokens, limits.max_model_len - 1)
    takes_decodes = capturable and options.mode != "piecewise"
    takes_mixed = options.mode != "full"
    return GraphPlan(
        decode_sizes=graph_sizes(options, limits.max_num_seqs) if takes_decodes else (),
        mixed_sizes=graph_sizes(options, most_tokens) if takes_mixed else (),
    )


def graph_sizes(options: GraphOptions, most: int) -> tuple[int, ...]:
    """Return sizes up to `most`: a few small sizes, then multiples of 8, then multiples of 16.

    Padding costs little, because the time of a small step is the time to read the weights.
    """
    most = min(most, options.max_size)
    usual = (1, 2, 4, *range(8, 256, 8), *range(256, options.max_size, 16))
    return tuple(sorted({size for size in usual if size < most} | {most})) if most > 0 else ()
