"""The sampling cases of the worker suite, for each field of `SamplingParams` that workers handle.

The worker's logits are not known, so each case uses settings with the same result for every correct
worker: at temperature 100 all tokens are almost equally likely, and truncation to one token or a
large bias determines the token, and a banned token is never sampled. A field that needs a
capability is checked if the worker declares the capability; otherwise the engine rejects requests
with this field.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from dovetail.sampling_params import SamplingParams
from dovetail_devkit.expectation import SkipCase, expect
from dovetail_devkit.worker.draws import (
    BYSTANDER,
    COLD,
    HOT,
    NUM_SEEDS,
    SamplingSubject,
    first_tokens,
    generate,
    other_tokens,
)
from dovetail_devkit.worker.harness import GREEDY
from dovetail_devkit.worker.penalties import check_frequency, check_own_tokens, check_repetition

MIN_VOCABULARY = 32

Check = Callable[[SamplingSubject], None]


def check_sampling(check: Check, capability: str, case: SamplingSubject) -> None:
    """Run one check, and check that its sampling parameters do not stay in the rows.

    capability: raise SkipCase unless the worker declares it; "" if the check needs no capability.
    """
    if capability and capability not in case.harness.worker.provides:
        raise SkipCase(
            f"the worker does not declare {capability!r}; the engine rejects requests that need it"
        )
    if case.info.vocab_size < MIN_VOCABULARY:
        raise SkipCase(
            f"the vocabulary of {case.info.vocab_size} tokens is too small: the check needs "
            f"{MIN_VOCABULARY}"
        )
    check(case)
    case.harness.clear()
    for row in range(BYSTANDER):
        case.harness.join(row, case.prompts[1])
        actual = case.harness.generate(row, 2)
        expect(
            actual == case.alone[1][:2],
            f"row {row} keeps sampling parameters of its previous request: a greedy request gets "
            f"{actual}; expected {case.alone[1][:2]}",
        )
        case.harness.leave(row)


def _check_temperature(case: SamplingSubject) -> None:
    tokens = first_tokens(case, SamplingParams(temperature=HOT))
    expect(
        len(set(tokens)) >= 3,
        f"temperature={HOT:g} with {NUM_SEEDS} seeds gives only the tokens {sorted(set(tokens))}; "
        f"the worker ignores the temperature or the seed",
    )
    tokens = first_tokens(case, SamplingParams(temperature=COLD))
    _expect_best(case, tokens, f"temperature={COLD:g}")


def _check_noise(case: SamplingSubject) -> None:
    """Check that a seeded request gets new noise in each step, also after it is resumed.

    After a resume, it must get the same noise as without the preemption.
    """
    sequences = []
    for seed in (1, 2, 3):
        params = SamplingParams(temperature=HOT, seed=seed)
        tokens = generate(case, case.prompts[1], params, num_tokens=8)
        expect(
            len(set(tokens)) >= 3,
            f"seed: at temperature {HOT:g} a request gets {tokens}; each step must get new noise",
        )
        resumed = generate(case, [*case.prompts[1], *tokens[:3]], params, num_prompt=5)
        expect(
            resumed == tokens[3:4],
            f"seed: a request gets {tokens[3:4]} after {tokens[:3]}, but {resumed} if it is "
            f"resumed at this point",
        )
        sequences.append(tokens)
    expect(
        sequences[0] != sequences[1], f"seed: the seeds 1 and 2 give equal tokens, {sequences[0]}"
    )


def _check_top_k(case: SamplingSubject) -> None:
    tokens = first_tokens(case, SamplingParams(temperature=HOT, top_k=1))
    _expect_best(case, tokens, "top_k=1")
    _expect_number(first_tokens(case, SamplingParams(temperature=HOT, top_k=3)), 2, 3, "top_k=3")


def _check_top_p(case: SamplingSubject) -> None:
    tokens = first_tokens(case, SamplingParams(temperature=HOT, top_p=1e-6))
    _expect_best(case, tokens, "top_p=1e-6")
    share = 2.5 / case.info.vocab_size
    tokens = first_tokens(case, SamplingParams(temperature=HOT, top_p=share))
    _expect_number(tokens, 2, 3, f"top_p={share:.3g}")


def _check_min_p(case: SamplingSubject) -> None:
    tokens = first_tokens(case, SamplingParams(temperature=HOT, min_p=1.0))
    _expect_best(case, tokens, "min_p=1")
    tokens = first_tokens(case, SamplingParams(temperature=HOT, min_p=0.001))
    _expect_number(tokens, 3, NUM_SEEDS, "min_p=0.001")


def _check_logit_bias(case: SamplingSubject) -> None:
    best = case.alone[1][0]
    for token in other_tokens(case, 3):
        params = replace(GREEDY, logit_bias={token: 100.0, best: -100.0})
        tokens = first_tokens(case, params, num_seeds=BYSTANDER)
        expect(
            set(tokens) == {token},
            f"logit_bias={params.logit_bias} gives the tokens {sorted(set(tokens))}; expected "
            f"{token}",
        )
    (actual,) = generate(case, case.prompts[1], replace(GREEDY, logit_bias={best: -100.0}))
    expect(actual != best, f"the worker samples token {best} in spite of its logit_bias of -100")


def _check_allowed(case: SamplingSubject) -> None:
    allowed = other_tokens(case, 3)
    params = SamplingParams(temperature=HOT, allowed_token_ids=allowed)
    tokens = set(first_tokens(case, params))
    expect(
        tokens <= set(allowed) and len(tokens) > 1,
        f"allowed_token_ids={allowed} gives the tokens {sorted(tokens)}; expected several of the "
        f"allowed tokens and no other tokens",
    )
    params = replace(GREEDY, allowed_token_ids=allowed[:1])
    actual = generate(case, case.prompts[1], params, num_tokens=3)
    expect(
        actual == [allowed[0]] * 3,
        f"allowed_token_ids={allowed[:1]} gives {actual}; expected only token {allowed[0]}",
    )


def _check_bad_words(case: SamplingSubject) -> None:
    prompt, (first, second, *_) = case.prompts[1], case.alone[1]

    def given(word: tuple[int, ...], tokens: Sequence[int], num_tokens: int) -> list[int]:
        return generate(
            case, tokens, GREEDY, num_prompt=len(prompt), num_tokens=num_tokens, bad_words=(word,)
        )

    (actual,) = given((first,), prompt, 1)
    expect(actual != first, f"bad_words: the worker samples the bad word {first}")
    got_two = given((first, second), prompt, 2)
    expect(
        got_two[0] == first and got_two[1] != second,
        f"bad_words: with the bad word {[first, second]} the tokens are {got_two}; expected "
        f"{first} and a token other than {second}",
    )
    (actual,) = given((first, second), [*prompt, first], 1)
    expect(
        actual != second,
        "bad_words: a resumed request completes a bad word that began before the preemption",
    )
    (actual,) = given((prompt[-1], first), prompt, 1)
    expect(actual == first, "bad_words: a bad word must not begin with tokens of the prompt")


def _check_min_tokens(case: SamplingSubject) -> None:
    prompt, (first, second, *_) = case.prompts[1], case.alone[1]
    ends = replace(GREEDY, stop_token_ids=(first,), min_tokens=2)
    actual = generate(case, prompt, ends, num_tokens=2)
    expect(
        first not in actual,
        f"min_tokens=2: the first two tokens, {actual}, contain the stop token {first}",
    )
    resumed = replace(GREEDY, stop_token_ids=(second,), min_tokens=2)
    (after,) = generate(case, [*prompt, first], resumed, num_prompt=len(prompt))
    expect(
        after != second,
        f"min_tokens=2: a request that was resumed after one token gets the stop token {second}",
    )
    if first == second:
        return
    reached = replace(GREEDY, stop_token_ids=(second,), min_tokens=1)
    actual = generate(case, prompt, reached, num_tokens=2)
    expect(
        actual == [first, second],
        f"min_tokens=1: a request gets {actual}; expected {[first, second]}, because the second "
        f"token may be a stop token",
    )


def _check_logprobs(case: SamplingSubject) -> None:
    """Check that the result contains the requested log-probabilities of each sampled token."""
    harness, params = case.harness, replace(GREEDY, logprobs=2)
    harness.join(0, case.prompts[1])
    harness.join(1, case.prompts[3], params=params)
    for num_tokens in (5, 0):
        harness.run(0)
        harness.run(1, num_tokens)
        sampled = harness.step()
        result = harness.results[-1]
        due = {1} if 1 in sampled else set()
        expect(
            set(result.logprobs) == due,
            f"logprobs has the requests {sorted(result.logprobs)}; expected {sorted(due)}",
        )
        expect(
            not result.prompt_logprobs,
            "prompt_logprobs must be empty if no request has prompt_logprobs",
        )
    columns = result.logprobs[1]
    expect(
        list(columns.counts) == [3],
        f"logprobs=2: the column `counts` is {list(columns.counts)}; expected [3]",
    )
    expect(
        columns.token_ids[0] == columns.token_ids[1] == sampled[1],
        f"logprobs: the column `token_ids` is {list(columns.token_ids)}; expected the sampled "
        f"token "
        f"{sampled[1]}, then the most likely tokens",
    )
    expect(
        list(columns.ranks) == [1],
        f"logprobs: the column `ranks` is {list(columns.ranks)}; expected [1] for the most likely "
        "token",
    )
    values = list(columns.logprobs)
    expect(
        max(values) <= 1e-4 and values[1:] == sorted(values[1:], reverse=True),
        f"logprobs: the column `logprobs` is {values}; expected values of at most 0 in descending "
        "order",
    )


def _check_prompt_logprobs(case: SamplingSubject) -> None:
    """Check that the result contains the requested prompt log-probabilities of each chunk."""
    harness, prompt = case.harness, case.prompts[3]
    harness.join(0, case.prompts[1])
    harness.join(1, prompt, params=replace(GREEDY, prompt_logprobs=1))
    positions: list[int] = []
    for num_tokens in (5, 0):
        harness.run(0)
        harness.run(1, num_tokens)
        harness.step()
        result = harness.results[-1]
        expect(
            set(result.prompt_logprobs) == {1} and not result.logprobs,
            f"prompt_logprobs has the requests {sorted(result.prompt_logprobs)} and logprobs the "
            f"requests {sorted(result.logprobs)}; expected request 1 and none",
        )
        positions += result.prompt_logprobs[1].token_ids[::2]
    expect(
        positions == prompt[1:],
        f"prompt_logprobs has entries for the tokens {positions}; expected {prompt[1:]}",
    )


def _expect_best(case: SamplingSubject, tokens: Sequence[int], how: str) -> None:
    best = case.alone[1][0]
    expect(
        set(tokens) == {best},
        f"{how} must allow only the most likely token, {best}; the worker samples "
        f"{sorted(set(tokens))}",
    )


def _expect_number(tokens: Sequence[int], minimum: int, maximum: int, how: str) -> None:
    actual = sorted(set(tokens))
    expect(
        minimum <= len(actual) <= maximum,
        f"{how} must keep {minimum} to {maximum} tokens, because the probabilities are nearly "
        f"equal; {NUM_SEEDS} seeds give {len(actual)}: {actual}",
    )


SAMPLING_CHECKS: Mapping[str, tuple[str, Check]] = {
    "temperature": ("", _check_temperature),
    "seed": ("", _check_noise),
    "top_k": ("top_k", _check_top_k),
    "top_p": ("top_p", _check_top_p),
    "min_p": ("min_p", _check_min_p),
    "frequency_penalty and presence_penalty": ("penalties", check_frequency),
    "repetition_penalty": ("penalties", check_repetition),
    "penalties count sampled tokens": ("penalties", check_own_tokens),
    "logit_bias": ("logit_bias", _check_logit_bias),
    "allowed_token_ids": ("allowed_token_ids", _check_allowed),
    "bad_words": ("bad_words", _check_bad_words),
    "min_tokens": ("min_tokens", _check_min_tokens),
    "logprobs": ("logprobs", _check_logprobs),
    "prompt_logprobs": ("prompt_logprobs", _check_prompt_logprobs),
}
"""Map of case name to the capability that the worker must declare ("" for none) and the check."""
