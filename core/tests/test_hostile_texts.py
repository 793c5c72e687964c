"""Roles of messages and texts of pairs that would take much time or memory to read or compare."""

import asyncio
import itertools
import time
from types import SimpleNamespace

import pytest

from dovetail.engine.messages.conversation import MAX_ROLE_CHARS, read_messages
from dovetail.engine.output import scoring
from dovetail.engine.output.scoring import ScoringKind, read_pairs
from dovetail.engine.streaming import pooling
from dovetail.errors import RequestError
from dovetail.outputs import PoolingOutput, PoolingRequestOutput, RequestMetrics

NUM_MESSAGES = 4096


def _messages(role):
    return [{"role": role, "content": "text"}] * NUM_MESSAGES


def test_a_large_template_is_searched_once_for_the_roles_of_all_messages():
    # One search in this template takes 10 ms.
    template = "a'" * 500_000 + " 'narrator'"
    begin = time.process_time()
    assert len(read_messages(_messages("narrator"), [template])) == NUM_MESSAGES
    assert time.process_time() - begin < 5


@pytest.mark.parametrize("template", ["{{ 'narrator' }}", '{{ "x" + "narrator" }}', "''narrator''"])
def test_a_role_in_quotes_of_either_kind_is_accepted(template):
    assert read_messages(_messages("narrator")[:1], ["", template])


@pytest.mark.parametrize(
    "template", ["narrator", "'narrator", "narrator'", "'narrator\"", "' narrator'"]
)
def test_a_role_that_the_template_does_not_quote_is_rejected(template):
    with pytest.raises(RequestError, match=r"messages\[0\]\.role is 'narrator'; use one of"):
        read_messages(_messages("narrator")[:1], [template])


def test_a_long_role_is_rejected_although_the_template_quotes_it():
    role = "a" * (MAX_ROLE_CHARS + 1)
    with pytest.raises(RequestError, match="use one of"):
        read_messages(_messages(role)[:1], [f"'{role}'"])


class Endless(list):
    """A list that yields more items than it has."""

    def __iter__(self):
        return itertools.chain(itertools.repeat("text", 10_000), self.fail())

    def fail(self):
        raise AssertionError("read too far")
        yield


@pytest.mark.parametrize("name", ["queries", "documents"])
def test_texts_of_pairs_are_read_up_to_the_limit(name):
    texts = {"queries": "text", "documents": "text"} | {name: Endless()}
    with pytest.raises(RequestError, match=r"more than 64 strings.*\(max_prompts\)") as caught:
        read_pairs(**texts, max_texts=64)
    assert caught.value.parameter == name


def test_a_list_of_strings_that_raises_is_an_error_of_its_argument():
    class Failing(list):
        def __iter__(self):
            raise ZeroDivisionError("mine")

    with pytest.raises(RequestError, match="documents cannot be read: ZeroDivisionError"):
        read_pairs("query", Failing(), max_texts=64)
    assert read_pairs("query", ["a", "b"], max_texts=64).valid == [0, 1]


def pooled(num_tokens, num_features=128):
    rows = [[1.0] * num_features] * num_tokens
    return PoolingRequestOutput(
        request_id=str(num_tokens),
        prompt=None,
        prompt_token_ids=[1] * num_tokens,
        outputs=PoolingOutput(rows),
        metrics=RequestMetrics(arrival_ns=0),
    )


def test_long_texts_with_a_vector_for_each_token_are_not_compared():
    begin, late = time.process_time(), ScoringKind.LATE_INTERACTION
    pairs = read_pairs("query", ["long", "short"], max_texts=4)
    outputs = {"query": pooled(1500), "long": pooled(1500), "short": pooled(2)}
    rejected, valid = scoring.compare_all(late, pairs, outputs)
    assert time.process_time() - begin < 2
    assert rejected.outputs is None and "a query of 1500 tokens" in rejected.error
    assert valid.outputs.score == 1500 * 128


@pytest.mark.parametrize("kind", [ScoringKind.LATE_INTERACTION, ScoringKind.EMBEDDING])
def test_the_comparison_of_many_pairs_ends_if_the_call_is_cancelled(kind, monkeypatch):
    compared = []

    def compare(kind, query, document):
        time.sleep(0.01)
        compared.append(document)
        return SimpleNamespace()

    monkeypatch.setattr(scoring, "compare", compare)
    pairs = read_pairs("query", ["text"] * 1000, max_texts=1000)

    async def run():
        pooled = {"query": None, "text": None}
        task = asyncio.create_task(pooling._compare(kind, pairs, pooled))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert len(compared) < 500
