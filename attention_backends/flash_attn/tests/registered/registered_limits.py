"""The reference kernels reject arguments that real kernels ignore or reject, and other signatures.
test_flash_attn_attention.py starts these tests in a separate process."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cpu_backends import NAME, PROVIDER
from random_step import SPEC, B, H, RandomStep
from reference_kernels import calls

from dovetail_attn_flash_attn.providers import signatures
from dovetail_attn_flash_attn.providers.provider import Needs, ProviderError

VLLM = "vllm.vllm_flash_attn.flash_attn_interface"
NEEDS = Needs(
    dtype="bfloat16", kv_cache_dtype="bfloat16", head_size=64, capability=90, block_size=B
)


def kernel_call(**changes):
    """Call the kernel of this process's provider as a layer does, with changed arguments."""
    step = RandomStep()
    metadata = step.builder().build(step.batch())
    layer = step.layer()
    step.attend(layer, metadata)  # selects the provider
    keywords = {}

    def record(*args, **kwargs):
        keywords.update(kwargs)
        raise StopIteration

    original = install(record)
    with pytest.raises(StopIteration):
        step.attend(layer, metadata)
    install(original)
    return original(**(keywords | changes))


def install(function):
    """Replace the function that the provider calls. Return the previous one."""
    if NAME == "fa3":
        previous = torch.ops.flash_attn_3.fwd
        torch.ops.flash_attn_3.fwd = function
        return previous
    previous, PROVIDER._forward = PROVIDER._forward, function
    return previous


def test_the_reference_kernel_accepts_the_call_of_the_backend():
    kernel_call()


def changes_of(name):
    ints = torch.zeros(4, dtype=torch.int32)
    starts = torch.zeros(5, dtype=torch.int32)
    narrow = torch.zeros(4, 1, dtype=torch.int32)
    small = torch.zeros(20, 24, 2, 64, dtype=torch.bfloat16)
    fa2 = {"window_size": [-1, 0]}, {"softmax_scale": None}
    if name == "vllm":
        return (
            *fa2[:1],
            {"cu_seqlens_k": starts},
            {"seqused_k": None},
            {"block_table": None},
            {"block_table": narrow},
            {"fa_version": 2},  # scheduler metadata would be ignored
            {"s_aux": torch.zeros(H)},  # float32
            {"k": small, "v": small},
            {"max_seqlen_q": 1},
            {"max_seqlen_k": 1},
            {"num_splits": 3},  # the scheduler metadata have a different number
        )
    if name == "fa3":
        return (
            {"cu_seqlens_k": starts},
            {"seqused_k": None},
            {"page_table": None},
            {"softcap": 1.0},
            {"sinks": torch.zeros(H)},
            {"num_splits": 300},
            {"num_splits": 3},
            {"window_size_left": 3},
            {"max_seqlen_q": 1},
            {"scheduler_metadata": ints},
            {"q_descale": torch.ones(4, 2)},
        )
    if name == "flash_attn":
        return (
            *fa2[:1],
            {"block_table": None},
            {"k": small, "v": small},
            {"cu_seqlens_k": starts.long()},
            {"dropout_p": 0.5},
            {"max_seqlen_q": 1},
            {"max_seqlen_k": 1},
        )
    return (
        {"cu_seq_k": None},
        {"seqused_k": None},
        {"num_splits": None},
        {"num_splits": 2},
        {"key": small, "value": small},
        {"max_q": 1},
    )


@pytest.mark.parametrize("changes", changes_of(NAME), ids=", ".join)
def test_the_reference_raises_an_error_for_inputs_that_a_kernel_ignores_or_rejects(changes):
    with pytest.raises(ValueError, match="the real kernel rejects, ignores or misreads this call"):
        kernel_call(**changes)


def test_unknown_keyword_arguments_raise_an_error():
    with pytest.raises((TypeError, RuntimeError), match="no_such"):
        kernel_call(no_such=1)


@pytest.mark.skipif(NAME != "torch", reason="other functions do not compare the window")
def test_torch_attention_is_not_causal_if_the_window_is_a_list():
    kernel_call(window_size=[-1, 0])
    assert calls[-1][1]["causal"] is False and calls[-2][1]["causal"] is True


def with_another_signature():
    """Return a function like that of the provider, with one more parameter."""

    def flash_attn_varlen_func(q, k, v, *, window_sizes=(-1, -1)):
        pass

    def varlen_attn_out(out, query, key, value, *, block_table: object = None):
        pass

    return varlen_attn_out if NAME == "torch" else flash_attn_varlen_func


@pytest.mark.skipif(NAME == "fa3", reason="an operator, not a function")
def test_the_error_for_a_provider_with_a_different_signature_names_it(monkeypatch):
    modules = {
        "vllm": (VLLM, "flash_attn_varlen_func"),
        "flash_attn": ("flash_attn", "flash_attn_varlen_func"),
        "torch": ("torch.nn.attention.varlen", "varlen_attn_out"),
    }
    module, name = modules[NAME]
    assert not PROVIDER.rejection(NEEDS, load=True)
    monkeypatch.setattr(sys.modules[module], name, with_another_signature())
    monkeypatch.setattr(PROVIDER, "_forward", None)
    reason = PROVIDER.rejection(NEEDS, load=True)
    assert reason.startswith(
        f"provider '{NAME}': the installed {name} does not have the signature of"
    )
    assert "a supported version (" in reason and "missing " in reason


@pytest.mark.skipif(NAME != "fa3", reason="not an operator")
def test_the_error_for_an_operator_with_a_different_schema_names_it(monkeypatch):
    (schema, _) = Path(__file__).with_name("fa3_schema.txt").read_text("utf-8").splitlines()
    library = torch.library.Library("flash_attn_3_other", "DEF")
    library.define(
        schema.replace("bool is_causal = False,", "bool is_causal = True,bool x = True,")
    )
    other = SimpleNamespace(
        fwd=torch.ops.flash_attn_3_other.fwd,
        get_scheduler_metadata=torch.ops.flash_attn_3.get_scheduler_metadata,
    )
    monkeypatch.setattr(torch.ops, "flash_attn_3", other)
    monkeypatch.setattr(PROVIDER, "_is_loaded", False)
    reason = PROVIDER.rejection(NEEDS, load=True)
    assert reason.startswith("provider 'fa3': the installed fwd does not have the signature of")
    assert "added bool is_causal = True, bool x = True; missing bool is_causal = False" in reason


@pytest.mark.skipif(NAME != "fa3", reason="not an operator")
def test_an_operator_that_an_import_does_not_register_is_rejected(monkeypatch):
    with pytest.raises(ProviderError, match=r"torch\.ops\.flash_attn_3\.bwd is not registered"):
        signatures.check_operator("fa3", "flash_attn_3", "bwd")


def test_the_kv_cache_spec_of_the_tests_is_supported():
    assert not PROVIDER.support(90).unmet(NEEDS) and SPEC.block_size == B
