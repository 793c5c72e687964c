"""Checks of prefix caching: full blocks are found again, and the oldest blocks are evicted first.

Each check receives a function that returns a `SchedulerDriver` for a number of blocks. Blocks have
four tokens. A scheduler that never has a cache hit counts as a scheduler without prefix caching.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence

from dovetail.request import EngineCoreRequest
from dovetail.sampling_params import SamplingParams
from dovetail_devkit.expectation import SkipCase, expect
from dovetail_devkit.scheduler.program import SchedulerDriver

BLOCK_SIZE = 4
MANY_BLOCKS = 33
PROMPT = tuple(range(1, 14))
"""A prompt of three full blocks and one more token, so a cache hit has 12 tokens."""

MakeDriver = Callable[[int], SchedulerDriver]


def keeps_prefixes(make: MakeDriver) -> bool:
    """Return whether the second of two equal prompts has a cache hit."""
    runner = _PromptRunner(make(MANY_BLOCKS))
    runner(PROMPT)
    return runner(PROMPT) > 0


class _PromptRunner:
    """Runs requests one by one, and returns the size of each cache hit."""

    def __init__(self, driver: SchedulerDriver) -> None:
        self.driver = driver
        self.num_requested = 0

    def __call__(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int = 3,
        cache_salt: str = "",
        prompt_logprobs: int | None = None,
    ) -> int:
        """Run a request to its end and return how many prompt tokens came from the cache."""
        name = self.add(prompt, max_tokens, cache_salt, prompt_logprobs)
        self.driver.drain()
        return self.driver.num_cached[name]

    def add(
        self,
        prompt: Sequence[int],
        max_tokens: int = 3,
        cache_salt: str = "",
        prompt_logprobs: int | None = None,
    ) -> str:
        """Add a request and return its id."""
        name = f"r{self.num_requested}"
        self.num_requested += 1
        params = SamplingParams(max_tokens=max_tokens, prompt_logprobs=prompt_logprobs)
        self.driver.add(
            EngineCoreRequest(
                request_id=name,
                prompt_token_ids=array("i", prompt),
                sampling_params=params,
                max_tokens=max_tokens,
                cache_salt=cache_salt,
            )
        )
        return name


def _check_found_again(make: MakeDriver) -> None:
    runner = _PromptRunner(make(MANY_BLOCKS))
    for prompt, due in (
        (PROMPT, 0),
        (PROMPT, 12),
        (PROMPT[:12], 8),  # the last token of a prompt is always computed
        (PROMPT[:9], 8),
        (PROMPT[:8] + (99,) * 5, 8),
        ((99, *PROMPT[1:]), 0),
        (PROMPT[:4], 0),
    ):
        actual = runner([token % 31 for token in prompt])
        expect(
            actual == due,
            f"the cache hit of the prompt {prompt} has {actual} tokens; expected {due}",
        )
    expect(
        runner(PROMPT, cache_salt="tenant") == 0,
        "a request must not have a cache hit on blocks with a different salt",
    )
    expect(
        runner(PROMPT, cache_salt="tenant") == 12,
        "a request must have a cache hit on blocks with the same salt",
    )
    actual = runner(PROMPT, prompt_logprobs=1)
    expect(
        actual == 0,
        f"a request with prompt_logprobs has a cache hit of {actual} tokens; expected 0",
    )
    stats = runner.driver.last_stats
    if stats is not None:
        num_cached = sum(runner.driver.num_cached.values())
        expect(
            stats.prefix_hits == num_cached,
            f"the statistics have prefix_hits={stats.prefix_hits}; requests have {num_cached} "
            "cached tokens in total",
        )


def _check_output_found(make: MakeDriver) -> None:
    """Check that generated tokens are cached, except the last token, which is not computed."""
    runner = _PromptRunner(make(MANY_BLOCKS))
    name = runner.add(PROMPT, max_tokens=8)
    output = runner.driver.alive[name].due
    runner.driver.drain()
    text = [*PROMPT, *output]
    due = (len(text) - 1) // BLOCK_SIZE * BLOCK_SIZE
    actual = runner([*text, 5])
    expect(
        actual == due,
        f"the cache hit on the prompt and output of a request has {actual} tokens; expected {due}",
    )


def _check_found_while_running(make: MakeDriver) -> None:
    runner = _PromptRunner(make(MANY_BLOCKS))
    driver = runner.driver
    first = runner.add(PROMPT, max_tokens=12)
    text = [*PROMPT, *driver.alive[first].due]
    driver.schedule()
    second = runner.add(PROMPT, max_tokens=1)
    driver.schedule()
    driver.settle()
    driver.settle()
    if not driver.conserves_work and second not in driver.num_cached:
        raise SkipCase("the policy does not admit a request while another request runs")
    actual = driver.num_cached[second]
    expect(
        actual == 12,
        f"the cache hit on the prompt of a running request has {actual} tokens; expected 12",
    )
    for _ in range(5):
        driver.schedule()
        driver.settle()
    third = runner.add(text[:19], max_tokens=1)
    driver.schedule()
    driver.settle()
    actual = driver.num_cached[third]
    expect(
        actual == 16,
        f"the cache hit on the prompt and output of a running request has {actual} tokens; "
        "expected "
        "16",
    )
    driver.drain()


def _check_reset(make: MakeDriver) -> None:
    runner = _PromptRunner(make(MANY_BLOCKS))
    runner(PROMPT)
    runner.add(PROMPT)
    runner.driver.schedule()
    expect(
        not runner.driver.scheduler.reset_prefix_cache(),
        "reset_prefix_cache must return False while blocks are in use",
    )
    runner.driver.settle()
    runner.driver.drain()
    expect(
        runner(PROMPT) == 12, "reset_prefix_cache must not change the cache when it returns False"
    )
    runner.driver.reset()
    expect(runner(PROMPT) == 0, "there must be no cache hit after reset_prefix_cache returned True")
    expect(runner(PROMPT) == 12, "prompts must be cached again after a reset of the prefix cache")


def _check_eviction(make: MakeDriver) -> None:
    """Check that the least recently used prefix is evicted first, and its last block first.

    The check uses new prompts of several lengths, since a scheduler may use empty blocks first.
    """
    prompts = [[5 * n + k % 5 for k in range(13)] for n in range(3)]
    left = []
    for length in (9, 13, 17, 21):
        runner = _PromptRunner(make(15))
        for prompt in prompts:
            runner(prompt)
        expect(
            runner(prompts[0]) == 12,
            "a cached prompt was evicted, although there were empty blocks",
        )
        runner([20 + k % 5 for k in range(length)])
        recent, left_of_oldest = runner(prompts[0]), runner(prompts[1])
        expect(
            recent == 12 or not left_of_oldest,
            f"{recent} tokens of the most recent prompt and {left_of_oldest} of the least recent "
            "prompt are cached; the least recent prompt must be evicted first",
        )
        left.append(left_of_oldest)
    expect(
        any(0 < tokens < 12 for tokens in left),
        f"{left} tokens of the least recent prompt are cached after new prompts of 9, 13, 17 and "
        "21 tokens; its last block must be evicted first, then the block before it",
    )


PREFIX_CHECKS: Mapping[str, Callable[[MakeDriver], None]] = {
    "cached prompts": _check_found_again,
    "cached output": _check_output_found,
    "cached running prompts": _check_found_while_running,
    "prefix cache reset": _check_reset,
    "prefix eviction": _check_eviction,
}


def check_prefixes(check: Callable[[MakeDriver], None], make: MakeDriver, *, are_due: bool) -> None:
    """Run one check. Raise SkipCase if the scheduler has no prefix cache, which may be optional.

    are_due: whether prefix caching is required.
    """
    if not are_due and not keeps_prefixes(make):
        raise SkipCase("the scheduler does not cache prefixes, which is optional")
    check(make)
