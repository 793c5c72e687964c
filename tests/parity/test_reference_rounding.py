"""The reference logits of recurrent checkpoints have rounding errors below the tolerance.

A state, or the norm of an output that is nearly zero, can amplify rounding errors. If the float32
logits of transformers itself are far from its float64 logits, no engine can agree with them.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from parity.checkpoints import VOCAB_SIZE
from parity.family_checkpoints import FAMILIES, make_model
from parity.margin_rule import TOLERANCE

NUM_TOKENS = 100
CASES = [
    ("mamba2", 1),
    ("qwen3_next", 1),
    # With rms_norm_eps 1e-6 and fast decays, these logits differ by 2.7e-4 and 1.2e-4.
    ("qwen3_next, dense layers", 1),
    ("qwen3_next, dense layers", 6),
]


class Float64(TorchFunctionMode):
    """Computes in float64 where the code of a model converts to float32."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        options: Mapping[str, Any] = kwargs or {}
        return func(*map(_widened, args), **{name: _widened(x) for name, x in options.items()})


def _widened(argument: Any) -> Any:
    return torch.float64 if argument is torch.float32 else argument


@pytest.mark.parametrize(("name", "seed"), CASES)
@torch.inference_mode()
def test_float32_logits_of_the_reference_are_near_its_float64_logits(name, seed):
    model = make_model(FAMILIES[name], name, seed)
    source = random.Random(seed)
    ids = torch.tensor([[source.randrange(VOCAB_SIZE) for _ in range(NUM_TOKENS)]])
    logits = model(ids, use_cache=False).logits
    with Float64():
        exact = copy.deepcopy(model).double()(ids, use_cache=False).logits
    assert exact.dtype == torch.float64
    assert float((logits - exact).abs().max()) <= TOLERANCE / 2
