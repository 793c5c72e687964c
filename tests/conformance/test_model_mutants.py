"""The model suite detects models with faulty positions or a faulty last norm.

Other model mutants are in `test_torch_mutants.py`.
"""

from dataclasses import replace

import pytest
import torch
from conformance.messages import expect_rule_first
from conformance.subjects import fill_model, model_context
from torch import nn

from dovetail.plugins import PluginRegistry
from dovetail_devkit.fakes.model import FakeModel
from dovetail_devkit.model.dense_attention import DenseAttention
from dovetail_devkit.suites.model import check_model

Llama = PluginRegistry().load("model", "LlamaForCausalLM")


class LearnedPositions(FakeModel):
    """A model with learned positions, added to the embeddings, and a LayerNorm as the last norm."""

    offset = 0

    def __init__(self, context):
        super().__init__(context)
        hidden_size, num_positions = self.norm.shape[0], context.hf_config["n_positions"]
        self.wpe = nn.Parameter(torch.empty(num_positions, hidden_size), requires_grad=False)
        self.ln_bias = nn.Parameter(torch.empty(hidden_size), requires_grad=False)

    def forward(self, input_ids_T, positions_T, attention):
        embed = self.embed
        self.embed = _ComputedRows(embed[input_ids_T] + self.wpe[positions_T + self.offset])
        hidden_TD = super().forward(input_ids_T, torch.zeros_like(positions_T), attention)
        self.embed = embed
        return self.last_norm(hidden_TD)

    def last_norm(self, hidden_TD):
        return nn.functional.layer_norm(hidden_TD, hidden_TD.shape[-1:], self.norm, self.ln_bias)

    def __setattr__(self, name, value):
        if name == "embed" and isinstance(value, _ComputedRows):
            self.__dict__["embed"] = value
        else:
            self.__dict__.pop("embed", None) if name == "embed" else None
            super().__setattr__(name, value)


class _ComputedRows:
    """An embedding that is computed instead of read from a table."""

    def __init__(self, rows):
        self.rows = rows

    def __getitem__(self, ids):
        return self.rows


class OneTooLow(LearnedPositions):
    offset = -1


class OneTooHigh(LearnedPositions):
    offset = 1


class WrapsAround(LearnedPositions):
    """Adds one to the positions and wraps the last one to row 0."""

    def forward(self, input_ids_T, positions_T, attention):
        positions_T = (positions_T + 1) % len(self.wpe)
        return super().forward(input_ids_T, positions_T, attention)


class NoPositions(FakeModel):
    def forward(self, input_ids_T, positions_T, attention):
        return super().forward(input_ids_T, torch.zeros_like(positions_T), attention)


class NoLastNorm(FakeModel):
    def forward(self, input_ids_T, positions_T, attention):
        ops, self._ops = self._ops, _NoNorm()
        hidden_TD = super().forward(input_ids_T, positions_T, attention)
        self._ops = ops
        return hidden_TD


class _NoNorm:
    def rms_norm(self, x_TD, weight_D, eps):
        return x_TD * weight_D


class LlamaOneTooHigh(Llama):
    def forward(self, input_ids_T, positions_T, attention):
        return super().forward(input_ids_T, positions_T + 1, attention)


class LlamaWithoutPositions(Llama):
    def forward(self, input_ids_T, positions_T, attention):
        return super().forward(input_ids_T, positions_T * 0, attention)


class LlamaWithoutRotation(Llama):
    def forward(self, input_ids_T, positions_T, attention):
        return super().forward(input_ids_T, positions_T, _Unrotated(attention))


class _Unrotated:
    """An attention context without rotary arguments."""

    def __init__(self, attention):
        self._attention = attention

    def attend(self, index, q_THD, k_TKD, v_TKD, rotary_args=None):
        return self._attention.attend(index, q_THD, k_TKD, v_TKD)

    def narrow(self, x_TD):
        return self._attention.narrow(x_TD)


class LlamaWithoutLastNorm(Llama):
    def __init__(self, context):
        super().__init__(context)
        self.model.norm.add = lambda x_TD, residual_TD: (x_TD + residual_TD, residual_TD)


def check(model_cls, **options):
    """Run the suite on a model, with 64 positions if it has a position table."""
    context = model_context(model_cls)
    config = {**context.hf_config, "n_positions": 128}
    check_model(model_cls, replace(context, hf_config=config), fill=fill_model, **options)


MUTANTS = [
    (NoPositions, "the positions are ignored"),
    (LlamaWithoutRotation, "the positions are ignored"),
    (LlamaWithoutPositions, "queries and keys are rotated by the positions"),
    (LlamaOneTooHigh, "queries and keys are rotated by the positions"),
    (OneTooHigh, "IndexError"),
    (OneTooLow, "row 0 of wpe is not read at position 0"),
    (WrapsAround, "row 0 of wpe is not read at position 0"),
    (NoLastNorm, "do not come from a final norm"),
    (LlamaWithoutLastNorm, "do not come from a final norm"),
]


@pytest.mark.parametrize(("mutant", "rule"), MUTANTS)
def test_a_faulty_model_is_detected(mutant, rule):
    with pytest.raises(AssertionError, match=rule) as actual:
        check(mutant)
    expect_rule_first(actual.value)


@pytest.mark.parametrize("model_cls", [FakeModel, LearnedPositions, Llama])
def test_a_correct_model_passes(model_cls):
    check(model_cls)


@pytest.mark.parametrize(
    ("mutant", "part"), [(NoPositions, "positions"), (NoLastNorm, "final_norm")]
)
def test_a_model_passes_if_it_declares_its_missing_features(mutant, part):
    check(type("Honest", (mutant,), {"lacks": frozenset({part})}))
    with pytest.raises(AssertionError, match="the attribute lacks contains"):
        check(type("Odd", (mutant,), {"lacks": frozenset({"attention"})}))


class OtherPositions(FakeModel):
    """Adds one to the positions, which only the comparison with a reference detects."""

    def forward(self, input_ids_T, positions_T, attention):
        return super().forward(input_ids_T, positions_T + 1, attention)


def by_fake(model, ids_T):
    """Return the logits of a `FakeModel` with the weights of `model`."""
    created = FakeModel(model_context(FakeModel))
    created.load_state_dict(model.state_dict())
    attention = DenseAttention()
    attention.begin([(0, len(ids_T))])
    return created.compute_logits(created.forward(ids_T, torch.arange(len(ids_T)), attention))


def test_a_reference_implementation_detects_shifted_positions():
    check(FakeModel, reference=by_fake)
    with pytest.raises(AssertionError, match="The expected logits are those of the reference"):
        check(OtherPositions, reference=by_fake)


class Encoder(FakeModel):
    """A pooling model without an LM head, in which each token attends to all tokens."""

    provides = frozenset({"pooling", "whole_prompts"})
    pooling_type, num_labels = "mean", 0

    def compute_logits(self, hidden_SD):
        raise AssertionError("a pooling model has no logits")


class Labels(Encoder):
    num_labels = 97

    def classify(self, pooled_RD):
        return super(Encoder, self).compute_logits(pooled_RD)


class OneLabelTooMany(Labels):
    num_labels = 98


class Causal(Encoder):
    """An encoder whose attention is causal."""

    def forward(self, input_ids_T, positions_T, attention):
        attention.bidirectional = False
        return super().forward(input_ids_T, positions_T, attention)


@pytest.mark.parametrize("model_cls", [Encoder, Labels])
def test_a_correct_pooling_model_passes(model_cls):
    check_model(model_cls, model_context(model_cls), fill=fill_model)


@pytest.mark.parametrize(
    ("model_cls", "rule"),
    [(OneLabelTooMany, "the model's head returns the shape"), (Causal, "first token's result")],
)
def test_a_faulty_pooling_model_is_detected(model_cls, rule):
    with pytest.raises(AssertionError, match=rule):
        check_model(model_cls, model_context(model_cls), fill=fill_model)
