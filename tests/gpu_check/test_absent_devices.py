"""Without a GPU, options that require one are rejected with the reason and the alternatives.

These tests run in this process; `tests/wheels/test_device_wheels.py` tests installed wheels.
"""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch

from dovetail import LLM
from dovetail.engine.choice import explain_choice
from dovetail.errors import PluginError
from dovetail.interfaces import AttentionRequirements
from dovetail.plugins import PluginRegistry
from dovetail.plugins.selection import REJECTED, SELECTED, attention_refusals
from dovetail_devkit.expectation import SkipCase
from dovetail_devkit.kit import suite_cases
from dovetail_devkit.kit_subjects import Subjects
from dovetail_devkit.tiny_model import write_tiny_llama

MODULES = {"cuda": torch.cuda, "rocm": torch.cuda, "xpu": torch.xpu}
DEVICES = [name for name, module in MODULES.items() if not module.is_available()]
pytestmark = pytest.mark.skipif(not DEVICES, reason="every device is present")


@pytest.fixture
def model(tmp_path):
    return str(write_tiny_llama(tmp_path))


@pytest.mark.parametrize("name", DEVICES)
def test_all_unavailable_platforms_are_listed_with_the_reason(name):
    verdicts = {verdict.name: verdict for verdict in explain_choice("platform").verdicts}
    assert verdicts["cpu"].state == SELECTED
    assert verdicts[name].state == REJECTED
    assert all(len(reason) > 10 for reason in verdicts[name].reasons) and verdicts[name].reasons


@pytest.mark.parametrize("name", DEVICES)
def test_a_requested_platform_is_not_replaced_by_another(name, model):
    with pytest.raises(PluginError) as rejection:
        LLM(model, platform=name, skip_tokenizer_init=True)
    message = str(rejection.value)
    assert f"The platform {name!r} was requested, but it cannot be used here: " in message
    assert "Plugins that can be used here: cpu." in message


@pytest.mark.parametrize("name", DEVICES)
def test_a_worker_for_another_device_is_rejected(name, model):
    with pytest.raises(PluginError, match=f"needs device.{name}, which this platform does not"):
        LLM(model, platform="cpu", worker_cls=name, skip_tokenizer_init=True)
    explanation = explain_choice("worker", platform="cpu", worker_cls=name)
    assert (
        f"the plugin needs device.{name}, which this platform does not provide" in explanation.error
    )
    assert explanation.error.endswith("Plugins that can be used here: cpu.")


@pytest.mark.parametrize(
    ("kind", "option", "would_do"),
    [("attention", "attention_backend", "torch"), ("ops", "ops", "torch")],
)
def test_gpu_kernels_are_rejected_on_the_cpu(kind, option, would_do, model):
    options = {"platform": "cpu", option: "triton", "skip_tokenizer_init": True}
    with pytest.raises(PluginError) as rejection:
        LLM(model, **options)
    message = str(rejection.value)
    assert "'triton' was requested" in message and "cuda, xpu" in message and "cpu" in message
    assert would_do in message.partition("Plugins that can be used here: ")[2]
    explanation = explain_choice(kind, platform="cpu", **{option: "triton"})
    if kind == "ops":
        assert not explanation.chosen and "cuda, xpu" in explanation.error


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"head_size": 4096}, "head size 4096"),
        ({"dtype": "float64"}, "dtype float64"),
        ({"device_type": "cpu"}, "device cpu"),
        ({"features": frozenset({"cascade"})}, "cascade"),
    ],
)
def test_unsupported_attention_requirements_are_rejected_with_the_reason(change, reason):
    supported = {
        "device_type": "cuda",
        "dtype": "bfloat16",
        "kv_cache_dtype": "bfloat16",
        "head_size": 128,
        "num_heads": 8,
        "num_kv_heads": 2,
        "block_size": 16,
    }
    backend = PluginRegistry().load("attention", "triton")
    reasons = backend.capabilities.refusals(AttentionRequirements(**{**supported, **change}))
    assert any(reason in text for text in reasons), reasons
    assert not backend.capabilities.refusals(AttentionRequirements(**supported))
    assert attention_refusals(backend, AttentionRequirements(**{**supported, **change}))


@pytest.mark.parametrize(
    ("kind", "name", "min_passed"),
    [("platform", "cuda", 2), ("worker", "cuda", 0), ("attention", "triton", 0)],
)
def test_the_conformance_kit_skips_tests_for_a_missing_device_with_the_reason(
    kind, name, min_passed
):
    if "cuda" not in DEVICES:
        pytest.skip("there is a GPU")
    registry = PluginRegistry()
    passed, reasons = 0, []
    with ExitStack() as stack:
        subjects = Subjects(registry=registry, stack=stack)
        for case in suite_cases(kind, registry.load(kind, name), subjects):
            try:
                case.run()
                passed += 1
            except SkipCase as reason:
                reasons.append(str(reason))
    assert passed >= min_passed and len(reasons) >= 2
    assert len(set(reasons)) == 1 and len(reasons[0]) > 10
