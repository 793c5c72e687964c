"""The plans that the executor suite executes."""

from __future__ import annotations

from array import array

from dovetail.plan import NewRequest, SchedulerOutput, StepBuilder
from dovetail.sampling_params import SamplingParams


def make_plans() -> list[SchedulerOutput]:
    """Return eight plans for two rows, with chunks, decodes, reused rows and an empty plan."""
    builder = StepBuilder()
    plans = []

    def join(row: int, generation: int, tokens: range, blocks: range) -> None:
        builder.join(_new_request(row, generation, tokens))
        builder.grow(row, list(blocks))

    join(0, 1, range(6), range(1, 5))
    builder.run(0, 0, 4, samples=False)
    plans.append(builder.build())
    join(1, 1, range(20, 22), range(5, 9))
    builder.run(1, 0, 2, samples=True)
    builder.run(0, 4, 2, samples=True)
    plans.append(builder.build())
    for step in range(3):
        builder.run(0, 6 + step, 1, samples=True)
        builder.run(1, 2 + step, 1, samples=True)
        plans.append(builder.build())
    builder.leave(0)
    plans.append(builder.build())
    join(0, 2, range(40, 43), range(4, 0, -1))
    builder.run(0, 0, 3, samples=True)
    builder.run(1, 5, 1, samples=True)
    plans.append(builder.build())
    builder.run(1, 6, 1, samples=True)
    plans.append(builder.build())
    return plans


def _new_request(row: int, generation: int, tokens: range) -> NewRequest:
    return NewRequest(
        request_id=f"{row}/{generation}",
        row=row,
        generation=generation,
        token_ids=array("i", tokens),
        num_prompt_tokens=len(tokens),
        sampling_params=SamplingParams(),
        stop_token_ids=frozenset(),
        bad_words_token_ids=(),
        seed=row,
    )
