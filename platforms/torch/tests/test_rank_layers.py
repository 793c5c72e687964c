"""Layers, weights and loaders of several ranks, compared with one rank.

The ranks are threads of this process.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from dovetail.errors import ConfigError, WeightError
from dovetail.interfaces import LinearShape, ModelContext, OneRank, WeightLoaderContext
from dovetail_torch.distributed.shard import Shard, shard_evenly, shard_unevenly
from dovetail_torch.layers import (
    Attention,
    ColumnParallelLinear,
    HeadShape,
    MergedColumnParallelLinear,
    ParallelLMHead,
    QKVParallelLinear,
    RMSNorm,
    RowParallelLinear,
    TorchLinearMethod,
    TorchOps,
    VocabParallelEmbedding,
    replicate_kv_heads,
)
from dovetail_torch.weights import (
    DummyLoader,
    SafetensorsLoader,
    assignment,
    build_weight_table,
    dummy_loader,
)

V, D, INNER, TOKENS = 15, 8, 24, 5
HEADS = HeadShape(num_heads=8, num_kv_heads=2, head_size=3)
Q, KV = HEADS.num_heads * HEADS.head_size, HEADS.num_kv_heads * HEADS.head_size
SHAPES = {
    "embed.weight": (V, D),
    "q_proj.weight": (Q, D),
    "q_proj.bias": (Q,),
    "k_proj.weight": (KV, D),
    "k_proj.bias": (KV,),
    "v_proj.weight": (KV, D),
    "v_proj.bias": (KV,),
    "o_proj.weight": (D, Q),
    "o_proj.bias": (D,),
    "gate_proj.weight": (INNER, D),
    "up_proj.weight": (INNER, D),
    "mix.weight": (INNER, D),
    "down_proj.weight": (D, INNER),
    "norm.weight": (D,),
    "head.weight": (V, D),
}


class ThreadRanks:
    """One of several ranks in threads, which run collective operations through a shared list."""

    def __init__(self, rank: int, size: int, table: list, barrier: Barrier) -> None:
        self.rank, self.size = rank, size
        self._table, self._barrier = table, barrier

    def exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        self._table[self.rank] = x.clone()
        self._barrier.wait(10)
        gathered = list(self._table)
        self._barrier.wait(10)
        return gathered

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(torch.stack(self.exchange(x)).sum(0))

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self.exchange(x), dim=-1)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        return self.exchange(x)[0]


class Model(nn.Module):
    """A model with one layer of each kind."""

    def __init__(self, ranks, method=None, *, tied: bool = False) -> None:
        super().__init__()
        context = ModelContext(
            hf_config={},
            dtype=torch.float32,
            device=torch.device("cpu"),
            linear_method=method or TorchLinearMethod(),
            ops=TorchOps(),
            max_model_len=8,
            ranks=ranks,
        )
        self.embed = VocabParallelEmbedding(context, V, D)
        self.qkv_proj = QKVParallelLinear(context, "qkv_proj", D, HEADS, bias=True)
        self.o_proj = RowParallelLinear(context, "o_proj", Q, D, bias=True)
        parts = {"gate_proj": INNER, "up_proj": INNER}
        self.gate_up_proj = MergedColumnParallelLinear(context, "gate_up_proj", D, parts)
        self.mix = ColumnParallelLinear(context, "mix", D, INNER)
        self.down_proj = RowParallelLinear(context, "down_proj", INNER, D)
        self.norm = RMSNorm(context, D, 1e-6)
        self.attn = Attention(HEADS, 0)
        self.head = ParallelLMHead(context, "head", V, D, tied_to=self.embed if tied else None)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.fill_(float("nan"))

    def forward(self, ids_T: torch.Tensor) -> torch.Tensor:
        """Call every layer. Attention is replaced by the sum of query, key and value."""
        x_TD = self.embed(ids_T)
        q_THS, k_TKS, v_TKS = self.qkv_proj.split(self.qkv_proj(x_TD))
        num_alike = q_THS.shape[1] // k_TKS.shape[1]
        kv_THS = (k_TKS + 2 * v_TKS).repeat_interleave(num_alike, dim=1)
        x_TD = x_TD + self.o_proj((q_THS * kv_THS).flatten(1))
        gate_TF, up_TF = self.gate_up_proj(x_TD).chunk(2, dim=-1)
        x_TD = x_TD + self.down_proj(gate_TF * up_TF + self.mix(x_TD))
        return self.head(self.norm(x_TD))


def make_weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def on_ranks(size: int, work) -> list:
    """Call `work` with the group of each rank in a separate thread, and return the results."""
    table, barrier = [None] * size, Barrier(size)
    groups = [ThreadRanks(rank, size, table, barrier) for rank in range(size)]
    with ThreadPoolExecutor(size) as pool, torch.inference_mode():
        return list(pool.map(torch.inference_mode()(work), groups))


def load(folder: Path, model: nn.Module) -> int:
    return SafetensorsLoader(WeightLoaderContext(model_dir=folder, progress=False)).load(model)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file(make_weights(), tmp_path / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_several_ranks_compute_the_same_outputs_as_one_rank(
    folder: Path, size: int, tied: bool
) -> None:
    ids_T = torch.tensor([0, 14, 7, 8, 3])

    def work(ranks) -> torch.Tensor:
        model = Model(ranks, tied=tied)
        load(folder, model)
        assert not any(p.isnan().any() for p in model.parameters()), "a weight was not filled"
        return model(ids_T)

    (expected,) = on_ranks(1, work)
    first, *others = on_ranks(size, work)
    assert expected.std() > 0.5 and first.shape == (TOKENS, V)
    torch.testing.assert_close(first, expected, rtol=1e-4, atol=1e-3)
    assert all(torch.equal(first, other) for other in others), "the ranks have different logits"


def test_each_rank_reads_and_stores_its_part(folder: Path) -> None:
    def work(ranks) -> tuple[int, int]:
        model = Model(ranks)
        num_read = load(folder, model)
        return num_read, sum(parameter.nbytes for parameter in model.parameters())

    ((whole_read, whole_held),) = on_ranks(1, work)
    halves = on_ranks(2, work)
    assert whole_read == whole_held and all(read == held for read, held in halves)
    assert sum(held for _, held in halves) == whole_held + make_weights()["norm.weight"].nbytes
    assert all(abs(held / whole_held - 0.5) < 0.05 for _, held in halves)


def test_kv_heads_are_replicated_if_there_are_fewer_than_ranks(folder: Path) -> None:
    def work(ranks) -> torch.Tensor:
        model = Model(ranks)
        load(folder, model)
        assert model.qkv_proj.shape.part_sizes == (Q // 4, HEADS.head_size, HEADS.head_size)
        replicate_kv_heads(model, ranks)
        assert (model.attn.num_heads, model.attn.num_kv_heads) == (2, 1)
        return model.qkv_proj.weight.clone()

    weights = make_weights()
    for rank, weight in enumerate(on_ranks(4, work)):
        q, k, v = weight.split((6, 3, 3))
        assert torch.equal(q, weights["q_proj.weight"][6 * rank : 6 * rank + 6])
        kv_head = slice(0, 3) if rank < 2 else slice(3, 6)
        assert torch.equal(k, weights["k_proj.weight"][kv_head])
        assert torch.equal(v, weights["v_proj.weight"][kv_head])


def test_a_row_parallel_bias_is_added_once(folder: Path) -> None:
    def work(ranks) -> torch.Tensor:
        model = Model(ranks)
        load(folder, model)
        assert (model.o_proj.bias is None) == (ranks.rank > 0)
        return model.o_proj(torch.zeros(1, model.o_proj.shape.in_features))

    for out in on_ranks(2, work):
        torch.testing.assert_close(out[0], make_weights()["o_proj.bias"])


def test_a_missing_bias_is_reported(tmp_path: Path) -> None:
    weights = make_weights()
    del weights["o_proj.bias"]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(WeightError, match=r"missing 1 weight .*o_proj\.bias"):
        load(tmp_path, Model(ThreadRanks(0, 2, [], Barrier(2))))


class Borrowing(TorchLinearMethod):
    """A linear method that accepts mapped weights."""

    def create(self, layer: nn.Module, shape: LinearShape) -> None:
        super().create(layer, shape)
        layer.borrows = frozenset({"weight"})


def test_a_mapped_weight_contains_only_the_part_of_its_rank(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assignment, "BORROWED_BYTES", 0)
    model = Model(ThreadRanks(1, 2, [], Barrier(2)), Borrowing())
    with torch.inference_mode():
        load(folder, model)
    weights = make_weights()
    assert torch.equal(model.down_proj.borrowed[0], weights["down_proj.weight"][:, INNER // 2 :])
    assert torch.equal(model.gate_up_proj.borrowed[1], weights["up_proj.weight"][INNER // 2 :])
    assert model.embed.is_mapped and torch.equal(model.embed.weight, weights["embed.weight"][8:])


@pytest.mark.parametrize("name", ["down_proj.weight", "embed.weight", "k_proj.weight"])
def test_the_error_for_a_wrong_shape_shows_the_shape_in_the_checkpoint(
    tmp_path: Path, name: str
) -> None:
    weights = make_weights()
    weights[name] = weights[name][:-1].clone()
    save_file(weights, tmp_path / "model.safetensors")
    shape = ", ".join(map(str, SHAPES[name]))
    with pytest.raises(WeightError, match=rf"{name} .* config.json requires \[{shape}\]"):
        load(tmp_path, Model(ThreadRanks(1, 2, [], Barrier(2))))


@pytest.mark.parametrize("period", [dummy_loader.PERIOD, 37])
def test_random_weights_do_not_depend_on_the_number_of_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, period: int
) -> None:
    monkeypatch.setattr(dummy_loader, "PERIOD", period)

    def work(ranks) -> dict[str, torch.Tensor]:
        model = Model(ranks)
        DummyLoader(WeightLoaderContext(model_dir=tmp_path, seed=5, progress=False)).load(model)
        return {a.name: a.target.clone() for a in build_weight_table(model).assignments.values()}

    (whole,) = on_ranks(1, work)
    first, second = on_ranks(2, work)
    for name in ("q_proj.weight", "up_proj.weight", "embed.weight", "head.weight", "k_proj.bias"):
        assert torch.equal(torch.cat((first[name], second[name])), whole[name]), name
    for name in ("down_proj.weight", "o_proj.weight"):
        assert torch.equal(torch.cat((first[name], second[name]), dim=1), whole[name]), name
    assert torch.equal(second["norm.weight"], whole["norm.weight"])


def test_shards_cover_each_entry_of_a_dimension_once() -> None:
    for size, count in ((12, 3), (13, 2), (13, 4), (257, 8)):
        ranks = [OneRank(rank=rank, size=count) for rank in range(count)]
        shards = [shard_unevenly(size, item, "it") for item in ranks]
        covered = [index for shard in shards for index in range(size)[shard.slice]]
        assert covered == list(range(size))
        assert len({shard.size for shard in shards[:-1]}) == 1 >= shards[-1].size / shards[0].size
    assert shard_evenly(12, OneRank(rank=2, size=3), "it") == Shard(start=8, size=4, whole=12)


def test_each_rank_has_the_sinks_of_its_heads() -> None:
    layers = nn.ModuleList([Attention(HEADS, 0, sinks=nn.Parameter(torch.arange(8.0)))])
    replicate_kv_heads(layers, OneRank(rank=1, size=2))
    (layer,) = layers
    assert layer.sinks.tolist() == [4.0, 5.0, 6.0, 7.0]
    assert layer.shards == {"sinks": Shard(start=4, size=4, whole=8)}


REFUSED = {
    "heads": (
        lambda c: QKVParallelLinear(c, "a.qkv", D, HEADS),
        "8 query heads .* Use 1, 2, 4, 8[.]",
    ),
    "features": (
        lambda c: MergedColumnParallelLinear(c, "a.b", D, {"gate": 4, "up": 9}),
        "4 output features of gate in a.b cannot .* Use 1, 2, 4[.]",
    ),
    "inputs": (lambda c: RowParallelLinear(c, "a.down", 10, D), "10 input .* Use 1, 2, 5, 10[.]"),
    "vocabulary": (lambda c: VocabParallelEmbedding(c, 2, D), "vocabulary of 2 .* Use 1, 2[.]"),
    "attention": (
        lambda c: replicate_kv_heads(nn.ModuleList([Attention(HEADS, 0)]), c.ranks),
        "8 query heads .* of 0 cannot",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_the_error_for_an_indivisible_size_lists_the_valid_numbers_of_ranks(case: str) -> None:
    make, message = REFUSED[case]
    context = ModelContext(
        hf_config={},
        dtype=torch.float32,
        device=torch.device("cpu"),
        linear_method=TorchLinearMethod(),
        ops=TorchOps(),
        max_model_len=8,
        ranks=OneRank(rank=1, size=3),
    )
    with pytest.raises(ConfigError, match=f"tensor_parallel_size=3 is not possible: .*{message}"):
        make(context)
