"""`explain` for a device that this machine does not have."""

import pytest

from dovetail.cli.app import main
from dovetail.config import EngineArgs
from dovetail.engine.choice import explain_choice
from dovetail.errors import ConfigError, PluginNotFoundError

pytest.importorskip("dovetail_attn_triton")
pytest.importorskip("dovetail_cuda")
pytest.importorskip("dovetail_rocm")


def explained(assume, kind="attention", **options):
    return explain_choice(kind, EngineArgs.from_kwargs(model="demo", **options), assume=assume)


def reasons_of(explanation, name):
    (verdict,) = [item for item in explanation.verdicts if item.name == name]
    return " ".join(verdict.reasons)


@pytest.mark.parametrize(
    ("assume", "chosen"),
    [
        ("cuda:sm_75", "torch"),
        ("cuda:sm_80", "triton"),
        ("cuda:sm_90", "triton"),
        ("cuda:sm_100", "triton"),
    ],
)
def test_the_attention_backend_is_chosen_for_the_assumed_device(assume, chosen):
    explanation = explained(assume)
    assert [item.name for item in explanation.chosen] == [chosen]
    assert explanation.criteria.requirements.architecture == assume.partition(":")[2]
    if chosen == "torch":
        for name in ("triton", "flashinfer", "flash_attn"):
            assert "has compute capability 7.5" in reasons_of(explanation, name)


def test_flash_attn_is_usable_on_an_assumed_device_if_its_provider_supports_the_block_size():
    """The provider in torch supports only block sizes that are multiples of 256."""
    explanation = explained("cuda:sm_90", attention_backend="flash_attn", block_size=256)
    assert [item.name for item in explanation.chosen] == ["flash_attn"]
    reasons = reasons_of(explained("cuda:sm_90"), "flash_attn")
    assert "block size 16 is not supported; set block_size to a multiple of 256" in reasons


@pytest.fixture
def flashinfer(monkeypatch):
    """Simulate a supported version of FlashInfer, and a CUDA compiler."""
    availability = pytest.importorskip("dovetail_attn_flashinfer").availability
    monkeypatch.setattr(availability, "version", lambda name: "0.7.2")
    monkeypatch.setattr(availability, "has_kernels", lambda: True)


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
def test_flashinfer_is_usable_on_an_assumed_device(flashinfer, architecture):
    explanation = explained(f"cuda:{architecture}", attention_backend="flashinfer")
    assert [item.name for item in explanation.chosen] == ["flashinfer"]
    explanation = explained(f"cuda:{architecture}", "ops", ops="flashinfer", dtype="bfloat16")
    assert [item.name for item in explanation.chosen] == ["flashinfer"]


def test_an_ops_plugin_that_does_not_support_the_dtype_of_the_model_is_rejected(flashinfer):
    explanation = explained("cuda:sm_90", "ops", ops="flashinfer", dtype="float32")
    assert "supports bfloat16, float16, but the dtype of the model is float32" in explanation.error


def test_a_backend_without_per_token_scales_needs_per_layer_scales_for_an_fp8_cache(flashinfer):
    fp8 = {"kv_cache_dtype": "fp8_e4m3", "dtype": "bfloat16"}
    explanation = explained("cuda:sm_90", attention_backend="flashinfer", **fp8)
    assert "set kv_cache_scales='layer', or choose attention_backend='triton'" in explanation.error
    layer = fp8 | {"kv_cache_scales": "layer"}
    explanation = explained("cuda:sm_90", attention_backend="flashinfer", **layer)
    assert [item.name for item in explanation.chosen] == ["flashinfer"]


def test_amd_devices_use_triton_if_its_kernels_are_checked_for_them():
    explanation = explained("rocm:gfx942")
    assert [item.name for item in explanation.chosen] == ["triton"]
    for name in ("flash_attn", "flashinfer"):
        assert "torch is built for ROCm, which the kernels do not support" in reasons_of(
            explanation, name
        )
    explanation = explained("rocm:gfx1100")
    assert [item.name for item in explanation.chosen] == ["torch"]
    assert "checked for gfx942 only" in reasons_of(explanation, "triton")
    assert [item.name for item in explained("rocm:gfx942", "ops").chosen] == ["triton"]
    assert [item.name for item in explained("rocm:gfx942", "worker").chosen] == ["rocm"]
    with pytest.raises(ConfigError, match=r"kv_cache_dtype='fp8_e4m3' is not supported on ROCm"):
        explained("rocm:gfx942", kv_cache_dtype="fp8_e4m3")


def test_the_worker_is_chosen_for_the_assumed_device():
    assert [item.name for item in explained("cuda:sm_80", "worker").chosen] == ["cuda"]


def test_the_configuration_is_checked_for_the_assumed_device():
    with pytest.raises(ConfigError, match=r"kv_cache_dtype='fp8_e4m3' needs .* has 8\.0"):
        explained("cuda:sm_80", kv_cache_dtype="fp8_e4m3")
    explanation = explained("cuda:sm_90", kv_cache_dtype="fp8_e4m3")
    assert [item.name for item in explanation.chosen] == ["triton"]


@pytest.mark.parametrize(
    ("assume", "kind", "error", "message"),
    [
        ("cuda", "attention", ConfigError, "assume='cuda' must be a platform and an architecture"),
        ("cuda:", "attention", ConfigError, "must be a platform and an architecture"),
        (
            "rocm:sm_90",
            "attention",
            ConfigError,
            "architecture 'sm_90' is not known: specify the name",
        ),
        (
            "cuda:gfx942",
            "attention",
            ConfigError,
            "architecture 'gfx942' is not known: specify sm_",
        ),
        ("cuda:sm_" + "9" * 99, "attention", ConfigError, "is not known"),
        ("cpu:sm_90", "attention", ConfigError, "the platform 'cpu' cannot assume a device"),
        ("cuda:sm_61", "attention", ConfigError, "6.1, but CUDA 13.0 needs 7.5 or higher"),
        ("cudax:sm_90", "attention", PluginNotFoundError, "cuda"),
        ("cuda:sm_90", "platform", ConfigError, "already names the platform"),
    ],
)
def test_invalid_assumed_devices_are_rejected(assume, kind, error, message):
    with pytest.raises(error, match=message):
        explained(assume, kind)


def test_the_command_names_the_assumed_device(capsys):
    options = ("--model", "demo", "--assume", "cuda:sm_100")
    assert main(["plugins", "explain", "attention", *options]) == 0
    shown = capsys.readouterr().out
    assert "on the platform cuda with an assumed device sm_100: triton" in shown
    assert "device cuda sm_100" in shown
