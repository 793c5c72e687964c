"""The conformance suite of the logits processor contract, for any processor.

The suite runs random requests alone, with other requests, in another row and after a preemption.
The logits of a request must be bitwise equal in all cases.
Dimensions: S rows of the step, V vocabulary, R rows that use the processor.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from random import Random
from typing import TYPE_CHECKING, Any

from dovetail.interfaces.logits_processor import LogitsProcessor, LogitsProcessorContext
from dovetail.plan import NewRequest
from dovetail.sampling_params import SamplingParams
from dovetail_devkit.expectation import checking, expect

if TYPE_CHECKING:
    import torch

VOCAB_SIZE = 61
NUM_ROWS = 6
NUM_STEPS = 24
SMALL_ALPHABET = 5
"""Vocabulary size. It is small, so that tokens repeat."""


@checking("logits_processor")
def check_logits_processor(
    processor_cls: type[LogitsProcessor],
    device: torch.device,
    *,
    options: Mapping[str, object] | None = None,
) -> None:
    """Check a processor against its contract. Raise AssertionError with the violated rule.

    options: constructor options; None for none.
    """
    context = LogitsProcessorContext(
        vocab_size=VOCAB_SIZE, max_num_seqs=NUM_ROWS, device=device, options=options or {}
    )
    asking = SamplingParams(extra_args=processor_cls.example_args)
    for params in (asking, SamplingParams()):
        expect(processor_cls.check_params(params) is None, "check_params must return None")
    _check_join(processor_cls(context), asking)
    _check_rows(processor_cls(context), device, asking)
    _check_fresh_starts(processor_cls, context, asking)


def _new_request(
    row: int, tokens: list[int], num_prompt: int, params: SamplingParams
) -> NewRequest:
    return NewRequest(
        request_id=f"r{row}",
        row=row,
        generation=1,
        token_ids=array("i", tokens),
        num_prompt_tokens=num_prompt,
        sampling_params=params,
        stop_token_ids=frozenset(),
        bad_words_token_ids=(),
        seed=row,
    )


def _check_join(processor: LogitsProcessor, asking: SamplingParams) -> None:
    for row in range(NUM_ROWS):
        processor.leave(row)  # no request has this row
    joined = processor.join(_new_request(0, [1, 2, 3], 3, asking))
    expect(
        joined is True,
        f"join() returns {joined!r} for a request with example_args; expected True",
    )
    joined = processor.join(_new_request(1, [1, 2, 3], 3, SamplingParams()))
    expect(
        isinstance(joined, bool),
        f"join() returns {joined!r} for a request without extra_args; expected True or False",
    )
    processor.leave(0)
    processor.leave(0)


def _random_logits(random: Random, num_rows: int, device: torch.device) -> torch.Tensor:
    """Return random float32 logits, some of which are -inf."""
    import torch

    numbers = [
        [
            -torch.inf if random.random() < 0.1 else random.randint(-40, 40) / 8
            for _ in range(VOCAB_SIZE)
        ]
        for _ in range(num_rows)
    ]
    return torch.tensor(numbers, dtype=torch.float32, device=device)


def _check_result(before_SV: torch.Tensor, after_SV: Any, other_rows: list[int]) -> None:
    """Check the result of `apply` against its input.

    other_rows: indices of rows that do not use the processor.
    """
    import torch

    expect(
        isinstance(after_SV, torch.Tensor),
        f"apply returns a {type(after_SV).__name__}; expected a tensor",
    )
    for name in ("shape", "dtype", "device"):
        old, new = getattr(before_SV, name), getattr(after_SV, name)
        expect(old == new, f"apply returns logits with the {name} {new}; expected {old}")
    expect(not bool(after_SV.isnan().any()), "the logits that apply returns must not have NaN")
    same = torch.equal(before_SV[other_rows], after_SV[other_rows])
    expect(same, "apply must not change the logits of a row that does not use the processor")
    banned = before_SV == -torch.inf
    expect(bool((after_SV[banned] == -torch.inf).all()), "apply must not change logits of -inf")
    is_masked = (after_SV == -torch.inf).all(-1) & ~banned.all(-1)
    expect(not bool(is_masked.any()), "apply must leave each row at least one finite logit")


def _check_rows(processor: LogitsProcessor, device: torch.device, asking: SamplingParams) -> None:
    """Run all rows. Every third row does not use the processor."""
    import torch

    random = Random(5)
    taking = []
    for row in range(NUM_ROWS):
        params = SamplingParams() if row % 3 == 2 else asking
        prompt = [random.randrange(SMALL_ALPHABET) for _ in range(1 + 3 * row)]
        if processor.join(_new_request(row, prompt, len(prompt), params)):
            taking.append(row)
    for _ in range(NUM_STEPS):
        rows = random.sample(range(NUM_ROWS), random.randint(1, NUM_ROWS))
        parts = [row for row in rows if row in taking]
        if not parts:
            continue
        before_SV = _random_logits(random, len(rows), device)
        after_SV = processor.apply(before_SV.clone(), rows)
        _check_result(before_SV, after_SV, [i for i, r in enumerate(rows) if r not in taking])
        again_SV = processor.apply(before_SV.clone(), rows)
        expect(
            torch.equal(after_SV, again_SV),
            "two calls of apply without accept between them must return equal logits",
        )
        for index, row in enumerate(rows):
            if row in taking:
                alone_1V = processor.apply(before_SV[index : index + 1].clone(), [row])
                same = torch.equal(alone_1V[0], after_SV[index])
                expect(same, "the logits of a row must not depend on other rows of the batch")
        tokens = [random.randrange(SMALL_ALPHABET) for _ in parts]
        processor.accept(parts, torch.tensor(tokens, dtype=torch.int64, device=device))
    _check_leaving(processor, taking, device)


def _check_leaving(processor: LogitsProcessor, taking: list[int], device: torch.device) -> None:
    first, *others = taking
    processor.leave(first)
    if others:
        before_SV = _random_logits(Random(6), 2, device)
        after_SV = processor.apply(before_SV.clone(), [first, others[0]])
        _check_result(before_SV, after_SV, [0])


def _check_fresh_starts(
    processor_cls: type[LogitsProcessor], context: LogitsProcessorContext, asking: SamplingParams
) -> None:
    """Check that a request gets equal logits after a preemption, in a row that was used before."""
    import torch

    random = Random(7)
    played, resumed = processor_cls(context), processor_cls(context)
    tokens = [random.randrange(SMALL_ALPHABET) for _ in range(4)]
    played.join(_new_request(0, tokens, 4, asking))
    resumed.join(_new_request(3, [9, 8, 7], 3, asking))
    for _ in range(NUM_STEPS):
        token = random.randrange(SMALL_ALPHABET)
        before_1V = _random_logits(random, 1, context.device)
        want_1V = played.apply(before_1V.clone(), [0])
        resumed.join(_new_request(3, tokens, 4, asking))
        got_1V = resumed.apply(before_1V.clone(), [3])
        rule = "a request must get the same logits after a preemption as without it"
        expect(torch.equal(got_1V, want_1V), rule)
        tokens = [*tokens, token]
        played.accept([0], torch.tensor([token], dtype=torch.int64, device=context.device))
