"""The sampling cases of the worker suite, for each field of `SamplingParams` of workers.

The worker's logits are not known, so each case uses settings with the same result for every correct
worker: at temperature 100 draws are nearly uniform, and a truncation to one token, a ban or a large
bias determines the token. Fields that belong to a capability are checked if the worker declares it;
the engine refuses requests with the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from dovetail.sampling_params import SamplingParams
from dovetail_devkit.expectation import NotHere, expect
from dovetail_devkit.worker.draws import (
    BYSTANDER,
    COLD,
    HOT,
    NUM_SEEDS,
    Asked,
    first_tokens,
    generate,
    other_tokens,
)
from dovetail_devkit.worker.penalties import check_frequency, check_own_tokens, check_repetition
from dovetail_devkit.worker.rig import GREEDY

LEAST_VOCABULARY = 32

Check = Callable[[Asked], None]


def check_sampling(check: Check, capability: str, case: Asked) -> None:
    """Run one check; then check that no row keeps its parameters.

    capability: raise NotHere unless the worker declares it; "" for fields of every worker.
    """
    if capability and capability not in case.rig.worker.provides:
        raise NotHere(
            f"the worker does not declare {capability!r}, so the engine refuses such requests"
        )
    if case.info.vocab_size < LEAST_VOCABULARY:
        raise NotHere(f"a vocabulary of {case.info.vocab_size} tokens is too small for this check")
    check(case)
    case.rig.clear()
    for row in range(BYSTANDER):
        case.rig.join(row, case.prompts[1])
        got = case.rig.generate(row, 2)
        expect(
            got == case.alone[1][:2],
            f"row {row} keeps sampling parameters of the previous request: a greedy request gives "
            f"{got}; expected {case.alone[1][:2]}",
        )
        case.rig.leave(row)


def _check_temperature(case: Asked) -> None:
    found = first_tokens(case, SamplingParams(temperature=HOT))
    expect(
        len(set(found)) >= 3,
        f"temperature: at {HOT:g}, {NUM_SEEDS} seeds give the tokens {sorted(set(found))} only; "
        "temperature or seed is ignored",
    )
    found = first_tokens(case, SamplingParams(temperature=COLD))
    _expect_best(case, found, f"temperature: at {COLD:g}")


def _check_noise(case: Asked) -> None:
    """Check that each step of a seeded request draws anew, and the same after a resume."""
    sequences = []
    for seed in (1, 2, 3):
        params = SamplingParams(temperature=HOT, seed=seed)
        tokens = generate(case, case.prompts[1], params, num_tokens=8)
        expect(
            len(set(tokens)) >= 3,
            f"seed: a request at temperature {HOT:g} gives {tokens}; each step must draw new noise",
        )
        resumed = generate(case, [*case.prompts[1], *tokens[:3]], params, num_prompt=5)
        expect(
            resumed == tokens[3:4],
            f"seed: after {tokens[:3]} the request gives {tokens[3:4]}, but {resumed} when it is "
            "resumed there",
        )
        sequences.append(tokens)
    expect(sequences[0] != sequences[1], f"seed: seeds 1 and 2 both give {sequences[0]}")


def _check_top_k(case: Asked) -> None:
    found = first_tokens(case, SamplingParams(temperature=HOT, top_k=1))
    _expect_best(case, found, "top_k=1")
    _expect_number(first_tokens(case, SamplingParams(temperature=HOT, top_k=3)), 2, 3, "top_k=3")


def _check_top_p(case: Asked) -> None:
    found = first_tokens(case, SamplingParams(temperature=HOT, top_p=1e-6))
    _expect_best(case, found, "top_p=1e-6")
    share = 2.5 / case.info.vocab_size
    found = first_tokens(case, SamplingParams(temperature=HOT, top_p=share))
    _expect_number(found, 2, 3, f"top_p={share:.3g} of nearly equal probabilities")


def _check_min_p(case: Asked) -> None:
    found = first_tokens(case, SamplingParams(temperature=HOT, min_p=1.0))
    _expect_best(case, found, "min_p=1")
    found = first_tokens(case, SamplingParams(temperature=HOT, min_p=0.001))
    _expect_number(found, 3, NUM_SEEDS, "min_p=0.001 of nearly equal probabilities")


def _check_logit_bias(case: Asked) -> None:
    best = case.alone[1][0]
    for token in other_tokens(case, 3):
        params = replace(GREEDY, logit_bias={token: 100.0, best: -100.0})
        found = first_tokens(case, params, num_seeds=BYSTANDER)
        expect(
            set(found) == {token},
            f"logit_bias={params.logit_bias} gives {sorted(set(found))}; expected {token}",
        )
    (got,) = generate(case, case.prompts[1], replace(GREEDY, logit_bias={best: -100.0}))
    expect(got != best, f"logit_bias of -100 does not prevent token {best}")


def _check_allowed(case: Asked) -> None:
    allowed = other_tokens(case, 3)
    params = SamplingParams(temperature=HOT, allowed_token_ids=allowed)
    found = set(first_tokens(case, params))
    expect(
        found <= set(allowed) and len(found) > 1,
        f"allowed_token_ids={allowed} gives {sorted(found)}",
    )
    params = replace(GREEDY, allowed_token_ids=allowed[:1])
    got = generate(case, case.prompts[1], params, num_tokens=3)
    expect(got == [allowed[0]] * 3, f"allowed_token_ids={allowed[:1]} gives {got}")


def _check_bad_words(case: Asked) -> None:
    prompt, (first, second, *_) = case.prompts[1], case.alone[1]

    def given(word: tuple[int, ...], tokens: Sequence[int], num_tokens: int) -> list[int]:
        return generate(
            case, tokens, GREEDY, num_prompt=len(prompt), num_tokens=num_tokens, bad_words=(word,)
        )

    (got,) = given((first,), prompt, 1)
    expect(got != first, f"bad_words: the bad word {first} was generated")
    got_two = given((first, second), prompt, 2)
    expect(
        got_two[0] == first and got_two[1] != second,
        f"bad_words: with the bad word {first}, {second} the tokens are {got_two}; expected "
        f"{first} and a token other than {second}",
    )
    (got,) = given((first, second), [*prompt, first], 1)
    expect(
        got != second, "bad_words: a word that started before the request was resumed was completed"
    )
    (got,) = given((prompt[-1], first), prompt, 1)
    expect(
        got == first, "bad_words: tokens of the prompt count for a bad word; only output must count"
    )


def _check_min_tokens(case: Asked) -> None:
    prompt, (first, second, *_) = case.prompts[1], case.alone[1]
    ends = replace(GREEDY, stop_token_ids=(first,), min_tokens=2)
    got = generate(case, prompt, ends, num_tokens=2)
    expect(first not in got, f"min_tokens=2: the tokens {got} contain the stop token {first}")
    resumed = replace(GREEDY, stop_token_ids=(second,), min_tokens=2)
    (after,) = generate(case, [*prompt, first], resumed, num_prompt=len(prompt))
    expect(
        after != second, f"min_tokens=2: resumed after a token, the stop token {second} was sampled"
    )
    if first == second:
        return
    reached = replace(GREEDY, stop_token_ids=(second,), min_tokens=1)
    got = generate(case, prompt, reached, num_tokens=2)
    expect(
        got == [first, second],
        f"min_tokens=1: got {got}; expected {[first, second]}, as a stop token may come second",
    )


def _check_logprobs(case: Asked) -> None:
    """Check that requested log-probabilities come with each sampled token."""
    rig, params = case.rig, replace(GREEDY, logprobs=2)
    rig.join(0, case.prompts[1])
    rig.join(1, case.prompts[3], params=params)
    for num_tokens in (5, 0):
        rig.run(0)
        rig.run(1, num_tokens)
        sampled = rig.step()
        result = rig.results[-1]
        due = {1} if 1 in sampled else set()
        expect(
            set(result.logprobs) == due,
            f"logprobs has runs {sorted(result.logprobs)}; expected {sorted(due)}",
        )
        expect(not result.prompt_logprobs, "prompt_logprobs were returned but not requested")
    columns = result.logprobs[1]
    expect(
        list(columns.counts) == [3], f"logprobs=2: counts is {list(columns.counts)}; expected [3]"
    )
    expect(
        columns.token_ids[0] == columns.token_ids[1] == sampled[1],
        f"logprobs: the entries are {list(columns.token_ids)}; the sampled token {sampled[1]} "
        "must come first, then the best tokens",
    )
    expect(list(columns.ranks) == [1], f"logprobs: the best token has rank {list(columns.ranks)}")
    values = list(columns.logprobs)
    expect(
        max(values) <= 1e-4 and values[1:] == sorted(values[1:], reverse=True),
        f"logprobs: {values} are not log-probabilities in descending order",
    )


def _check_prompt_logprobs(case: Asked) -> None:
    """Check that requested prompt log-probabilities come with each chunk of a prompt."""
    rig, prompt = case.rig, case.prompts[3]
    rig.join(0, case.prompts[1])
    rig.join(1, prompt, params=replace(GREEDY, prompt_logprobs=1))
    positions: list[int] = []
    for num_tokens in (5, 0):
        rig.run(0)
        rig.run(1, num_tokens)
        rig.step()
        result = rig.results[-1]
        expect(
            set(result.prompt_logprobs) == {1} and not result.logprobs,
            f"prompt_logprobs has runs {sorted(result.prompt_logprobs)}; expected run 1 only",
        )
        positions += result.prompt_logprobs[1].token_ids[::2]
    expect(
        positions == prompt[1:],
        f"prompt_logprobs has tokens {positions}; expected {prompt[1:]}",
    )


def _expect_best(case: Asked, found: Sequence[int], how: str) -> None:
    best = case.alone[1][0]
    expect(
        set(found) == {best},
        f"{how} keeps only the best token, {best}, but {sorted(set(found))} was sampled",
    )


def _expect_number(found: Sequence[int], least: int, most: int, how: str) -> None:
    got = sorted(set(found))
    expect(
        least <= len(got) <= most,
        f"{how} keeps {least} to {most} tokens; {NUM_SEEDS} seeds gave {len(got)}: {got}",
    )


SAMPLING_CHECKS: Mapping[str, tuple[str, Check]] = {
    "temperature": ("", _check_temperature),
    "seed: noise of each step": ("", _check_noise),
    "top_k": ("top_k", _check_top_k),
    "top_p": ("top_p", _check_top_p),
    "min_p": ("min_p", _check_min_p),
    "frequency_penalty, presence_penalty": ("penalties", check_frequency),
    "repetition_penalty": ("penalties", check_repetition),
    "penalties of sampled tokens": ("penalties", check_own_tokens),
    "logit_bias": ("logit_bias", _check_logit_bias),
    "allowed_token_ids": ("allowed_token_ids", _check_allowed),
    "bad_words": ("bad_words", _check_bad_words),
    "min_tokens": ("min_tokens", _check_min_tokens),
    "logprobs": ("logprobs", _check_logprobs),
    "prompt_logprobs": ("prompt_logprobs", _check_prompt_logprobs),
}
"""Case name to the capability that it needs and its check."""
