"""The suites of ops, linear methods, models and weight loaders detect faulty plugins."""

from dataclasses import replace

import pytest
import torch
from conformance.subjects import check

from dovetail.errors import WeightError
from dovetail_devkit.fakes.linear_method import FakeLinearMethod
from dovetail_devkit.fakes.model import FakeModel
from dovetail_devkit.fakes.ops import FakeOps
from dovetail_devkit.fakes.weight_loader import FakeWeightLoader
from dovetail_torch.layers import TorchLinearMethod
from dovetail_torch.weights import SafetensorsLoader


class EpsOutside(FakeOps):
    """A norm that adds eps outside of the square root."""

    def rms_norm(self, x_TD, weight_D, eps):
        x = x_TD.double()
        root = x.square().mean(-1, keepdim=True).sqrt() + 100 * eps**0.5
        return (x / root * weight_D.double()).to(x_TD.dtype)


class OmitsTheResidual(FakeOps):
    """A norm that omits the residual."""

    def add_rms_norm(self, x_TD, residual_TD, weight_D, eps):
        _, sum_TD = super().add_rms_norm(x_TD, residual_TD, weight_D, eps)
        return self.rms_norm(x_TD, weight_D, eps), sum_TD


class NormsInPlace(FakeOps):
    """A norm that overwrites its input."""

    def rms_norm(self, x_TD, weight_D, eps):
        return x_TD.copy_(super().rms_norm(x_TD, weight_D, eps))


class SquaresInHalf(FakeOps):
    """A norm that sums squares in the dtype of its input."""

    def rms_norm(self, x_TD, weight_D, eps):
        return x_TD * (x_TD.square().mean(-1, keepdim=True) + eps).rsqrt() * weight_D


class RotatesBackwards(FakeOps):
    """RoPE with swapped signs of the sines."""

    def _rotate(self, x_TNS, cos_sin_TS):
        cos, sin = cos_sin_TS.chunk(2, dim=-1)
        return super()._rotate(x_TNS, torch.cat((cos, -sin), dim=-1))


class RotatesNeighbors(FakeOps):
    """RoPE that rotates adjacent values instead of the two halves."""

    def _rotate(self, x_TNS, cos_sin_TS):
        size = cos_sin_TS.shape[-1]
        order = [*range(0, size, 2), *range(1, size, 2)]
        x = x_TNS.clone()
        x[..., :size] = x_TNS[..., order]
        return super()._rotate(x, cos_sin_TS)


class IgnoresPositionsInRope(FakeOps):
    """RoPE that uses the index in the step as the position."""

    def rotary_embedding(self, q_THS, k_TKS, positions_T, cos_sin_PS):
        return super().rotary_embedding(q_THS, k_TKS, torch.arange(len(positions_T)), cos_sin_PS)


class SwapsGateAndUp(FakeOps):
    """An activation that uses the second half of its input as the gate."""

    def silu_and_mul(self, x_T2D):
        return super().silu_and_mul(torch.cat(x_T2D.chunk(2, dim=-1)[::-1], dim=-1))


class ReturnsFloat32(FakeOps):
    """Always returns float32."""

    def silu_and_mul(self, x_T2D):
        return super().silu_and_mul(x_T2D).float()


class NeverRenormalizes(FakeOps):
    """A router whose weights never have the sum 1."""

    def select_experts(self, x_TD, router, routing):
        return super().select_experts(x_TD, router, replace(routing, renormalize=False))


class WeighsWithTheCorrection(FakeOps):
    """A router that adds the correction to the weights too."""

    def select_experts(self, x_TD, router, routing):
        experts_TK, weights_TK = super().select_experts(x_TD, router, routing)
        if router.correction_E is not None:
            weights_TK = weights_TK + router.correction_E[experts_TK]
        return experts_TK, weights_TK


class IgnoresGroups(FakeOps):
    """A router that selects experts of all groups."""

    def select_experts(self, x_TD, router, routing):
        whole = replace(routing, num_groups=1, top_groups=1)
        return super().select_experts(x_TD, router, whole)


class DropsTokens(FakeOps):
    """Experts with a capacity: the first expert drops its last tokens."""

    def fused_experts(self, x_TD, experts_TK, weights_TK, layer):
        is_first = experts_TK == 0
        kept = is_first.flatten().cumsum(0).view(is_first.shape) <= max(4, len(x_TD) // 2)
        weights_TK = weights_TK * (kept | ~is_first)
        return super().fused_experts(x_TD, experts_TK, weights_TK, layer)


class MixesTokens(FakeOps):
    """Experts whose result includes a part of all other tokens."""

    def fused_experts(self, x_TD, experts_TK, weights_TK, layer):
        y_TD = super().fused_experts(x_TD, experts_TK, weights_TK, layer)
        return y_TD + 0 * y_TD.sum(0)


class NoBiasesOfExperts(FakeOps):
    """Experts without their biases."""

    def fused_experts(self, x_TD, experts_TK, weights_TK, layer):
        layer = replace(layer, gate_up_bias_EG=None, down_bias_ED=None)
        return super().fused_experts(x_TD, experts_TK, weights_TK, layer)


class NextExpert(TorchLinearMethod):
    """A linear method that computes the next expert."""

    def apply_experts(self, layers, x_TD, experts_TK, weights_TK):
        experts_TK = (experts_TK + 1) % layers.gate_up.shape.num_experts
        return super().apply_experts(layers, x_TD, experts_TK, weights_TK)


class NoBias(FakeLinearMethod):
    """A linear method that omits the bias."""

    def apply(self, layer, x_TI):
        y_TO = super().apply(layer, x_TI)
        return y_TO if layer.bias is None else y_TO - layer.bias


class LastLayerOnly(FakeLinearMethod):
    """A linear method that keeps one weight for all layers."""

    def pack(self, layer):
        self.layer = layer

    def apply(self, layer, x_TI):
        same = self.layer.weight.shape == layer.weight.shape
        return super().apply(self.layer if same else layer, x_TI)


class Transposed(FakeLinearMethod):
    """A linear method that registers transposed weights."""

    def create(self, layer, shape):
        super().create(layer, shape)
        layer.weight = torch.nn.Parameter(layer.weight.T.contiguous(), requires_grad=False)


class PartsReversed(FakeLinearMethod):
    """A linear method that returns the output features in reverse order."""

    def apply(self, layer, x_TI):
        return super().apply(layer, x_TI).flip(-1).contiguous()


class SumsInBfloat(FakeLinearMethod):
    """A linear method that rounds its inputs to bfloat16."""

    def apply(self, layer, x_TI):
        return super().apply(layer, x_TI.bfloat16().to(x_TI.dtype))


class ScalesItsInput(FakeLinearMethod):
    """A linear method that modifies its input in place."""

    def apply(self, layer, x_TI):
        y_TO = super().apply(layer, x_TI)
        x_TI.mul_(2)
        return y_TO


class ReturnsAView(FakeLinearMethod):
    """A linear method that returns a view of a larger tensor."""

    def apply(self, layer, x_TI):
        y_TO = super().apply(layer, x_TI)
        return torch.cat((y_TO, y_TO), dim=-1)[:, : y_TO.shape[1]]


class LooksAhead(FakeModel):
    """A model in which a token attends to the next token."""

    def forward(self, input_ids_T, positions_T, attention):
        return super().forward(input_ids_T.roll(-1), positions_T, attention)


class IgnoresPositions(FakeModel):
    """A model that uses indices in the step as positions."""

    def forward(self, input_ids_T, positions_T, attention):
        return super().forward(input_ids_T, torch.arange(len(input_ids_T)), attention)


class CallsAttentionTwice(FakeModel):
    """A model that calls each attention layer twice."""

    def forward(self, input_ids_T, positions_T, attention):
        super().forward(input_ids_T, positions_T, attention)
        return super().forward(input_ids_T, positions_T, attention)


class LastLogitsOnly(FakeModel):
    """A model that computes logits of the last position only."""

    def compute_logits(self, hidden_SD):
        return super().compute_logits(hidden_SD[-1:])


class NormalizesOverTheBatch(FakeModel):
    """A model that normalizes over the tokens of the batch instead of the features."""

    def forward(self, input_ids_T, positions_T, attention):
        hidden_TD = super().forward(input_ids_T, positions_T, attention)
        return hidden_TD - hidden_TD.mean(0)


class AcceptsAnyConfig(FakeModel):
    """A model that raises an untyped error for a wrong config.json."""

    def __init__(self, context):
        context.hf_config["vocab_size"] + 1
        super().__init__(context)


class SkipsVectors(FakeWeightLoader):
    """A loader that fills matrices but no vectors."""

    def fill(self, name, tensor):
        if tensor.ndim > 1:
            super().fill(name, tensor)


class FillsTwice(FakeWeightLoader):
    """A loader that writes zeros before the weights."""

    def fill(self, name, tensor):
        tensor.zero_()
        super().fill(name, tensor)


class FillsHalf(FakeWeightLoader):
    """A loader that fills only the first half of each weight."""

    def fill(self, name, tensor):
        super().fill(name, tensor[: (len(tensor) + 1) // 2])


class DrawsAnew(FakeWeightLoader):
    """A loader that creates different random weights each time."""

    def fill(self, name, tensor):
        tensor.copy_(torch.randn(tensor.shape))


class ReadsEarly(SafetensorsLoader):
    """A loader that reads the file in the constructor."""

    def __init__(self, context):
        super().__init__(context)
        if not (context.model_dir / "model.safetensors").exists():
            raise WeightError("nothing to read")


class Tolerant(SafetensorsLoader):
    """A loader that ignores missing weights."""

    def load(self, model):
        try:
            return super().load(model)
        except WeightError:
            return 1


class Silent(SafetensorsLoader):
    """A loader whose error messages do not name the weight."""

    def load(self, model):
        try:
            return super().load(model)
        except WeightError:
            raise WeightError("the checkpoint is wrong") from None


MUTANTS = {
    "ops": [
        EpsOutside,
        OmitsTheResidual,
        NormsInPlace,
        SquaresInHalf,
        RotatesBackwards,
        RotatesNeighbors,
        IgnoresPositionsInRope,
        SwapsGateAndUp,
        ReturnsFloat32,
        NeverRenormalizes,
        WeighsWithTheCorrection,
        IgnoresGroups,
        DropsTokens,
        MixesTokens,
        NoBiasesOfExperts,
    ],
    "linear_method": [
        NoBias,
        LastLayerOnly,
        Transposed,
        PartsReversed,
        SumsInBfloat,
        ScalesItsInput,
        ReturnsAView,
        NextExpert,
    ],
    "model": [
        LooksAhead,
        IgnoresPositions,
        CallsAttentionTwice,
        LastLogitsOnly,
        NormalizesOverTheBatch,
        AcceptsAnyConfig,
    ],
    "weight_loader": [
        SkipsVectors,
        FillsTwice,
        FillsHalf,
        DrawsAnew,
        ReadsEarly,
        Tolerant,
        Silent,
    ],
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("kind", "mutant"), [(kind, mutant) for kind, actual in MUTANTS.items() for mutant in actual]
)
def test_a_faulty_torch_plugin_is_detected(kind, mutant, tmp_path):
    with pytest.raises(AssertionError):
        check(kind, mutant, tmp_path)
