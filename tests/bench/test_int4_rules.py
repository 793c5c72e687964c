"""`bench/int4_rules.py`: the compared rules for the scales of int4."""

from itertools import pairwise

import int4_rules
import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from int4_rules import GROUP, RULES
from safetensors.torch import load_file

from end_to_end.checkpoints import make_checkpoint


def groups():
    return torch.randn(400, GROUP, generator=torch.Generator().manual_seed(0)).half().float()


def test_the_rule_greatest_equals_q4_0_of_gguf():
    weight_GK = groups()
    kind = GGMLQuantizationType.Q4_0
    exact_GK = dequantize(quantize(weight_GK.numpy(), kind), kind)  # scales are float16
    actual_GK = RULES["greatest"](weight_GK)
    assert np.median(np.abs(actual_GK.numpy() - exact_GK)) < 1e-3
    assert np.abs(actual_GK.numpy() - exact_GK).mean() < 0.01  # few codes are at a boundary


def test_each_rule_has_at_most_the_squared_error_of_the_rule_before_it():
    weight_GK = groups()
    errors = [(rule(weight_GK) - weight_GK).square().sum(-1) for rule in RULES.values()]
    for worse_G, better_G in pairwise(errors):
        assert (better_G <= worse_G * (1 + 1e-5)).all()
        assert better_G.mean() < 0.99 * worse_G.mean()
    zero_GK = torch.zeros(1, GROUP)
    assert all(torch.equal(rule(zero_GK), zero_GK) for rule in RULES.values())


def test_only_linear_layers_of_the_decoder_are_rounded(tmp_path):
    exact = tmp_path / "exact"
    make_checkpoint(exact, hidden_size=64, intermediate_size=64, head_dim=16)
    folder = int4_rules.write_rounded(exact, tmp_path / "rounded", RULES["greatest"])
    before, after = (load_file(path / "model.safetensors") for path in (exact, folder))
    assert before.keys() == after.keys()
    changed = {
        name for name, weight in before.items() if not torch.equal(weight.float(), after[name])
    }
    assert changed == {name for name in before if ".layers." in name and before[name].ndim == 2}
