"""What a scheduler owes that keeps prefixes: full blocks are found again, the oldest go first.

Each check is given a function that makes a referee of a scheduler, of so many blocks of four
tokens. Depends on no scheduler; one that never finds anything is not one that keeps prefixes.
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
"""Three full blocks and one token more: it finds 12 tokens of its like."""

MakeReferee = Callable[[int], Referee]


def keeps_prefixes(make: MakeReferee) -> bool:
    """Return whether the second of two equal prompts finds anything."""
    ask = _Asker(make(MANY_BLOCKS))
    ask(PROMPT)
    return ask(PROMPT) > 0


class _Asker:
    """Runs one request after the other, each to its end, and says what it found."""

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
        (PROMPT[:12], 8),  # one token is always left to compute
        (PROMPT[:9], 8),
        (PROMPT[:8] + (99,) * 5, 8),
        ((99, *PROMPT[1:]), 0),
        (PROMPT[:4], 0),
    ):
        got = ask([token % 31 for token in prompt])
        expect(got == due, f"prompt {prompt}: {got} tokens are from the cache; {due} are due")
    expect(ask(PROMPT, cache_salt="tenant") == 0, "another salt finds what is not its own")
    expect(ask(PROMPT, cache_salt="tenant") == 12, "the same salt finds nothing")
    got = ask(PROMPT, prompt_logprobs=1)
    expect(got == 0, f"{got} tokens are cached of a prompt whose log-probabilities are asked")
    stats = ask.referee.last_stats
    if stats is not None:
        found = sum(ask.referee.num_cached.values())
        expect(
            stats.prefix_hits == found,
            f"the statistics say prefix_hits={stats.prefix_hits}; {found} tokens were found",
        )


def _check_output_found(make: MakeReferee) -> None:
    """What was generated is found, too, but for the last token, which was never computed."""
    ask = _Asker(make(MANY_BLOCKS))
    name = ask.add(PROMPT, max_tokens=8)
    output = ask.referee.alive[name].due
    ask.referee.drain()
    text = [*PROMPT, *output]
    due = (len(text) - 1) // BLOCK_SIZE * BLOCK_SIZE
    got = ask([*text, 5])
    expect(got == due, f"{got} tokens of prompt and output are cached; {due} are due")


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
        raise NotHere("the policy admits nobody while another runs")
    expect(referee.num_cached[second] == 12, "a prompt that was computed is not found at once")
    for _ in range(5):
        referee.schedule()
        referee.settle()
    third = ask.add(text[:19], max_tokens=1)
    referee.schedule()
    referee.settle()
    got = referee.num_cached[third]
    expect(got == 16, f"{got} tokens of what another has computed are found while it runs")
    referee.drain()


def _check_reset(make: MakeReferee) -> None:
    ask = _Asker(make(MANY_BLOCKS))
    ask(PROMPT)
    ask.add(PROMPT)
    ask.referee.schedule()
    expect(not ask.referee.scheduler.reset_prefix_cache(), "reset while blocks are in use")
    ask.referee.settle()
    ask.referee.drain()
    expect(ask(PROMPT) == 12, "a reset that was refused has changed something")
    ask.referee.reset()
    expect(ask(PROMPT) == 0, "a prefix is found after a reset")
    expect(ask(PROMPT) == 12, "nothing is kept after a reset")


def _check_eviction(make: MakeReferee) -> None:
    """The longest unused goes first, and of one prompt the end before the beginning.

    How much a new prompt evicts depends on which blocks without content a scheduler takes first, so
    that several lengths are tried.
    """
    prompts = [[5 * n + k % 5 for k in range(13)] for n in range(3)]
    left = []
    for length in (9, 13, 17, 21):
        ask = _Asker(make(15))
        for prompt in prompts:
            ask(prompt)
        expect(ask(prompts[0]) == 12, "a prompt is gone though there was room for all")
        ask([20 + k % 5 for k in range(length)])
        recent, left_of_oldest = ask(prompts[0]), ask(prompts[1])
        expect(
            recent == 12 or not left_of_oldest,
            f"{recent} tokens are left of the prompt that was used last, {left_of_oldest} of the "
            "one that was unused for longest",
        )
        left.append(left_of_oldest)
    expect(
        any(0 < tokens < 12 for tokens in left),
        f"{left} tokens are left of the prompt that was unused for longest, after ever longer ones",
    )


PREFIX_CHECKS: Mapping[str, Callable[[MakeReferee], None]] = {
    "prefixes found again": _check_found_again,
    "output found again": _check_output_found,
    "prefixes found while they run": _check_found_while_running,
    "a reset of the prefix cache": _check_reset,
    "eviction of prefixes": _check_eviction,
}


def check_prefixes(
    check: Callable[[MakeReferee], None], make: MakeReferee, *, are_due: bool
) -> None:
    """Run one check; raise NotHere if the scheduler keeps no prefixes and need not.

    are_due: whether it is known to keep them.
    """
    if not are_due and not keeps_prefixes(make):
        raise NotHere("it keeps no prefixes")
    check(make)
