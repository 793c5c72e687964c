"""Batches of constrained and unconstrained requests with random weights.

Each batch has random JSON schemas and regular expressions, half of them greedy, and two
unconstrained requests. Outputs that ended before the length limit must be valid. Outputs that the
length limit cut must be beginnings of valid outputs, according to another implementation: the
plugin `xgrammar` for JSON schemas, the `regex` package for regular expressions. An unconstrained
request must get the tokens that it gets alone.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import jsonschema
import pytest
import regex
from hypothesis import HealthCheck, given, settings, strategies

from dovetail import LLM, SamplingParams, StructuredOutputsParams
from dovetail.errors import RequestError
from dovetail.interfaces import GrammarContext, GrammarSpec
from dovetail_structured_output_xgrammar.backend import XGrammar
from end_to_end.test_constrained_outputs import LENGTH, SCHEMAS

pytest.importorskip("xgrammar")
ENGINES = {
    "depth 1": {"async_scheduling": False},
    "depth 2": {"async_scheduling": True},
    "preemption": {"async_scheduling": True, "num_gpu_blocks_override": 60},
    "two ranks": {"tensor_parallel_size": 2},
}
NUM_SCHEMAS, NUM_REGEXES, NUM_FREE = 12, 4, 2
MAX_SHARE_CUT = 0.2
PIECES = strategies.sampled_from(
    [
        "[a-f]{1,4}",
        "(x|yy|z{2})",
        r"\d{2}",
        "[^a-z\n]{1,3}",
        "(ab)*c",
        "ä?",
        "[0-9]+[.]",
        "a|b",
        "(e|f)+g",
    ]
)
REGEXES = strategies.lists(PIECES, min_size=1, max_size=4).map(
    lambda pieces: "".join(f"({piece})" for piece in pieces)
)
BATCHES = strategies.tuples(
    strategies.lists(SCHEMAS, min_size=NUM_SCHEMAS, max_size=NUM_SCHEMAS),
    strategies.lists(REGEXES, min_size=NUM_REGEXES, max_size=NUM_REGEXES),
)
FREE = SamplingParams(max_tokens=40, temperature=0.9, seed=8, ignore_eos=True)


@pytest.fixture(scope="module", params=ENGINES.values(), ids=ENGINES)
def engine(request):
    options = {"max_model_len": 256, "max_num_seqs": 24, "load_format": "dummy", "seed": 3}
    with LLM("demo", **options, **request.param) as llm:
        yield llm


@dataclass
class Counts:
    """Numbers of outputs by how they ended.

    unchecked: truncated outputs that no other implementation can check.
    """

    ended: int = 0
    cut: int = 0
    rejected: int = 0
    unchecked: int = 0


def compact(text):
    """Return JSON, or its beginning, without white space between values.

    The two plugins permit it at different positions.
    """
    strings = regex.compile(r'"(?:[^"\\]|\\.)*(?:"|\\?$)|\s+', regex.DOTALL)
    return strings.sub(lambda actual: "" if actual[0].isspace() else actual[0], text)


class Checker:
    """Checks the outputs of one engine."""

    def __init__(self, llm):
        self.llm, self.counts = llm, Counts()
        self.tokenizer = tokenizer = llm.get_tokenizer()
        self.stop_token_ids = frozenset({tokenizer.eos_token_id})
        vocab_size = llm.llm_engine.config.model.hf_config["vocab_size"]
        self.other = XGrammar(GrammarContext(tokenizer=tokenizer, vocab_size=vocab_size))
        self.alone = [llm.generate(text, FREE, use_tqdm=False)[0] for text in ("Anna", "7 + 8 =")]

    def check_batch(self, schemas, regexes):
        grammars = [{"json": schema} for schema in schemas] + [{"regex": item} for item in regexes]
        params = [
            SamplingParams(
                max_tokens=LENGTH,
                temperature=(0, 1.3)[index % 2],
                seed=index,
                structured_outputs=StructuredOutputsParams(**grammar),
            )
            for index, grammar in enumerate(grammars)
        ]
        prompts = ["Anna is seven."] * len(params) + ["Anna", "7 + 8 ="]
        outputs = self.llm.generate(prompts, [*params, FREE, FREE], use_tqdm=False)
        for grammar, output in zip(grammars, outputs, strict=False):
            self.check(grammar, output)
        for output, alone in zip(outputs[-NUM_FREE:], self.alone, strict=True):
            assert output.outputs[0].token_ids == alone.outputs[0].token_ids

    def check(self, grammar, output):
        actual = output.outputs[0]
        if actual.finish_reason == "error":
            assert "not supported" in output.error, (grammar, output.error)
            self.counts.rejected += 1
        elif actual.finish_reason == "stop":
            self.counts.ended += 1
            if "json" in grammar:
                jsonschema.validate(json.loads(actual.text), grammar["json"])
            else:
                assert regex.fullmatch(grammar["regex"], actual.text), (grammar, actual.text)
        else:
            assert actual.finish_reason == "length"
            self.counts.cut += 1
            self.check_beginning(grammar, actual)

    def check_beginning(self, grammar, actual):
        if "regex" in grammar:
            assert regex.fullmatch(grammar["regex"], actual.text, partial=True), (
                grammar,
                actual.text,
            )
            return
        text = json.dumps(grammar["json"])
        spec = GrammarSpec(form="json_schema", text=text, stop_token_ids=self.stop_token_ids)
        try:
            matcher = self.other.compile(spec)
        except RequestError:
            self.counts.unchecked += 1
            return
        tokens = self.tokenizer.encode(
            compact(actual.text.rstrip("\ufffd")), add_special_tokens=False
        )
        assert matcher.accept(tokens) == len(tokens), (grammar, actual.text)


def check(llm, num_batches):
    checker = Checker(llm)

    @settings(
        max_examples=num_batches, deadline=None, database=None, derandomize=True,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(batch=BATCHES)
    def run(batch):
        checker.check_batch(*batch)

    run()
    counts = checker.counts
    assert counts.cut <= MAX_SHARE_CUT * (counts.ended + counts.cut), counts
    assert counts.rejected <= counts.ended / 10 and counts.unchecked <= counts.cut / 2 + 1, counts
    return counts


@pytest.mark.costly
def test_constrained_outputs_are_valid_and_unconstrained_requests_do_not_change(engine):
    check(engine, 3)


@pytest.mark.soak
def test_a_thousand_schemas_and_two_hundred_regexes_have_valid_outputs(engine):
    counts = check(engine, 84)
    assert counts.ended + counts.cut + counts.rejected >= 84 * (NUM_SCHEMAS + NUM_REGEXES)
