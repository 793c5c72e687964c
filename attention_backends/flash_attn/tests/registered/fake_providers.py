"""Installs each provider without its kernels: operators for the CPU, and packages with functions.

An installation is never undone, so each process installs one provider.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import recorded_signature
import reference_kernels as reference
import torch
from reference_kernels import Kernel, Plan, calls, require

from dovetail_attn_flash_attn.providers.signatures import recorded

SCHEMAS = Path(__file__).with_name("fa3_schema.txt").read_text("utf-8").splitlines()
libraries = []
"""The library objects. An operator is unregistered when its object is freed."""


def module(name: str, folder: Path | None = None, **content: object) -> types.ModuleType:
    """Create and register a module. folder: the directory of a package."""
    created = types.ModuleType(name)
    created.__spec__ = ModuleSpec(name, None, is_package=folder is not None)
    if folder is not None:
        created.__path__ = [str(folder)]
        created.__spec__.submodule_search_locations = [str(folder)]
    vars(created).update(content)
    sys.modules[name] = created
    return created


def as_operator(name: str, implementation: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """Return a function that calls `implementation` through torch's dispatcher, like real kernels.

    A graph of the fake device contains operators only. implementation: writes `out`, if it is among
    its arguments, and returns a new tensor.
    """
    constants: list[tuple[list[str], dict[str, object]]] = []

    def kernel(tensors, out, index):
        names, keywords = constants[index]
        keywords = keywords | dict(zip(names, tensors, strict=True))
        return implementation(**keywords | ({} if out is None else {"out": out}))

    library = torch.library.Library("flash_attn_tests", "FRAGMENT")
    library.define(f"{name}(Tensor[] tensors, Tensor(out!)? out, int index) -> Tensor")
    library.impl(name, kernel, "CPU")
    libraries.append(library)

    def call(out=None, **keywords):
        names = [name for name, value in keywords.items() if isinstance(value, torch.Tensor)]
        tensors = [keywords.pop(name) for name in names]
        constants.append((names, keywords))
        return getattr(torch.ops.flash_attn_tests, name)(tensors, out, len(constants) - 1)

    return call


# --- FlashAttention 3 as an operator ------------------------------------------------------------


def fa3_plan(q, k, table, limits, *, causal, window, soft_cap) -> Plan:
    """Return the values that scheduler metadata depend on.

    limits: limits of the numbers of queries, keys, splits.
    """
    max_query_len, max_key_len, num_splits = limits
    return Plan(
        num_rows=table.shape[0],
        max_query_len=max_query_len,
        max_key_len=max_key_len,
        heads=(q.shape[1], k.shape[2], q.shape[2]),
        dtype=q.dtype,
        page_size=k.shape[1],
        causal=causal,
        window=window,
        has_soft_cap=soft_cap > 0,
        num_splits=num_splits,
    )


def by_name(operator, args, kwargs):
    """Return the arguments of an operator by name, with the defaults of its schema."""
    arguments = operator._schema.arguments
    values = {item.name: item.default_value for item in arguments if item.has_default_value()}
    values |= dict(zip([item.name for item in arguments], args, strict=False)) | kwargs
    return types.SimpleNamespace(**values)


def fa3_fwd(*args, **kwargs):
    """The operator `flash_attn_3::fwd` of a build without soft caps."""
    run = by_name(torch.ops.flash_attn_3.fwd.default, args, kwargs)
    calls.append(("fwd", vars(run)))
    require(run.page_table is not None and run.seqused_k is not None, "the cache is not paged")
    require(run.cu_seqlens_k is None, "cu_seqlens_k and seqused_k are both set")
    require(run.softcap == 0, "the build has no soft caps")
    require(run.num_splits <= 256, "too many splits")
    unused = ("k_new", "v_new", "q_v", "cu_seqlens_k_new", "seqused_q", "kv_batch_idx")
    unused += ("leftpad_k", "rotary_cos", "rotary_sin", "q_descale")
    require(all(getattr(run, name) is None for name in unused), "an argument is not None")
    window = (run.window_size_left, run.window_size_right)
    kernel = Kernel(
        q=run.q,
        k=run.k,
        v=run.v,
        starts=run.cu_seqlens_q,
        lens=run.seqused_k,
        table=run.page_table,
        max_query_len=run.max_seqlen_q,
        scale=run.softmax_scale,
        window=window,
        sinks=run.sinks,
        descales=(run.k_descale, run.v_descale),
    )
    max_key_len = run.page_table.shape[1] * run.k.shape[1]  # the kernel ignores max_seqlen_k
    limits = (run.max_seqlen_q, max_key_len, run.num_splits)
    plan = fa3_plan(
        run.q, run.k, run.page_table, limits, causal=run.is_causal, window=window, soft_cap=0
    )
    kernel = reference.fa3(kernel, plan, run.scheduler_metadata, page_multiple=1)
    lse_HT = reference.write(kernel, run.out)
    return run.out, lse_HT, torch.empty(0), torch.empty(0)


def fa3_scheduler_metadata(*args, **kwargs):
    """The operator `flash_attn_3::get_scheduler_metadata`."""
    run = by_name(torch.ops.flash_attn_3.get_scheduler_metadata.default, args, kwargs)
    calls.append(("scheduler_metadata", vars(run)))
    require(run.headdim == run.headdim_v, "values have a different head size")
    dtypes = {5: torch.float16, 15: torch.bfloat16, 24: torch.float8_e4m3fn}
    dtype = dtypes.get(run.qkv_dtype, run.qkv_dtype)
    return plan_of(
        run, run.num_heads, run.num_heads_k, dtype, (run.window_size_left,), run.is_causal
    )


def plan_of(run, num_heads, num_kv_heads, dtype, window, causal):
    """Return the metadata that the arguments of `get_scheduler_metadata` describe."""
    lens = run.seqused_k if hasattr(run, "seqused_k") else run.cache_seqlens
    require(lens.dtype == torch.int32 and lens.is_contiguous(), "the lengths are not int32")
    require(run.cu_seqlens_q is not None, "the metadata are not for rows of different lengths")
    plan = Plan(
        num_rows=run.batch_size,
        max_query_len=run.max_seqlen_q,
        max_key_len=run.max_seqlen_k,
        heads=(num_heads, num_kv_heads, run.headdim),
        dtype=dtype,
        page_size=run.page_size,
        causal=causal,
        window=(window[0], 0),
        has_soft_cap=run.has_softcap,
        num_splits=run.num_splits,
    )
    return reference.scheduler_metadata(plan, lens)


def install_fa3(folder: Path) -> None:
    """Register the operators with the schemas of tokenspeed-fa3, and the flags of its build."""
    library = torch.library.Library("flash_attn_3", "DEF")
    for schema in SCHEMAS:
        library.define(schema)
    library.impl("fwd", fa3_fwd, "CPU")
    library.impl("get_scheduler_metadata", fa3_scheduler_metadata, "CPU")
    libraries.append(library)
    flags = {"FLASHATTENTION_DISABLE_SOFTCAP": True, "FLASHATTENTION_DISABLE_HDIM96": True}
    module("flash_attn_config", CONFIG={"build_flags": flags})


# --- vLLM ---------------------------------------------------------------------------------------


def vllm_forward(**keywords):
    """The kernels of vLLM. Return the logsumexp."""
    run = types.SimpleNamespace(**keywords)
    calls.append((f"vllm {run.fa_version}", keywords))
    is_exclusive = (run.cu_seqlens_k is None) != (run.seqused_k is None)
    require(is_exclusive, "exactly one of cu_seqlens_k and seqused_k is needed")
    require(run.block_table is not None and run.seqused_k is not None, "the cache is not paged")
    require(isinstance(run.window_size, tuple), "the window is not a tuple")
    unused = ("q_v", "alibi_slopes", "q_descale", "cp_tot_seqused_k")
    require(all(keywords[name] is None for name in unused), "an argument is not None")
    require(not run.dropout_p and not run.return_attn_probs, "dropout, or probabilities")
    kernel = Kernel(
        q=run.q,
        k=run.k,
        v=run.v,
        starts=run.cu_seqlens_q,
        lens=run.seqused_k,
        table=run.block_table,
        max_query_len=run.max_seqlen_q,
        scale=run.softmax_scale,
        window=run.window_size,
        soft_cap=run.softcap,
        sinks=run.s_aux,
        descales=(run.k_descale, run.v_descale),
    )
    if run.fa_version == 2:
        require(
            run.scheduler_metadata is None and run.num_splits <= 1, "FA2 has no scheduler metadata"
        )
        kernel = reference.fa2(
            kernel, page_multiple=16, causal=run.causal, max_key_len=run.max_seqlen_k
        )
    else:
        require(run.fa_version == 3, f"fa_version {run.fa_version}")
        require(run.s_aux is None or run.q.shape[1] <= 64, "too many heads with sinks")
        limits = (run.max_seqlen_q, run.max_seqlen_k, run.num_splits)
        plan = fa3_plan(
            run.q,
            run.k,
            run.block_table,
            limits,
            causal=run.causal,
            window=run.window_size,
            soft_cap=run.softcap,
        )
        kernel = reference.fa3(kernel, plan, run.scheduler_metadata, page_multiple=16)
    return reference.write(kernel, run.out)


def vllm_scheduler_metadata(**keywords):
    """`get_scheduler_metadata` of vLLM."""
    run = types.SimpleNamespace(**keywords)
    calls.append(("scheduler_metadata", keywords))
    require(run.headdim_v in (None, run.headdim), "values have a different head size")
    require(isinstance(run.window_size, tuple), "the window is not a tuple")
    return plan_of(
        run, run.num_heads_q, run.num_heads_kv, run.qkv_dtype, run.window_size, run.causal
    )


def install_vllm(folder: Path) -> None:
    """Write the files that the provider looks for, and register the modules."""
    package = folder / "vllm"
    kernels = package / "vllm_flash_attn"
    kernels.mkdir(parents=True)
    names = ("flash_attn_interface.py", "_vllm_fa2_C.abi3.so", "_vllm_fa3_C.abi3.so")
    for name in names:
        (kernels / name).touch()
    module("vllm", package)
    module("vllm.vllm_flash_attn", kernels)
    forward = as_operator("vllm_forward", vllm_forward)

    def flash_attn_varlen_func(**keywords):
        lse_HT = forward(**keywords)
        return (keywords["out"], lse_HT) if keywords["return_softmax_lse"] else keywords["out"]

    functions = {}
    implementations = {
        "flash_attn_varlen_func": flash_attn_varlen_func,
        "get_scheduler_metadata": as_operator("vllm_scheduler_metadata", vllm_scheduler_metadata),
    }
    for name, implementation in implementations.items():
        lines = next(iter(recorded("vllm", name).values()))
        functions[name] = recorded_signature.with_signature(implementation, name, lines)
    available = {f"FA{number}_AVAILABLE": True for number in (2, 3)}
    module("vllm.vllm_flash_attn.flash_attn_interface", **functions, **available)


# --- flash-attn 2.x and torch -------------------------------------------------------------------


def flash_attn_forward(**keywords):
    """The kernels of flash-attn 2.x. Return the result."""
    run = types.SimpleNamespace(**keywords)
    calls.append(("flash_attn", keywords))
    require(run.block_table is not None, "the cache is not paged")
    require(isinstance(run.window_size, tuple), "the window is not a tuple")
    require(not run.dropout_p and run.alibi_slopes is None, "dropout or ALiBi")
    require(run.cu_seqlens_k.dtype == torch.int32, "cu_seqlens_k is not int32")
    kernel = Kernel(
        q=run.q,
        k=run.k,
        v=run.v,
        starts=run.cu_seqlens_q,
        lens=run.cu_seqlens_k.diff(),
        table=run.block_table,
        max_query_len=run.max_seqlen_q,
        scale=run.softmax_scale,
        window=run.window_size,
        soft_cap=run.softcap,
    )
    kernel = reference.fa2(
        kernel, page_multiple=256, causal=run.causal, max_key_len=run.max_seqlen_k
    )
    return reference.attend(kernel)[0].to(run.q.dtype)


def install_flash_attn(folder: Path) -> None:
    """Write the metadata of flash-attn 2.8.3, and register its module."""
    metadata = folder / "flash_attn-2.8.3.dist-info"
    metadata.mkdir()
    text = "Metadata-Version: 2.1\nName: flash-attn\nVersion: 2.8.3\n"
    (metadata / "METADATA").write_text(text, "utf-8")
    sys.path.append(str(folder))
    name = "flash_attn_varlen_func"
    lines = next(iter(recorded("flash_attn", name).values()))
    forward = as_operator("flash_attn_forward", flash_attn_forward)
    function = recorded_signature.with_signature(forward, name, lines)
    module("flash_attn", **{name: function})


def torch_forward(*args, **named):
    """`aten::_flash_attention_forward_no_dropout_inplace`, as torch's FlashAttention 2."""
    out, q, k, v, starts, key_starts, max_q, max_k, dropout, causal, debug = args
    named = {"seqused_k": None, "block_table": None, "num_splits": None} | named
    window = (named["window_size_left"], named["window_size_right"])
    calls.append(("torch", {"max_q": max_q, "causal": causal, "window": window, **named}))
    require(not dropout and not debug, "dropout or debugging")
    require(named["block_table"] is not None, "the cache is not paged")
    require(key_starts is not None, "FlashAttention 2 needs cu_seq_k")
    require(named["seqused_k"] is not None, "seqused_k is None")
    require(torch.equal(key_starts.diff(), named["seqused_k"]), "cu_seq_k has different lengths")
    require(named["num_splits"] == 1, "rows after the first are not written (pytorch #194167)")
    kernel = Kernel(
        q=q,
        k=k,
        v=v,
        starts=starts,
        lens=named["seqused_k"],
        table=named["block_table"],
        max_query_len=max_q,
        scale=named["scale"],
        window=window,
    )
    kernel = reference.fa2(kernel, page_multiple=256, causal=causal, max_key_len=max_k)
    reference.write(kernel, torch.empty_like(out) if reference.reorders_heads(kernel) else out)
    return torch.zeros(q.shape[1], q.shape[0])


def install_torch(folder: Path) -> None:
    """Register the operator of `varlen_attn_out` for the CPU."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward_no_dropout_inplace", torch_forward, "CPU")
    libraries.append(library)


INSTALLERS = {
    "vllm": install_vllm,
    "fa3": install_fa3,
    "flash_attn": install_flash_attn,
    "torch": install_torch,
}
