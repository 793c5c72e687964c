"""Structured output with the plugin that is selected automatically, through `LLM`."""

from __future__ import annotations

import json
import re

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings, strategies
from pydantic import BaseModel

from dovetail import LLM, ReasoningParams, SamplingParams, StructuredOutputsParams

PLACES = {
    "depth 1": {"async_scheduling": False},
    "depth 2": {"async_scheduling": True},
    "engine process": {"engine_process": True},
}
PROMPT = "Anna is seven years old."
LENGTH = 120


class Person(BaseModel):
    name: str
    age: int


@pytest.fixture(scope="module", params=PLACES.values(), ids=PLACES)
def engine(request):
    with LLM("demo", max_model_len=256, max_num_seqs=8, **request.param) as llm:
        yield llm


@pytest.fixture(scope="module")
def one_engine():
    with LLM("demo", max_model_len=256, max_num_seqs=8) as llm:
        yield llm


def params(**grammar):
    expected = StructuredOutputsParams(**grammar) if grammar else None
    return SamplingParams(max_tokens=LENGTH, seed=5, structured_outputs=expected)


@pytest.mark.costly
@pytest.mark.sampled(6)
def test_outputs_are_valid_and_unconstrained_requests_of_the_batch_do_not_change(engine):
    free = SamplingParams(max_tokens=20, temperature=0.8, seed=2)
    (alone,) = engine.generate(PROMPT, free)
    asking = [
        params(json=Person),
        free,
        params(choice=["left", "right"]),
        params(regex="[0-9]{4}-[0-9]{2}"),
        free,
        params(json_object=True),
    ]
    actual = [item.outputs[0] for item in engine.generate([PROMPT] * 6, asking)]
    assert actual[1].text == actual[4].text == alone.outputs[0].text
    assert actual[0].finish_reason == "stop"
    assert isinstance(Person.model_validate_json(actual[0].text).age, int)
    assert actual[2].text in ("left", "right")
    assert re.fullmatch("[0-9]{4}-[0-9]{2}", actual[3].text)
    assert actual[5].finish_reason == "length" or isinstance(json.loads(actual[5].text), dict)


@pytest.mark.costly
def test_the_same_tokens_are_generated_at_both_depths_and_in_an_engine_process(engine, one_engine):
    asking = [params(json=Person), params(regex="[a-c]{9}"), params(choice=["aa", "ab", "b"])]
    expected = [item.outputs[0].token_ids for item in one_engine.generate([PROMPT] * 3, asking)]
    assert [item.outputs[0].token_ids for item in engine.generate([PROMPT] * 3, asking)] == expected


def test_several_completions_and_stop_strings_and_logprobs_work_with_a_grammar(one_engine):
    expected = StructuredOutputsParams(regex="[a-d]{6}")
    arguments = SamplingParams(n=3, max_tokens=20, seed=1, logprobs=2, structured_outputs=expected)
    (output,) = one_engine.generate(PROMPT, arguments)
    assert all(re.fullmatch("[a-d]{6}", item.text) for item in output.outputs)
    assert all(len(item.logprobs) == len(item.token_ids) for item in output.outputs)
    stopping = SamplingParams(
        max_tokens=40,
        seed=1,
        stop=["5"],
        structured_outputs=StructuredOutputsParams(regex="[0-9]*"),
    )
    (output,) = one_engine.generate(PROMPT, stopping)
    assert re.fullmatch("[0-9]*", output.outputs[0].text) and "5" not in output.outputs[0].text


def test_an_unsupported_schema_ends_only_its_own_request(one_engine):
    bad = params(json={"type": "array", "uniqueItems": True})
    outputs = one_engine.generate([PROMPT] * 3, [params(json=Person), bad, params(json=Person)])
    assert outputs[1].outputs[0].finish_reason == "error"
    assert "uniqueItems" in outputs[1].error
    assert outputs[0].outputs[0].token_ids == outputs[2].outputs[0].token_ids
    Person.model_validate_json(outputs[0].outputs[0].text)


def test_a_grammar_applies_after_the_reasoning_and_the_reasoning_is_limited(engine):
    reasoning = ReasoningParams(end="So:", budget=6)
    expected = StructuredOutputsParams(regex="[0-9]{2}-[abc]")
    both = SamplingParams(
        max_tokens=LENGTH, seed=5, structured_outputs=expected, reasoning=reasoning
    )
    limited = SamplingParams(max_tokens=20, temperature=0, reasoning=reasoning)
    free = SamplingParams(max_tokens=20, temperature=0)
    outputs = engine.generate([PROMPT] * 3, [both, limited, free])
    thought, _, response = outputs[0].outputs[0].text.partition("So:")
    assert thought and re.fullmatch("[0-9]{2}-[abc]", response)
    assert outputs[1].outputs[0].token_ids[:6] == outputs[2].outputs[0].token_ids[:6]
    assert "So:" in outputs[1].outputs[0].text
    (alone,) = engine.generate(PROMPT, free)
    assert outputs[2].outputs[0].token_ids == alone.outputs[0].token_ids


KEYS = ("a", "b c", "ä", "d")
SIMPLE = strategies.one_of(
    strategies.builds(
        lambda low, count: {"type": "integer", "minimum": low, "maximum": low + count},
        strategies.integers(-50, 50),
        strategies.integers(0, 2000),
    ),
    strategies.builds(
        lambda low, more: {"type": "string", "minLength": low, "maxLength": low + more},
        strategies.integers(0, 3),
        strategies.integers(0, 3),
    ),
    strategies.sampled_from(
        [
            {"type": "boolean"},
            {"type": "null"},
            {"const": {"a": [1, None]}},
            {"type": "string", "pattern": "^[a-f]{2,4}$"},
            {"type": "string", "format": "date"},
            {"type": ["integer", "null"], "maximum": 99, "minimum": -99},
        ]
    ),
    strategies.lists(
        strategies.one_of(strategies.integers(-9, 99), strategies.text("xyz ", max_size=4)),
        min_size=1,
        max_size=4,
        unique=True,
    ).map(lambda values: {"enum": values}),
)


def containers(inner):
    """Return schemas of lists and objects whose parts have the schemas `inner`."""
    lists = strategies.builds(
        lambda items, low, more: {
            "type": "array", "items": items, "minItems": low, "maxItems": low + more
        },
        inner, strategies.integers(0, 2), strategies.integers(0, 1),
    )  # fmt: skip
    objects = strategies.builds(
        lambda properties, required: {
            "type": "object",
            "properties": properties,
            "required": sorted(required & properties.keys()),
            "additionalProperties": False,
        },
        strategies.dictionaries(strategies.sampled_from(KEYS), inner, max_size=3),
        strategies.sets(strategies.sampled_from(KEYS)),
    )
    choices = strategies.lists(inner, min_size=1, max_size=2).map(
        lambda arguments: {"anyOf": arguments}
    )
    return strategies.one_of(lists, objects, choices)


SCHEMAS = strategies.recursive(SIMPLE, containers, max_leaves=4)


def check_schemas(llm, num_examples):
    """Generate with random schemas, and validate each output that is not truncated."""
    ended = []

    @settings(
        max_examples=num_examples, deadline=None, database=None, derandomize=True,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(schema=SCHEMAS)
    def run(schema):
        (output,) = llm.generate(PROMPT, params(json=schema))
        actual = output.outputs[0]
        if actual.finish_reason == "error":
            assert "not supported" in output.error, (schema, output.error)
            return
        ended.append(actual.finish_reason == "stop")
        if ended[-1]:
            jsonschema.validate(json.loads(actual.text), schema)

    run()
    assert sum(ended) >= 0.8 * len(ended) > 0


@pytest.mark.costly
def test_outputs_are_valid_for_random_schemas(one_engine):
    check_schemas(one_engine, 25)
