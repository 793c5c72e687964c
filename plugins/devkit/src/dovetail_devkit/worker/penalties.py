"""The penalty cases of the worker suite: which tokens a penalty affects, and by how much."""

from __future__ import annotations

from dataclasses import replace

from dovetail_devkit.expectation import expect
from dovetail_devkit.worker.draws import SamplingSubject, generate, other_tokens
from dovetail_devkit.worker.harness import GREEDY

NUM_REPEATS = 16
"""How often the penalized token occurs in the output."""


def check_frequency(case: SamplingSubject) -> None:
    """Check that a token's occurrences are counted in the output, but not in the prompt."""
    _check_prompt_is_ignored(case)
    token, limit = _find_limit(case)
    for presence in (-2.0, 2.0):
        border = limit - presence / NUM_REPEATS
        for frequency, wins in ((border - 0.05, True), (border + 0.05, False)):
            actual = _wins(case, token, frequency, presence)
            expect(
                actual == wins,
                f"presence_penalty={presence:g} must change the logit of a generated token by "
                f"{-presence:g}: with frequency_penalty={frequency:.3f} and {NUM_REPEATS} "
                f"occurrences, token {token} is {'' if actual else 'not '}the most likely token; "
                f"without presence_penalty, it is below frequency_penalty={limit:.3f}",
            )


def check_repetition(case: SamplingSubject) -> None:
    """Check that a small repetition penalty favors tokens of prompt and output."""
    vocab_size, tried = case.info.vocab_size, 0
    for first in range(0, vocab_size - NUM_REPEATS, NUM_REPEATS):
        repeated = list(range(first, first + NUM_REPEATS))
        for where, num_prompt in (("prompt", NUM_REPEATS), ("output", 1)):
            (plain,) = generate(case, repeated, GREEDY, num_prompt=num_prompt)
            if plain in repeated:
                continue
            tried += 1
            params = replace(GREEDY, repetition_penalty=0.01)
            (actual,) = generate(case, repeated, params, num_prompt=num_prompt)
            expect(
                actual in repeated,
                f"repetition_penalty=0.01 must favor tokens of the {where}, {repeated[0]} to "
                f"{repeated[-1]}, but the worker samples {actual}",
            )
        if tried >= 4:
            return


def check_own_tokens(case: SamplingSubject) -> None:
    """Check that penalties count sampled tokens and output tokens of a resumed request equally."""
    for params in (
        replace(GREEDY, repetition_penalty=0.01),
        replace(GREEDY, frequency_penalty=-2.0, presence_penalty=-2.0),
    ):
        for prompt in case.prompts:
            tokens = generate(case, prompt[-1:], params, num_tokens=8)
            resumed = [*prompt[-1:], *tokens[:5]]
            actual = generate(case, resumed, params, num_prompt=1, num_tokens=3)
            expect(
                actual == tokens[5:],
                f"penalties: a request gets {tokens[5:]} after {tokens[:5]}, but {actual} if it is "
                f"resumed at this point; sampled and resumed tokens must be counted equally",
            )


def _find_limit(case: SamplingSubject) -> tuple[int, float]:
    """Return a token, and the frequency penalty above which it is not the most likely token."""
    for token in (*other_tokens(case, 6), case.alone[1][0]):
        low, high = -2.0, 2.0
        if not _wins(case, token, low) or _wins(case, token, high):
            continue
        for _ in range(11):
            middle = (low + high) / 2
            low, high = (middle, high) if _wins(case, token, middle) else (low, middle)
        if abs(low) < 1.8:
            return token, high
    raise AssertionError(
        f"a frequency_penalty from -2 to 2 must affect a token that was generated {NUM_REPEATS} "
        f"times"
    )


def _wins(case: SamplingSubject, token: int, frequency: float, presence: float = 0.0) -> bool:
    """Return whether a token that was generated 16 times is sampled next."""
    prompt = case.prompts[1]
    params = replace(GREEDY, frequency_penalty=frequency, presence_penalty=presence)
    tokens = [*prompt, *[token] * NUM_REPEATS]
    return generate(case, tokens, params, num_prompt=len(prompt)) == [token]


def _check_prompt_is_ignored(case: SamplingSubject) -> None:
    prompt = [*case.prompts[1], *other_tokens(case, 1) * NUM_REPEATS]
    plain = generate(case, prompt, GREEDY)
    for name in ("frequency_penalty", "presence_penalty"):
        actual = generate(case, prompt, replace(GREEDY, **{name: -2.0}))  # type: ignore[arg-type]
        expect(actual == plain, f"{name} must not count tokens of the prompt")
