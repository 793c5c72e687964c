"""Errors about config.json name the fields as the file does, also in families with other names."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dovetail.errors import ModelError
from dovetail.interfaces.model import ModelContext
from dovetail_models.config_reader import read_number, read_optional
from dovetail_models.families.bert import BertModel
from dovetail_models.families.bloom import BloomForCausalLM
from dovetail_models.families.distilbert import DistilBertModel
from dovetail_models.families.falcon import FalconForCausalLM
from dovetail_models.families.gpt2 import GPT2LMHeadModel
from dovetail_models.families.gpt_neox import GPTNeoXForCausalLM
from dovetail_models.families.mpt import MptForCausalLM
from dovetail_models.families.nomic_bert import NomicBertModel
from dovetail_models.sliding_windows import check_layer_types
from dovetail_torch.layers import TorchLinearMethod, TorchOps

DISTIL = {
    "dim": 24,
    "hidden_dim": 16,
    "n_layers": 2,
    "n_heads": 4,
    "activation": "gelu",
    "max_position_embeddings": 16,
}
NOMIC = {
    "n_embd": 24,
    "n_inner": 16,
    "n_layer": 2,
    "n_head": 4,
    "layer_norm_epsilon": 1e-12,
    "rotary_emb_base": 1000,
}
NOMIC_NEW = {
    "hidden_size": 24,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "layer_norm_eps": 1e-12,
}
GPT2 = {"n_embd": 24, "n_inner": 16, "n_layer": 2, "n_head": 4, "n_positions": 16}
FALCON = {"n_embed": 24, "n_layer": 2, "n_head": 4}
GROUPS = {**FALCON, "new_decoder_architecture": True, "n_head_kv": 2}
MPT = {"d_model": 24, "n_layers": 2, "n_heads": 4}
NEOX = {
    "hidden_size": 24,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "rotary_pct": 0.5,
    "rotary_emb_base": 10000,
    "hidden_act": "gelu",
}
USUAL = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
USUAL_NAMES = (*USUAL, "hidden_act", "layer_norm_eps ", "rope_theta", "max_position_embeddings")


def rejection(model_cls: type, config: dict[str, Any], changes: dict[str, Any]) -> str:
    fields = {"vocab_size": 31, **config, **changes}
    context = ModelContext(
        hf_config={name: value for name, value in fields.items() if value is not None},
        dtype=torch.float32,
        device=torch.device("meta"),
        linear_method=TorchLinearMethod(),
        ops=TorchOps(),
        max_model_len=8,
    )
    with pytest.raises(ModelError) as caught:
        model_cls(context)
    return str(caught.value)


@pytest.mark.parametrize(
    ("model_cls", "config", "changes", "expected"),
    [
        (DistilBertModel, DISTIL, {"dim": "many"}, "dim is 'many'"),
        (DistilBertModel, DISTIL, {"dim": None}, "dim is absent"),
        (DistilBertModel, DISTIL, {"hidden_dim": 0}, "hidden_dim is 0"),
        (DistilBertModel, DISTIL, {"n_layers": 10**6}, "n_layers is 1000000; it must be at most"),
        (DistilBertModel, DISTIL, {"n_heads": True}, "n_heads is True"),
        (DistilBertModel, DISTIL, {"activation": "tanh"}, "activation is 'tanh'"),
        (DistilBertModel, DISTIL, {"dim": 26}, "dim 26 is not a multiple of n_heads 4"),
        (DistilBertModel, DISTIL, {"dim": 2**20}, "dim 1048576 / n_heads 4"),
        (DistilBertModel, {}, {}, "dim is absent"),
        (NomicBertModel, NOMIC, {"n_embd": None}, "n_embd is absent"),
        (NomicBertModel, NOMIC, {"n_inner": -1}, "n_inner is -1"),
        (NomicBertModel, NOMIC, {"n_layer": 1.5}, "n_layer is 1.5"),
        (NomicBertModel, NOMIC, {"n_head": 0}, "n_head is 0"),
        (NomicBertModel, NOMIC, {"n_head": 5}, "n_embd 24 is not a multiple of n_head 5"),
        (NomicBertModel, NOMIC, {"layer_norm_epsilon": 0}, "layer_norm_epsilon is 0"),
        (NomicBertModel, NOMIC, {"rotary_emb_base": -1}, "rotary_emb_base is -1"),
        (GPT2LMHeadModel, GPT2, {"n_embd": 0}, "n_embd is 0"),
        (GPT2LMHeadModel, GPT2, {"n_inner": "x"}, "n_inner is 'x'"),
        (GPT2LMHeadModel, GPT2, {"n_head": 5}, "n_embd 24 is not a multiple of n_head 5"),
        (GPT2LMHeadModel, GPT2, {"n_positions": 0}, "n_positions is 0"),
        (FalconForCausalLM, FALCON, {"n_embed": 0}, "n_embed is 0"),
        (FalconForCausalLM, FALCON, {"n_head": 5}, "n_embed 24 is not a multiple of n_head 5"),
        (FalconForCausalLM, GROUPS, {"n_head_kv": 3}, "n_head 4 is not a multiple of n_head_kv 3"),
        (GPTNeoXForCausalLM, NEOX, {"rotary_pct": "x"}, "rotary_pct is 'x'"),
        (GPTNeoXForCausalLM, NEOX, {"rotary_emb_base": -1}, "rotary_emb_base is -1"),
        (BloomForCausalLM, FALCON, {"n_layer": 0}, "n_layer is 0"),
        (MptForCausalLM, MPT, {"d_model": 0}, "d_model is 0"),
        (MptForCausalLM, MPT, {"n_heads": 5}, "d_model 24 is not a multiple of n_heads 5"),
    ],
)
def test_an_error_names_the_field_of_the_file(model_cls, config, changes, expected):
    message = rejection(model_cls, config, changes)
    assert message.startswith("config.json: ") and expected in message
    assert not any(name in message for name in USUAL_NAMES)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"hidden_size": None}, "hidden_size is absent"),
        ({"intermediate_size": 0}, "intermediate_size is 0"),
        ({"num_attention_heads": 5}, "hidden_size 24 is not a multiple of num_attention_heads 5"),
        ({"layer_norm_eps": "small"}, "layer_norm_eps is 'small'"),
    ],
)
def test_an_error_names_the_usual_field_if_the_file_has_it(changes, expected):
    assert expected in rejection(NomicBertModel, NOMIC_NEW, changes)


@pytest.mark.parametrize(
    ("changes", "name", "other"),
    [
        ({"position_embedding_type": "relative_key"}, "position_embedding_type", "is_decoder"),
        ({"is_decoder": True}, "is_decoder", "position_embedding_type"),
    ],
)
def test_an_error_of_bert_names_only_the_unsupported_field(changes, name, other):
    message = rejection(BertModel, NOMIC_NEW, changes)
    assert f"{name} is {changes[name]!r}" in message and other not in message


def test_a_long_list_of_layer_types_is_shortened_in_the_error():
    with pytest.raises(ModelError, match="a list of 3 values") as caught:
        check_layer_types(["x" * 1000] * 1000, 3)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("read", [read_number, read_optional])
def test_a_number_that_does_not_fit_into_a_float_is_rejected_with_its_field(read: Any) -> None:
    arguments = ({"theta": 10**400}, "theta", 1.0)
    with pytest.raises(ModelError, match=r"theta is an integer of \d+ bits; it must be"):
        read(*arguments[: 2 + (read is read_number)])


@pytest.mark.parametrize("value", [[], {}, ""])
def test_an_empty_value_is_not_an_absent_number(value: object) -> None:
    with pytest.raises(ModelError, match=r"clip_qkv is .* must be a positive number"):
        read_optional({"clip_qkv": value}, "clip_qkv")
    assert [read_optional({"clip_qkv": value}, "clip_qkv") for value in (None, 0, False)] == [0] * 3
