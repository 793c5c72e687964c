"""Compares models of the transformers fallback on several ranks with transformers.

A model is split by its tensor-parallel plan in transformers, or rejected if that is not possible.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import ArceeConfig

from dovetail import LLM, SamplingParams
from dovetail.errors import ConfigError, DovetailError, ModelError
from dovetail.interfaces.model import ModelContext
from dovetail_devkit.fakes.linear_method import FakeLinearMethod
from dovetail_transformers.model import TransformersForCausalLM
from dovetail_transformers.tensor_parallel import FakeRanks
from parity.checkpoints import Checkpoint
from parity.commit_seed import commit_seed
from parity.fallback_checkpoints import (
    NATIVE,
    ONE_RANK_ONLY,
    SERVED,
    make_config,
    make_fallback,
)
from parity.margin_rule import measure
from parity.rank_threads import TORCH_PARTS, RankThreads
from parity.test_engine_parity import table_row
from parity.test_family_parity import RunConfig, compare, one_thread, run_engine

MAX_LEN = 200
RANKS = {"executor_backend": RankThreads, "model_impl": "transformers", **TORCH_PARTS}
TWO_RANKS = RunConfig(budget=64, options={"tensor_parallel_size": 2, **RANKS}, is_repeated=True)
DIVIDED = [name for name in (*SERVED, *NATIVE) if name not in ONE_RANK_ONLY]
__all__ = ["one_thread"]


@pytest.fixture(scope="module")
def arcee(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return make_fallback("arcee", tmp_path_factory.mktemp("arcee"), commit_seed()[0])


def start(checkpoint: Checkpoint, num_ranks: int, **options: Any) -> LLM:
    return LLM(
        str(checkpoint.folder),
        dtype="float32",
        skip_tokenizer_init=True,
        use_tqdm_on_load=False,
        max_model_len=MAX_LEN,
        num_gpu_blocks_override=40,
        num_threads=1,
        tensor_parallel_size=num_ranks,
        **options,
    )


def create(model_type: str, num_ranks: int, **changes: Any) -> TransformersForCausalLM:
    context = ModelContext(
        hf_config=make_config(model_type, {**SERVED.get(model_type, {}), **changes}),
        dtype=torch.float32,
        device=torch.device("cpu"),
        linear_method=FakeLinearMethod,
        ops=None,
        max_model_len=64,
        ranks=FakeRanks(size=num_ranks),
    )
    with torch.inference_mode():
        return TransformersForCausalLM(context)


@pytest.mark.costly
@pytest.mark.sampled(40)
@pytest.mark.parametrize("name", DIVIDED)
def test_two_ranks_agree_with_transformers(name: str, tmp_path: Path, record_property) -> None:
    """The prompts run in chunks and in batches, and again with hits of the prefix cache."""
    checkpoint = make_fallback(name, tmp_path, commit_seed()[0])
    ran, agreement = compare(checkpoint, TWO_RANKS, MAX_LEN)
    first, second = ran.recorded
    assert all(torch.equal(one.logits, two.logits) for one, two in zip(first, second, strict=True))
    row = table_row(agreement, TWO_RANKS.budget, f"{name}; two ranks, fallback", ran.stats)
    record_property("parity", row)
    assert ran.stats.prefix_hits
    agreement.check()


@pytest.mark.costly
def test_four_ranks_share_two_key_value_heads_that_the_plan_does_not_shard(tmp_path: Path) -> None:
    checkpoint = make_fallback("olmo2", tmp_path, commit_seed()[0])
    run_config = replace(TWO_RANKS, options={"tensor_parallel_size": 4, **RANKS})
    ran = run_engine(checkpoint, run_config, MAX_LEN)
    measure(ran.requests, ran.recorded[0], checkpoint.logits).check()


@pytest.mark.costly
def test_ranks_in_processes_generate_the_tokens_of_one_rank(arcee: Checkpoint) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    tokens = []
    for num_ranks in (1, 2):
        with start(arcee, num_ranks) as llm:
            outputs = llm.generate([[5, 9, 33, 8] * 10, [61, 7]], params, use_tqdm=False)
        tokens.append([output.outputs[0].token_ids for output in outputs])
    assert tokens[0] == tokens[1]


def held(worker: Any) -> tuple[int, int]:
    """Return the bytes of the weights, each storage counted once, and of a block of each layer."""
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage() for p in weights_of(worker)}
    specs = worker.get_kv_cache_spec().values()
    return (
        sum(storage.nbytes() for storage in storages.values()),
        sum(spec.page_size_bytes for spec in specs),
    )


def weights_of(worker: Any) -> list[torch.Tensor]:
    return list(worker.get_model().parameters())


@pytest.mark.costly
@pytest.mark.parametrize("name", ["gemma2", "mixtral", "olmo2"])
def test_each_of_two_ranks_holds_half_of_the_weights_and_of_the_cache(
    name: str, tmp_path: Path
) -> None:
    checkpoint = make_fallback(name, tmp_path, 1)
    with start(checkpoint, 1, **RANKS) as llm:
        ((weights, pages),) = llm.llm_engine.collective_rpc(held)
    with start(checkpoint, 2, **RANKS) as llm:
        halves = llm.llm_engine.collective_rpc(held)
    assert all(0.49 < half / weights < 0.53 for half, _ in halves), (halves, weights)
    assert [half for _, half in halves] == [pages // 2] * 2


@pytest.mark.parametrize("model_type", ONE_RANK_ONLY)
def test_an_architecture_without_a_tensor_parallel_plan_is_rejected(model_type: str) -> None:
    with pytest.raises(ConfigError, match=r"^tensor_parallel_size=2 .* shard \w+: it has no plan"):
        create(model_type, 2)


@pytest.mark.parametrize(
    ("num_ranks", "changes", "error", "text"),
    [
        (
            2,
            {"intermediate_size": 73},
            ConfigError,
            "the 73 features of model.layers.0.mlp.up_proj",
        ),
        (3, {}, ConfigError, "the 4 query heads and 2 key-value heads"),
        (2, {"num_key_value_heads": 1}, ModelError, "ArceeForCausalLM .* 1 key-value heads"),
    ],
)
def test_sizes_that_are_not_divisible_by_the_number_of_ranks_are_rejected(
    num_ranks: int, changes: dict[str, int], error: type[DovetailError], text: str
) -> None:
    with pytest.raises(error, match=rf"^tensor_parallel_size={num_ranks} .*{text}"):
        create("arcee", num_ranks, **changes)


@pytest.mark.parametrize(
    ("entries", "text"),
    [
        ({"layers.*.input_layernorm": "sequence_parallel"}, "the style 'sequence_parallel'"),
        ({"layers.*.input_layernorm": {"a": 1}}, r"the style \{'a': 1\}"),
        ({"layers.*.input_layernorm": 5}, "the style 5"),
        ({"layers.*.input_layernorm": "colwise"}, "input_layernorm .ArceeRMSNorm"),
    ],
)
def test_a_tensor_parallel_plan_with_an_unsupported_entry_is_rejected(
    entries: dict[str, object], text: str, monkeypatch
) -> None:
    change_plan(monkeypatch, entries)
    with pytest.raises(ConfigError, match=f"shard ArceeForCausalLM: its plan .*{text}"):
        create("arcee", 2)


@pytest.mark.costly
@pytest.mark.parametrize(
    "entries",
    [
        {"layers.*.mlp.up_proj": "packed_colwise"},
        {
            "layers.*.mlp.down_proj": "replicate",
            "layers.*.mlp.up_proj": "replicate",
            "norm": "all_reduce",
        },
    ],
    ids=["other features", "an extra all-reduce"],
)
def test_a_tensor_parallel_plan_that_changes_the_logits_is_rejected(
    entries: dict[str, str], arcee: Checkpoint, monkeypatch
) -> None:
    change_plan(monkeypatch, entries)
    with (
        pytest.raises(ModelError, match="ArceeForCausalLM in transformers cannot be served"),
        start(arcee, 2, **RANKS) as llm,
    ):
        llm.generate([[5, 6]], SamplingParams(max_tokens=1), use_tqdm=False)


def change_plan(monkeypatch, entries: dict[str, str]) -> None:
    plan = {**ArceeConfig.base_model_tp_plan, **entries}
    monkeypatch.setattr(ArceeConfig, "base_model_tp_plan", plan)
