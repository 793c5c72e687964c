"""Random plans for model runners of `runner_harness`.

Requests start, run in chunks, wait and end. Some requests start with computed tokens and shared
blocks. The requests use every sampling field. The plans do not depend on tokens, so several runners
can execute them, at any pipeline depth.
"""

from array import array
from random import Random

from dovetail.interfaces import GrammarOutput
from dovetail.plan import NewRequest, StepBuilder
from dovetail.result import ModelRunnerOutput
from dovetail.sampling_params import SamplingParams
from dovetail_devkit.harnesses.runner_harness import MAX_LEN, SIZE, V

NUM_BLOCKS = 60
SAMPLING_PARAMS = [
    {"temperature": 0},
    {"temperature": 0, "logprobs": 2, "prompt_logprobs": 1},
    {"temperature": 1.0, "logprobs": 0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.8, "prompt_logprobs": 0},
    {"temperature": 1.0, "min_p": 0.1, "top_k": 9, "top_p": 0.9},
    {"temperature": 0, "repetition_penalty": 1.4, "presence_penalty": 0.5, "logprobs": 3},
    {"temperature": 1.0, "frequency_penalty": 0.8},
    {"temperature": 0, "allowed_token_ids": [2, 3, 5, 7, 11], "logit_bias": {5: 3.0}},
    {"temperature": 0, "min_tokens": 3},
    {"temperature": 1.0, "bad_words": True},
]


class Row:
    """A running request, with the counts and blocks that a scheduler tracks."""

    def __init__(self, tokens, blocks):
        self.tokens, self.blocks = tokens, blocks
        self.known, self.computed = len(tokens), 0


class Program:
    """Creates the plans of a random program."""

    def __init__(self, seed, num_steps):
        self.rng, self.builder = Random(seed), StepBuilder()
        self.rows, self.generations, self.free = {}, [0, 0, 0], list(range(1, NUM_BLOCKS))
        self.rng.shuffle(self.free)
        self.steps = [self.step() for _ in range(num_steps)]

    def step(self):
        rng = self.rng
        for row, state in list(self.rows.items()):
            if rng.random() < 0.12 or state.known >= MAX_LEN - 1:
                self.builder.leave(row)
                del self.rows[row]
                held = {block for other in self.rows.values() for block in other.blocks}
                self.free = [b for b in range(1, NUM_BLOCKS) if b not in held]
                rng.shuffle(self.free)
        for row in range(3):
            if row not in self.rows and rng.random() < 0.7:
                self.join(row)
        rows = [row for row in self.rows if rng.random() < 0.85]
        rng.shuffle(rows)
        self.num_left = 32
        runs = [self.run(row) for row in rows if self.num_left]
        grammar = None
        if runs and rng.random() < 0.15:
            allowed = sum(1 << token for token in rng.sample(range(V), 4))
            index = rng.randrange(len(runs))
            grammar = GrammarOutput(runs=(index,), bitmask=allowed.to_bytes(4, "little"))
        return self.builder.build(), grammar, sum(runs)

    def join(self, row):
        rng = self.rng
        tokens = [rng.randrange(V) for _ in range(rng.randrange(1, 12))]
        others = [item for item in self.rows.values() if item.computed > SIZE]
        state = Row(tokens, [])
        if others and rng.random() < 0.5:  # the request shares the first block of another request
            state.tokens[:] = others[0].tokens[:SIZE] + tokens
            if len(others[0].tokens) >= SIZE:
                state.blocks, state.computed = [others[0].blocks[0]], SIZE
        state.known = len(state.tokens)
        self.rows[row] = state
        self.generations[row] += 1
        params = dict(rng.choice(SAMPLING_PARAMS))
        self.builder.join(
            NewRequest(
                request_id=f"{row}-{self.generations[row]}",
                row=row,
                generation=self.generations[row],
                token_ids=array("i", state.tokens),
                num_prompt_tokens=rng.randrange(1, state.known + 1),
                sampling_params=SamplingParams(
                    max_tokens=20, **{k: v for k, v in params.items() if k != "bad_words"}
                ),
                stop_token_ids=frozenset({1, 2}) if "min_tokens" in params else frozenset(),
                bad_words_token_ids=((3,), (4, 5), (6, 7, 8)) if "bad_words" in params else (),
                seed=rng.randrange(1 << 64),
            )
        )
        self.builder.grow(row, state.blocks)

    def run(self, row):
        state = self.rows[row]
        count = self.rng.randrange(1, state.known - state.computed + 1)
        count = state.known - state.computed if self.rng.random() < 0.6 else count
        count = min(count, self.num_left)
        self.num_left -= count
        end = state.computed + count
        while len(state.blocks) * SIZE < end:
            block = self.free.pop()
            state.blocks.append(block)
            self.builder.grow(row, [block])
        samples = end == state.known
        self.builder.run(row, state.computed, count, samples=samples)
        state.computed, state.known = end, state.known + samples
        return samples


def play(runner, program, depth=1):
    """Return the results of all plans, with `depth` steps in flight."""
    results, out = [], []
    for plan, grammar, _ in program.steps:
        runner.execute_model(plan)
        out.append(runner.sample_tokens(grammar))
        if len(out) == depth:
            results.append(taken(out.pop(0)))
    return results + [taken(item) for item in out]


def taken(output):
    return output if isinstance(output, ModelRunnerOutput) else output.result()
