"""The suite of ops detects faulty recurrent operations."""

import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from dovetail_devkit.case import run_all
from dovetail_devkit.fakes.ops import FakeOps
from dovetail_devkit.ops.recurrence import recurrence_cases
from dovetail_devkit.ops.states import state_cases
from dovetail_torch.layers import TorchOps

HOST = torch.device("cpu")


def cases_of(ops_cls, dtype):
    for make in (state_cases, recurrence_cases):
        yield from make(ops_cls, HOST, dtypes=[dtype])


class ReadsNoState(FakeOps):
    """Linear attention that begins every request with a state of zeros."""

    def linear_attention(self, inputs, states_BHKV, parts):
        firsts = [sum(parts.num_parts[:i]) for i in range(len(parts.num_parts))]
        reads_N = parts.reads_N.clone()
        reads_N[firsts] = -1
        return super().linear_attention(inputs, states_BHKV, replace(parts, reads_N=reads_N))


class ReadsTheStateOfNewRequests(FakeOps):
    """A convolution that begins new requests with the inputs in their first block."""

    def causal_conv(self, x_TC, weight_CW, bias_C, states_BWC, parts):
        reads_N = torch.where(parts.reads_N < 0, parts.writes_N, parts.reads_N)
        parts = replace(parts, reads_N=reads_N)
        return super().causal_conv(x_TC, weight_CW, bias_C, states_BWC, parts)


class WritesOnlyTheLastState(FakeOps):
    """Linear attention that saves only the state after the last token of a request."""

    def linear_attention(self, inputs, states_BHKV, parts):
        before = states_BHKV.clone()
        out_THV = super().linear_attention(inputs, states_BHKV, parts)
        lasts = [sum(parts.num_parts[: i + 1]) - 1 for i in range(len(parts.num_parts))]
        kept = parts.writes_N[lasts]
        before[kept] = states_BHKV[kept]
        states_BHKV.copy_(before)
        return out_THV


class DecaysAfterTheUpdate(FakeOps):
    """Linear attention whose decay also applies to the current token."""

    def linear_attention(self, inputs, states_BHKV, parts):
        steps_TH = functional.softplus(inputs.steps_TH + inputs.step_bias_H)
        scale = (steps_TH * inputs.rates_H).exp()[..., None]
        changed = replace(inputs, v_THV=(inputs.v_THV * scale).to(inputs.v_THV.dtype))
        return super().linear_attention(changed, states_BHKV, parts)


class OmitsTheDeltaRule(FakeOps):
    """Linear attention that only scales the values by beta."""

    def linear_attention(self, inputs, states_BHKV, parts):
        if inputs.beta_TH is not None:
            steps_TH = functional.softplus(inputs.steps_TH + inputs.step_bias_H)
            v_THV = inputs.v_THV * (inputs.beta_TH.sigmoid() / steps_TH)[..., None]
            inputs = replace(inputs, v_THV=v_THV, beta_TH=None)
        return super().linear_attention(inputs, states_BHKV, parts)


class IgnoresTheLimits(FakeOps):
    """Linear attention whose step sizes have no limits."""

    def linear_attention(self, inputs, states_BHKV, parts):
        changed = replace(inputs, step_limits=(0.0, math.inf))
        return super().linear_attention(changed, states_BHKV, parts)


class OmitsTheSkip(FakeOps):
    """Linear attention without the token's own value."""

    def linear_attention(self, inputs, states_BHKV, parts):
        return super().linear_attention(replace(inputs, skip_H=None), states_BHKV, parts)


class AddsTheEpsilonToTheRoot(FakeOps):
    """Linear attention whose normalization adds epsilon in a wrong place."""

    def linear_attention(self, inputs, states_BHKV, parts):
        changed = replace(inputs, key_eps=inputs.key_eps**2)
        return super().linear_attention(changed, states_BHKV, parts)


class NormalizesBeforeTheGate(FakeOps):
    """A gated norm that ignores `norm_first`."""

    def gated_rms_norm(self, x_TGI, gate_TGI, weight_GI, eps, *, norm_first):
        return super().gated_rms_norm(x_TGI, gate_TGI, weight_GI, eps, norm_first=True)


class ConvolvesAcrossRequests(FakeOps):
    """A convolution whose new requests begin with the inputs of the previous request."""

    def causal_conv(self, x_TC, weight_CW, bias_C, states_BWC, parts):
        y_TC = super().causal_conv(x_TC, weight_CW, bias_C, states_BWC, parts)
        joined = replace(
            parts,
            sizes=(len(x_TC),),
            num_parts=(1,),
            reads_N=parts.reads_N[:1],
            writes_N=parts.writes_N[-1:],
        )
        wrong_TC = super().causal_conv(x_TC, weight_CW, bias_C, states_BWC.clone(), joined)
        y_TC[-1] = wrong_TC[-1]
        return y_TC


class ActivatesThePlainConvolution(FakeOps):
    """A convolution without activation that has the activation."""

    def plain_causal_conv(self, x_TC, weight_CW, bias_C, states_BWC, parts):
        return self.causal_conv(x_TC, weight_CW, bias_C, states_BWC, parts)


class RecursFromTheStateOfNewRequests(FakeOps):
    """A recurrence that begins new requests with the state in their first block."""

    def gated_recurrence(self, inputs, states_BC, parts):
        reads_N = torch.where(parts.reads_N < 0, parts.writes_N, parts.reads_N)
        return super().gated_recurrence(inputs, states_BC, replace(parts, reads_N=reads_N))


class ScalesTheFirstToken(FakeOps):
    """A recurrence that treats a new request like one with a state of zeros."""

    def gated_recurrence(self, inputs, states_BC, parts):
        states_BC[0] = 0
        reads_N = parts.reads_N.clamp(min=0)
        out_TC = super().gated_recurrence(inputs, states_BC, replace(parts, reads_N=reads_N))
        states_BC[0] = torch.nan
        return out_TC


class OmitsABias(FakeOps):
    """A recurrence whose gate of the decay has no bias."""

    def gated_recurrence(self, inputs, states_BC, parts):
        changed = replace(inputs, decay_bias_C=torch.zeros_like(inputs.decay_bias_C))
        return super().gated_recurrence(changed, states_BC, parts)


class SavesTheStateBeforeTheLastToken(FakeOps):
    """A recurrence whose saved states lack a token."""

    def gated_recurrence(self, inputs, states_BC, parts):
        out_TC = super().gated_recurrence(inputs, states_BC, parts)
        last_N = torch.tensor(parts.sizes).cumsum(0) - 1
        states_BC[parts.writes_N] = out_TC[(last_N - 1).clamp(min=0)].to(states_BC)
        return out_TC


@pytest.mark.costly
@pytest.mark.parametrize(
    "mutant",
    [
        ReadsNoState,
        ReadsTheStateOfNewRequests,
        WritesOnlyTheLastState,
        DecaysAfterTheUpdate,
        OmitsTheDeltaRule,
        IgnoresTheLimits,
        OmitsTheSkip,
        AddsTheEpsilonToTheRoot,
        NormalizesBeforeTheGate,
        ConvolvesAcrossRequests,
        ActivatesThePlainConvolution,
        RecursFromTheStateOfNewRequests,
        ScalesTheFirstToken,
        OmitsABias,
        SavesTheStateBeforeTheLastToken,
    ],
)
def test_a_faulty_recurrent_operation_is_detected(mutant):
    with pytest.raises(AssertionError):
        run_all(cases_of(mutant, "float32"))


@pytest.mark.costly
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("ops_cls", [FakeOps, TorchOps])
def test_correct_recurrent_operations_pass(ops_cls, dtype):
    cases = list(cases_of(ops_cls, dtype))
    assert len(cases) == 62
    run_all(cases)
