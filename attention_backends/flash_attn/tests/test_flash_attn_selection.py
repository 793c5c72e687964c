"""Selection of a provider: the first that fits, and one reason for each provider if none fits."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from dovetail.errors import ConfigError
from dovetail.interfaces.attention import AttentionGroupContext, AttentionRequirements
from dovetail.interfaces.kv_cache import FullAttentionSpec
from dovetail_attn_flash_attn import backend, device_facts
from dovetail_attn_flash_attn.backend import FlashAttentionBackend
from dovetail_attn_flash_attn.providers import PROVIDERS, fa3, flash_attn, torch_varlen, vllm
from dovetail_attn_flash_attn.providers.provider import Needs, ProviderError

NAMES = ("vllm", "fa3", "flash_attn", "torch")
OPTION = "'flash_attn' with the option provider='torch' cannot compute .* provider 'torch': block"


def requirements(**changes):
    values = {
        "device_type": "cuda",
        "dtype": "bfloat16",
        "kv_cache_dtype": "bfloat16",
        "head_size": 128,
        "num_heads": 8,
        "num_kv_heads": 2,
        "block_size": 16,
    }
    return AttentionRequirements(**(values | changes))


def rejections(**changes):
    return list(FlashAttentionBackend.refusals(requirements(**changes)))


def test_the_capabilities_are_the_union_over_all_providers(installed):
    installed(*NAMES)
    supports = [provider.support(90) for provider in PROVIDERS]
    capabilities = FlashAttentionBackend.capabilities
    assert capabilities.features == backend.COMMON_FEATURES.union(*(s.features for s in supports))
    assert capabilities.dtypes == frozenset().union(*(support.dtypes for support in supports))
    assert capabilities.head_sizes == frozenset().union(
        *(support.head_sizes for support in supports)
    )
    caches = [support.kv_cache_dtypes for support in supports]
    assert capabilities.kv_cache_dtypes == capabilities.dtypes.union(*caches)
    assert capabilities.device_types == {"cuda"}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device_type": "cpu"}, "device cpu is not supported; supported: cuda"),
        (
            {"dtype": "float32"},
            "dtype float32 is not supported; supported: bfloat16, float16",
        ),
        (
            {"kv_cache_dtype": "fp8_e5m2"},
            "KV cache dtype fp8_e5m2 is not supported; supported: bfloat16, float16, fp8_e4m3",
        ),
        ({"head_size": 512}, "head size 512 is not supported; supported: 32, 64, 80, 96, 112"),
        ({"block_size": 8}, "block size 8 is not supported; supported: multiples of 16"),
        ({"features": frozenset({"cascade"})}, "cascade is required but not declared"),
    ],
)
def test_attention_requirements_that_are_not_declared_are_rejected(changes, reason):
    (cause,) = FlashAttentionBackend.capabilities.refusals(requirements(**changes))
    assert cause.startswith(reason)


def test_other_devices_are_rejected_based_on_the_capabilities_only():
    assert rejections(device_type="cpu") == []


def test_if_no_provider_is_installed_each_one_is_rejected_with_advice(gpu):
    assert rejections() == [
        "provider 'vllm': vLLM is not installed: run pip install vllm",
        "provider 'fa3': no package registers torch.ops.flash_attn_3: run pip install "
        "'dovetail-attn-flash-attn[fa3]', on a GPU of compute capability 9.0",
        "provider 'flash_attn': flash-attn is not installed: run pip install "
        "'dovetail-attn-flash-attn[flash-attn]'",
        f"provider 'torch': torch {torch.__version__} has no varlen_attn_out with block tables: "
        "install torch 2.13 or newer",
    ]


SINKS, CAP = frozenset({"sinks"}), frozenset({"soft_cap"})
FP8 = {"kv_cache_dtype": "fp8_e4m3", "features": frozenset({"kv_layer_scales"})}
WINDOW = frozenset({"sliding_window", "graphs", "padded_pages"})


@pytest.mark.parametrize(
    ("capability", "names", "changes", "loaded"),
    [
        (90, NAMES, {}, "vllm"),
        (80, NAMES, {}, "vllm"),
        (120, NAMES, {"features": WINDOW | CAP}, "vllm"),
        (90, NAMES, {"features": WINDOW | SINKS | CAP}, "vllm"),
        (90, NAMES[1:], {"features": WINDOW | SINKS}, "fa3"),
        (90, NAMES[1:], {"features": CAP, "block_size": 256}, "flash_attn"),
        (80, NAMES[1:], {"block_size": 512}, "flash_attn"),
        (100, NAMES[3:], {"block_size": 256, "features": WINDOW}, "torch"),
        (80, NAMES, {"head_size": 24}, "vllm"),
        (90, NAMES, FP8, "vllm"),
        (90, NAMES[1:], FP8, "fa3"),
    ],
)
def test_the_first_provider_that_meets_all_requirements_is_loaded(
    gpu, installed, capability, names, changes, loaded
):
    gpu(capability)
    installed(*names, flags=("SOFTCAP", "HDIM96"))
    assert rejections(**changes) == []
    assert installed.loaded == [loaded]


@pytest.mark.parametrize(
    ("capability", "names", "changes", "reason"),
    [
        (75, ["vllm"], {}, "'vllm': the GPU has compute capability 7.5, but the kernels need 8.0"),
        (80, ["fa3"], {}, "'fa3': the GPU has compute capability 8.0, but the kernels need 9.0"),
        (100, ["fa3"], {}, "'fa3': the GPU has compute capability 10.0, but the kernels need 9.0"),
        (75, ["flash_attn"], {"block_size": 256}, "'flash_attn': the GPU has compute capability"),
        (75, ["torch"], {"block_size": 256}, "'torch': the GPU has compute capability 7.5"),
        (90, ["flash_attn"], {}, "'flash_attn': block size 16 is not supported; set block_size to"),
        (90, ["torch"], {}, "'torch': block size 16 is not supported; set block_size to a multip"),
        (90, ["fa3"], {"features": CAP}, "'fa3': soft_cap is not supported: install provider 'v"),
        (90, ["fa3"], {"head_size": 96}, "'fa3': head size 96 is not supported; supported: 32, 6"),
        (80, ["vllm"], {"features": SINKS}, "'vllm': sinks is not supported: install provider"),
        (
            90,
            ["vllm"],
            {"features": SINKS, "num_heads": 96},
            "'vllm': sinks are supported for at most 64 query heads",
        ),
        (
            90,
            ["torch"],
            {"features": SINKS | CAP, "block_size": 256},
            "'torch': sinks is not supported: install provider 'vllm' or 'fa3', on a GPU of compute"
            " capability 9.0; soft_cap is not supported: install provider 'vllm', or 'flash_attn'",
        ),
        (
            90,
            ["vllm"],
            {"dtype": "float32", "kv_cache_dtype": "float32"},
            "'vllm': dtype float32 is not supported; supported: bfloat16, float16",
        ),
        (
            90,
            ["vllm"],
            {"kv_cache_dtype": "fp8_e5m2"},
            "'vllm': a KV cache of fp8_e5m2 is not supported; set kv_cache_dtype='auto'",
        ),
        (
            80,
            ["vllm"],
            FP8,
            "'vllm': a KV cache of fp8_e4m3 is not supported; install provider 'vllm' or 'fa3', on "
            "a GPU of compute capability 9.0, or set kv_cache_dtype='auto'",
        ),
        (
            90,
            ["fa3"],
            FP8 | {"dtype": "float16"},
            "'fa3': a KV cache of fp8_e4m3 is supported for models in bfloat16 only; set dtype=",
        ),
        (
            90,
            ["vllm"],
            FP8 | {"features": FP8["features"] | SINKS},
            "'vllm': sinks with a KV cache of fp8_e4m3 are untested; set kv_cache_dtype='auto'",
        ),
    ],
)
def test_the_rejection_of_each_provider_gives_the_cause_and_a_remedy(
    gpu, installed, capability, names, changes, reason
):
    gpu(capability)
    installed(*names, flags=("SOFTCAP", "HDIM96"))
    reasons = rejections(**changes)
    assert len(reasons) == len(NAMES) and not installed.loaded
    (matching,) = [text for text in reasons if text.startswith(f"provider {names[0]!r}")]
    assert matching.startswith(f"provider {reason}")


@pytest.mark.parametrize(
    ("flags", "changes", "reason"),
    [
        (["PAGEDKV"], {}, "compiled with FLASHATTENTION_DISABLE_PAGEDKV, so it has no paged cache"),
        (["VARLEN"], {}, "compiled with FLASHATTENTION_DISABLE_VARLEN, so it has no paged cache"),
        (["LOCAL"], {"features": WINDOW}, "sliding_window is not supported: install a build"),
        (["FP16"], {"dtype": "float16", "kv_cache_dtype": "float16"}, "dtype float16 is not supp"),
        (["HDIM256"], {"head_size": 224}, "head size 224 is not supported"),
        (["FP8"], FP8, "a KV cache of fp8_e4m3 is not supported"),
    ],
)
def test_features_that_an_fa3_build_lacks_are_rejected(gpu, installed, flags, changes, reason):
    installed("fa3", flags=flags)
    assert reason in rejections(**changes)[1]
    installed("fa3")
    assert rejections(**changes) == []


def test_a_driver_that_is_older_than_the_runtime_of_the_kernels_is_rejected(gpu, installed):
    installed("fa3")
    gpu(90, driver=12080)
    assert rejections()[1] == (
        "provider 'fa3': the NVIDIA driver supports CUDA 12.8, but the kernels need CUDA 13.0: "
        "install a newer driver"
    )
    gpu(90, driver=13010)
    assert rejections() == []
    installed("fa3", has_sinks=False)  # another distribution, with another CUDA runtime
    gpu(90, driver=12080)
    assert rejections() == []


@pytest.mark.parametrize("lack", ["library", "function", "status"])
def test_a_driver_whose_version_cannot_be_read_is_not_rejected(gpu, installed, monkeypatch, lack):
    def open_library(name):
        assert name == "libcuda.so.1"
        if lack == "library":
            raise OSError(f"{name}: cannot open shared object file")
        functions = {} if lack == "function" else {"cuDriverGetVersion": lambda pointer: 999}
        return SimpleNamespace(**functions)

    installed("fa3")
    gpu(90)
    monkeypatch.setattr(device_facts, "CDLL", open_library)
    assert device_facts.DeviceFacts().driver() == device_facts.UNKNOWN
    assert rejections() == []


def test_an_fa3_build_from_another_distribution_does_not_support_sinks(gpu, installed):
    installed("fa3", has_sinks=False)
    assert "sinks is not supported" in rejections(features=SINKS)[1]
    assert rejections(features=CAP) == []


@pytest.mark.parametrize("version", ["2.5.9", "1.0", "3.0.0b1"])
def test_unsupported_versions_of_flash_attn_are_rejected(gpu, installed, version):
    installed("flash_attn", version=version)
    assert rejections(block_size=256)[2] == (
        f"provider 'flash_attn': flash-attn {version} is installed, but 2.6 or a newer 2.x is "
        "needed: run pip install 'dovetail-attn-flash-attn[flash-attn]'"
    )


def test_a_vllm_installation_without_kernels_is_rejected(gpu, installed):
    installed("vllm", libraries=())
    assert "the installed vLLM has no FlashAttention kernels in" in rejections()[0]


def test_a_vllm_installation_without_the_fa3_library_uses_fa2(gpu, installed):
    installed("vllm", libraries=(2,))
    assert rejections() == []
    assert "sinks is not supported" in rejections(features=SINKS)[0]


def test_a_torch_installation_that_uses_untested_kernels_is_rejected(gpu, installed, monkeypatch):
    installed("torch")
    name = "current_flash_attention_impl"
    monkeypatch.setattr(torch.nn.attention, name, lambda: None, raising=False)
    assert rejections(block_size=256) == []
    monkeypatch.setattr(torch.nn.attention, name, lambda: "FA3")
    text = "FA3 is active in torch, which is untested: call torch.nn"
    assert text in rejections(block_size=256)[3]


@pytest.mark.parametrize("content", [{}, {"varlen_attn_out": lambda out, query, key, value: out}])
def test_the_error_for_a_torch_version_without_block_tables_names_the_version(monkeypatch, content):
    monkeypatch.setitem(sys.modules, torch_varlen.MODULE, SimpleNamespace(**content))
    needs = Needs(dtype="bfloat16", kv_cache_dtype="bfloat16", head_size=64, capability=80)
    reason = PROVIDERS[3].rejection(needs, load=False)
    assert reason == (
        f"provider 'torch': torch {torch.__version__} has no varlen_attn_out with block tables: "
        "install torch 2.13 or newer"
    )


@pytest.mark.parametrize(
    ("provider", "module", "text"),
    [
        (vllm.VllmProvider(), vllm, "vllm_flash_attn.flash_attn_interface cannot be imported"),
        (fa3.Fa3Provider(), fa3, r"flash_attn_3\._C cannot be imported"),
        (flash_attn.FlashAttnProvider(), flash_attn, "flash-attn cannot be imported"),
    ],
)
def test_a_provider_that_cannot_be_imported_is_rejected_with_the_cause(
    monkeypatch, provider, module, text
):
    def fail(name):
        raise OSError("libcudart.so.13: cannot open shared object file")

    monkeypatch.setattr(module, "import_module", fail)
    with pytest.raises(ProviderError, match=rf"{text} \(libcudart.*torch {torch.__version__[:4]}"):
        provider.load(90)


def test_a_vllm_installation_whose_library_does_not_load_is_rejected(monkeypatch, installed):
    installed("vllm")
    content = {"FA3_AVAILABLE": False, "FA3_UNAVAILABLE_REASON": "undefined symbol"}
    monkeypatch.setattr(vllm, "import_module", lambda name: SimpleNamespace(**content))
    with pytest.raises(ProviderError, match=r"its FlashAttention 3 kernels \(undefined symbol\)"):
        vllm.VllmProvider().load(90)


@pytest.mark.parametrize(
    ("dtype", "advice"),
    [("fp8_e4m3", "kv_cache_scales='layer'"), ("int8", "kv_cache_dtype='auto'")],
)
def test_caches_with_per_token_scales_are_rejected(gpu, installed, dtype, advice):
    installed(*NAMES)
    (reason,) = rejections(kv_cache_dtype=dtype)
    assert f"KV caches of {dtype} have a scale for each token and head" in reason
    assert f"set {advice}, or choose attention_backend='triton'" in reason


def test_rocm_builds_of_torch_are_rejected(gpu, installed, monkeypatch):
    installed(*NAMES)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    (reason,) = rejections()
    assert "torch is built for ROCm" in reason and "attention_backend='torch'" in reason


def test_heads_that_do_not_divide_evenly_are_rejected(gpu, installed):
    installed(*NAMES)
    assert rejections(num_kv_heads=3) == ["8 query heads are not a multiple of 3 key-value heads"]


def test_an_assumed_device_is_checked_without_importing_kernels(installed, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", None)
    installed(*NAMES)
    assert rejections(architecture="sm_90", features=SINKS) == []
    assert "compute capability 7.5" in rejections(architecture="sm_75")[0]
    assert "torch is built for ROCm" in rejections(architecture="gfx942")[0]
    assert not installed.loaded


def test_without_a_gpu_only_the_packages_are_checked(installed):
    assert not torch.cuda.is_available()
    installed("vllm")
    assert rejections(features=SINKS) == [] and not installed.loaded
    installed()
    assert len(rejections()) == len(NAMES)


def test_the_provider_option_excludes_other_providers(installed):
    installed(*NAMES)
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype="bfloat16")
    for name, is_usable in (("vllm", True), ("torch", False)):
        context = AttentionGroupContext(
            spec=spec,
            device=torch.device("cpu"),
            max_num_seqs=1,
            max_num_batched_tokens=1,
            max_model_len=1,
            options={"provider": name},
        )
        expected = nullcontext() if is_usable else pytest.raises(ConfigError, match=OPTION)
        with expected:
            FlashAttentionBackend.create_builder(context)
    assert installed.loaded == ["vllm"]


@pytest.mark.costly
def test_a_rejection_does_not_import_providers():
    program = (
        "import sys; from dovetail_attn_flash_attn.backend import FlashAttentionBackend as B;"
        "from dovetail.interfaces.attention import AttentionRequirements as R;"
        "B.refusals(R(device_type='cuda', dtype='bfloat16', kv_cache_dtype='bfloat16',"
        " head_size=64, num_heads=8, num_kv_heads=2, block_size=16, architecture='sm_90'));"
        "assert not {'vllm', 'flash_attn', 'flash_attn_3', 'flash_attn_interface'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
