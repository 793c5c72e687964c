"""The conformance suite rejects faulty backends of multi-head latent attention."""

import pytest
import torch

from dovetail_devkit.fakes.attention import FakeAttentionBackend, FakeAttentionLayer
from dovetail_devkit.suites.attention import check_case, standard_cases

CPU = torch.device("cpu")


class ValuesAtTheEndOfKeys(FakeAttentionLayer):
    """Reads the values from the last features of the keys instead of the first."""

    def attend(self, q_QHD, k_LKD, v_LKD):
        size = self.context.value_size
        return super().attend(q_QHD, k_LKD, k_LKD[..., -size:] if size else v_LKD)


class ScoresOfValues(FakeAttentionLayer):
    """Computes scores without the key features that are not part of the values."""

    def attend(self, q_QHD, k_LKD, v_LKD):
        size = v_LKD.shape[-1]
        return super().attend(q_QHD[..., :size], k_LKD[..., :size], v_LKD)


class StoresValuesOnly(FakeAttentionLayer):
    """Stores zeros for the key features that are not part of the values."""

    def write(self, slots_2SKD, slots_T, k_TKD, v_TKD):
        if self.context.value_size:
            k_TKD = k_TKD.clone()
            k_TKD[..., v_TKD.shape[-1] :] = 0
        super().write(slots_2SKD, slots_T, k_TKD, v_TKD)


def backend_of(layer):
    return type(layer.__name__, (FakeAttentionBackend,), {"create_layer": staticmethod(layer)})


@pytest.mark.parametrize("layer", [ValuesAtTheEndOfKeys, ScoresOfValues, StoresValuesOnly])
def test_the_latent_attention_cases_reject_the_mutant(layer):
    cases = standard_cases(FakeAttentionBackend.capabilities)
    latent = [case for case in cases if case.value_size and case.dtype == "float32"]
    others = [case for case in cases if not case.value_size and case.dtype == "float32"]
    assert len(latent) > 5
    check_case(backend_of(layer), others[0], CPU)
    check_case(FakeAttentionBackend, latent[0], CPU)
    with pytest.raises(AssertionError, match=r"values of \d+ in the keys"):
        for case in latent:
            check_case(backend_of(layer), case, CPU)
