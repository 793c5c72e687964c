"""The attention suite detects builders with stale metadata and false capabilities.

Faulty results are tested with the `torch` backend.
"""

from dataclasses import replace

import pytest
import torch
from conformance.messages import expect_rule_first

from dovetail_devkit.expectation import SkipCase
from dovetail_devkit.fakes.attention import (
    FakeAttentionBackend,
    FakeAttentionBuilder,
    FakeAttentionLayer,
)
from dovetail_devkit.suites.attention import attention_cases, check_attention

CPU = torch.device("cpu")
NARROW = replace(
    FakeAttentionBackend.capabilities,
    dtypes=frozenset({"float32"}),
    head_sizes=frozenset({32}),
    features=frozenset(),
)


def backend_with_capabilities(
    *features, builder=FakeAttentionBuilder, layer=FakeAttentionLayer, **claims
):
    """Return a backend that declares more features than it has."""

    class Backend(FakeAttentionBackend):
        capabilities = replace(NARROW, features=frozenset(features), **claims)

        @staticmethod
        def create_builder(context):
            return builder(context)

        @staticmethod
        def create_layer(context):
            return layer(context)

    return Backend


def reuse_metadata_by_key(key_of):
    """Return a builder that reuses the metadata of a batch with the same key."""

    class Builder(FakeAttentionBuilder):
        def __init__(self, context):
            super().__init__(context)
            self.built = {}

        def build(self, batch):
            key = key_of(batch)
            if key not in self.built:
                self.built[key] = super().build(batch)
            return self.built[key]

    return Builder


def lengths_of(batch):
    return tuple(batch.query_lens), tuple(batch.seq_lens)


class SharedByAll(FakeAttentionBuilder):
    """Shares one metadata object between all builders. Each build overwrites it."""

    def build(self, batch):
        new = super().build(batch)
        shared = SharedByAll.__dict__.get("metadata") or new
        object.__setattr__(shared, "runs", new.runs)
        object.__setattr__(shared, "slots_T", new.slots_T)
        SharedByAll.metadata = shared
        return shared


class RoundsByNumberOfRows(FakeAttentionLayer):
    """Adds an error that depends on the number of requests."""

    def forward(self, q_THD, k_TKD, v_TKD, kv_cache, metadata, out_THD, rotary_args=None):
        super().forward(q_THD, k_TKD, v_TKD, kv_cache, metadata, out_THD, rotary_args)
        out_THD *= 1 + 2e-7 * (len(metadata.runs) > 1)


class RoundsByNumberOfTokens(FakeAttentionLayer):
    """Adds an error that depends on the number of tokens of a request."""

    def attend(self, q_QHD, k_LKD, v_LKD):
        return super().attend(q_QHD, k_LKD, v_LKD) * (1 + 2e-7 * (len(q_QHD) == 1))


class CastsToInt8(FakeAttentionLayer):
    """Truncates numbers to integers instead of scaling them."""

    def forward(self, q_THD, k_TKD, v_TKD, kv_cache, metadata, out_THD, rotary_args=None):
        heads, size = self.context.num_kv_heads, self.context.head_size
        num_blocks, page = kv_cache.shape
        block_size = page // (2 * heads * (size + 4))
        count = 2 * num_blocks * block_size * heads * size
        own = kv_cache.view(-1)[:count].view(2, num_blocks, block_size, heads, size)
        k, v = k_TKD.to(torch.int8), v_TKD.to(torch.int8)
        super().forward(q_THD, k, v, own, metadata, out_THD, rotary_args)


class PagesOfInt8:
    """Returns a cache shape for int8 pages."""

    @staticmethod
    def kv_cache_shape(num_blocks, spec):
        if spec.dtype != "int8":
            return FakeAttentionBackend.kv_cache_shape(num_blocks, spec)
        return (num_blocks, spec.page_size_bytes)


INT8 = frozenset({"float32", "int8"})


MUTANTS = {
    "reuses metadata of equal query lengths": (
        backend_with_capabilities(
            builder=reuse_metadata_by_key(lambda batch: tuple(batch.query_lens))
        ),
        r"The step is 'build \d'",
    ),
    "reuses metadata of equal lengths": (
        backend_with_capabilities(builder=reuse_metadata_by_key(lengths_of)),
        "The step is 'other blocks'",
    ),
    "reuses metadata of the same tensor": (
        backend_with_capabilities(
            builder=reuse_metadata_by_key(lambda batch: batch.block_table_RM.data_ptr())
        ),
        "'one builder serves many steps'",
    ),
    "one metadata object for all builders": (
        backend_with_capabilities(builder=SharedByAll),
        "'two groups have separate builders'",
    ),
    "results depend on other rows": (
        backend_with_capabilities("batch_invariant", layer=RoundsByNumberOfRows),
        "batch_invariant is claimed, but .* All rows ran in one step",
    ),
    "results depend on chunks": (
        backend_with_capabilities("batch_invariant", layer=RoundsByNumberOfTokens),
        "batch_invariant is claimed, but .* The last token of each row ran in a separate step",
    ),
    "no shape for an int8 cache": (
        backend_with_capabilities(kv_cache_dtypes=INT8),
        r"kv_cache_shape returns .* bytes with int8",
    ),
    "casts to int8 without scales": (
        type(
            "Cast",
            (PagesOfInt8, backend_with_capabilities(kv_cache_dtypes=INT8, layer=CastsToInt8)),
            {},
        ),
        "attention is wrong: .* cache of int8",
    ),
    "has no advance": (
        backend_with_capabilities("supports_advance"),
        r"the builder has no advance\(\)",
    ),
    "does not support padded pages": (
        backend_with_capabilities("padded_pages"),
        "padded_pages is claimed, but blocks are not the first dimension",
    ),
}


def run(backend):
    """Run the suite's cases in order, except those of `standard_cases`."""
    for case in attention_cases(backend, CPU):
        if "under" in case.name or "cache of" in case.name or "padding" in case.name:
            case.run()


@pytest.mark.costly
@pytest.mark.parametrize("name", MUTANTS)
def test_a_backend_that_declares_an_unsupported_feature_is_detected(name):
    backend, rule = MUTANTS[name]
    with pytest.raises(AssertionError, match=rule) as actual:
        run(backend)
    expect_rule_first(actual.value)


class AdvancesByBuilding(FakeAttentionBuilder):
    """Builds the metadata again in `advance`, from the tensors of the last batch."""

    def build(self, batch):
        self.batch = batch
        self.metadata = super().build(batch)
        return self.metadata

    def advance(self):
        lengths = self.batch.seq_lens_R.tolist()
        new = super().build(replace(self.batch, seq_lens=lengths))
        self.metadata.runs[:] = new.runs


class AdvancesNothing(AdvancesByBuilding):
    def advance(self):
        pass


def test_the_suite_compares_advanced_metadata_with_newly_built_metadata():
    run(backend_with_capabilities("supports_advance", builder=AdvancesByBuilding))
    with pytest.raises(AssertionError, match=r"advance\(\) was called 1 times after"):
        run(backend_with_capabilities("supports_advance", builder=AdvancesNothing))


def test_a_declared_feature_without_a_test_case_is_reported():
    cases = {case.name: case for case in attention_cases(backend_with_capabilities("cascade"), CPU)}
    with pytest.raises(SkipCase, match="no case for the feature 'cascade'"):
        cases["the feature cascade"].run()


@pytest.mark.costly
def test_a_correct_backend_with_few_features_passes():
    check_attention(backend_with_capabilities(), CPU)
