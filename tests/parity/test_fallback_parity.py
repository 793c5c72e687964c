"""Compares models of the transformers fallback, which use the paged KV cache, with transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dovetail.errors import ModelError
from dovetail.interfaces.model import ModelContext
from dovetail_devkit.fakes.linear_method import FakeLinearMethod
from dovetail_transformers.model import TransformersForCausalLM
from parity.checkpoints import Checkpoint
from parity.commit_seed import commit_seed
from parity.fallback_checkpoints import REJECTED, SERVED, make_config, make_fallback
from parity.test_engine_parity import table_row
from parity.test_family_parity import RUN_CONFIGS, compare, one_thread

MAX_LEN = 664
LABELS = tuple(label for label in RUN_CONFIGS if label != "two ranks")
CASES = [pytest.param(name, label, id=f"{name}; {label}") for name in SERVED for label in LABELS]
__all__ = ["one_thread"]


@pytest.fixture(scope="module")
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    folder: Path = tmp_path_factory.mktemp("fallback")
    return make_fallback(request.param, folder, commit_seed()[0])


@pytest.mark.costly
@pytest.mark.sampled(160)
@pytest.mark.parametrize(("checkpoint", "label"), CASES, indirect=["checkpoint"])
def test_an_architecture_without_a_native_model_agrees_with_transformers(
    checkpoint: Checkpoint, label: str, record_property
) -> None:
    run_config = RUN_CONFIGS[label]
    ran, agreement = compare(checkpoint, run_config, MAX_LEN)
    case = f"{checkpoint.name}; {label}"
    record_property("parity", table_row(agreement, run_config.budget, case, ran.stats))
    agreement.check()


@pytest.mark.parametrize("model_type", REJECTED)
def test_an_architecture_that_would_compute_wrong_logits_is_rejected(model_type: str) -> None:
    context = ModelContext(
        hf_config=make_config(model_type, REJECTED[model_type]),
        dtype=torch.float32,
        device=torch.device("cpu"),
        linear_method=FakeLinearMethod,
        ops=None,
        max_model_len=64,
    )
    with torch.inference_mode(), pytest.raises(ModelError, match="transformers"):
        TransformersForCausalLM(context)
