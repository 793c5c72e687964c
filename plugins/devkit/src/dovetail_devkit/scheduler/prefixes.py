"""Checks of prefix caching: full blocks are found again, the oldest are evicted first.

Each check gets a function that makes a referee of a scheduler with a number of blocks of four
tokens. Depends on no scheduler. A scheduler that never finds a prefix counts as one without prefix
caching.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence

from dovetail.request import EngineCoreRequest
from dovetail.sampling_params import SamplingParams
from dovetail_devkit.expectation import NotHere, expect
from dovetail_devkit.scheduler.program import Referee

BLOCK_SIZE = 4
MANY_BLOCKS = 33
PROMPT = tuple(range(1, 14))
"""Three full blocks and one more token: 12 tokens are found in the cache."""

MakeReferee = Callable[[int], Referee]


def keeps_prefixes(make: MakeReferee) -> bool:
    """Return whether the second of two equal prompts has a cache hit."""
    ask = _Asker(make(MANY_BLOCKS))
    ask(PROMPT)
    return ask(PROMPT) > 0


class _Asker:
    """Runs requests to their end, one after the other, and returns their cache hits."""

    def __init__(self, referee: Referee) -> None:
        self.referee = referee
        self.num_asked = 0

    def __call__(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int = 3,
        cache_salt: str = "",
        prompt_logprobs: int | None = None,
    ) -> int:
        """Return how many tokens of the prompt came from the cache."""
        name = self.add(prompt, max_tokens, cache_salt, prompt_logprobs)
        self.referee.drain()
        return self.referee.num_cached[name]

    def add(
        self,
        prompt: Sequence[int],
        max_tokens: int = 3,
        cache_salt: str = "",
        prompt_logprobs: int | None = None,
    ) -> str:
        """Add a request and return its name."""
        name = f"r{self.num_asked}"
        self.num_asked += 1
        params = SamplingParams(max_tokens=max_tokens, prompt_logprobs=prompt_logprobs)
        self.referee.add(
            EngineCoreRequest(
                request_id=name,
                prompt_token_ids=array("i", prompt),
                sampling_params=params,
                max_tokens=max_tokens,
                cache_salt=cache_salt,
            )
        )
        return name


def _check_found_again(make: MakeReferee) -> None:
    ask = _Asker(make(MANY_BLOCKS))
    for prompt, due in (
        (PROMPT, 0),
        (PROMPT, 12),
        (PROMPT[:12], 8),  # one token must always be computed
        (PROMPT[:9], 8),
        (PROMPT[:8] + (99,) * 5, 8),
        ((99, *PROMPT[1:]), 0),
        (PROMPT[:4], 0),
    ):
        got = ask([token % 31 for token in prompt])
        expect(got == due, f"prompt {prompt}: {got} tokens are from the cache; expected {due}")
    expect(ask(PROMPT, cache_salt="tenant") == 0, "a prefix of another salt is found")
    expect(ask(PROMPT, cache_salt="tenant") == 12, "a prefix of the same salt is not found")
    got = ask(PROMPT, prompt_logprobs=1)
    expect(got == 0, f"{got} tokens are cached of a prompt with prompt log-probabilities")
    stats = ask.referee.last_stats
    if stats is not None:
        found = sum(ask.referee.num_cached.values())
        expect(
            stats.prefix_hits == found,
            f"the statistics have prefix_hits={stats.prefix_hits}; expected {found}",
        )


def _check_output_found(make: MakeReferee) -> None:
    """Check that generated tokens are found, except the last one, which was never computed."""
    ask = _Asker(make(MANY_BLOCKS))
    name = ask.add(PROMPT, max_tokens=8)
    output = ask.referee.alive[name].due
    ask.referee.drain()
    text = [*PROMPT, *output]
    due = (len(text) - 1) // BLOCK_SIZE * BLOCK_SIZE
    got = ask([*text, 5])
    expect(got == due, f"{got} tokens of prompt and output are cached; expected {due}")


def _check_found_while_running(make: MakeReferee) -> None:
    ask = _Asker(make(MANY_BLOCKS))
    referee = ask.referee
    first = ask.add(PROMPT, max_tokens=12)
    text = [*PROMPT, *referee.alive[first].due]
    referee.schedule()
    second = ask.add(PROMPT, max_tokens=1)
    referee.schedule()
    referee.settle()
    referee.settle()
    if not referee.conserves_work and second not in referee.num_cached:
        raise NotHere("the policy admits no request while another runs")
    expect(
        referee.num_cached[second] == 12, "a computed prompt is not found while its request runs"
    )
    for _ in range(5):
        referee.schedule()
        referee.settle()
    third = ask.add(text[:19], max_tokens=1)
    referee.schedule()
    referee.settle()
    got = referee.num_cached[third]
    expect(got == 16, f"{got} tokens of a running request's prompt are found")
    referee.drain()


def _check_reset(make: MakeReferee) -> None:
    ask = _Asker(make(MANY_BLOCKS))
    ask(PROMPT)
    ask.add(PROMPT)
    ask.referee.schedule()
    expect(
        not ask.referee.scheduler.reset_prefix_cache(),
        "reset_prefix_cache must return False while blocks are in use",
    )
    ask.referee.settle()
    ask.referee.drain()
    expect(ask(PROMPT) == 12, "a refused reset changed the cache")
    ask.referee.reset()
    expect(ask(PROMPT) == 0, "a prefix is found after a reset")
    expect(ask(PROMPT) == 12, "no prefix is cached after a reset")


def _check_eviction(make: MakeReferee) -> None:
    """Check that the least recently used prefix is evicted first, from its end.

    How much a new prompt evicts depends on which empty blocks a scheduler uses first, so several
    lengths are tried.
    """
    prompts = [[5 * n + k % 5 for k in range(13)] for n in range(3)]
    left = []
    for length in (9, 13, 17, 21):
        ask = _Asker(make(15))
        for prompt in prompts:
            ask(prompt)
        expect(ask(prompts[0]) == 12, "a prompt was evicted although there was room for all")
        ask([20 + k % 5 for k in range(length)])
        recent, left_of_oldest = ask(prompts[0]), ask(prompts[1])
        expect(
            recent == 12 or not left_of_oldest,
            f"{recent} tokens are left of the most recent prompt, {left_of_oldest} of the "
            "least recent one",
        )
        left.append(left_of_oldest)
    expect(
        any(0 < tokens < 12 for tokens in left),
        f"{left} tokens are left of the least recent prompt after longer and longer ones",
    )


PREFIX_CHECKS: Mapping[str, Callable[[MakeReferee], None]] = {
    "cached prompts": _check_found_again,
    "cached output": _check_output_found,
    "cached prompts of running requests": _check_found_while_running,
    "a reset of the prefix cache": _check_reset,
    "eviction of prefixes": _check_eviction,
}


def check_prefixes(
    check: Callable[[MakeReferee], None], make: MakeReferee, *, are_due: bool
) -> None:
    """Run one check; raise NotHere if the scheduler has no prefix cache and need not have one.

    are_due: whether prefix caching is required.
    """
    if not are_due and not keeps_prefixes(make):
        raise NotHere("the scheduler has no prefix cache")
    check(make)
