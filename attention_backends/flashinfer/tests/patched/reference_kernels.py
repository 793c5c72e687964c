"""Replaces FlashInfer's compiled kernels with torch functions, so that its code runs on a CPU.

Only the factories of kernel modules are replaced; wrappers, plans, checks and argument lists are
FlashInfer's own. Names of arguments are read from the sources in the installed package. Each
function raises ValueError for an argument that the real kernel ignores or misreads, and multiplies
masked values by 0 as the kernels do, so that NaN in a value that a kernel reads gives NaN.

Import this module only in a separate process, because the replacements are not undone.

Shape legend: R requests, H query heads, K key-value heads, D head size, N blocks, B block size,
Q queries and L positions of a request.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import torch
from reference_attention import (
    ALIGNMENT,
    HEAD_SIZES,
    Rule,
    attend,
    calls,
    library,
    named,
    numbers,
    require,
)
from reference_tables import run_tables

prefill = import_module("flashinfer.prefill")
decode = import_module("flashinfer.decode")
utils = import_module("flashinfer.utils")
SOURCES = Path(prefill.__file__).parent / "data" / "csrc"


def python_arguments(function, name: str) -> list[str]:
    """Return the argument names of the function `name` inside `function`."""
    tree = ast.parse(inspect.getsource(inspect.unwrap(function)))
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    (result,) = (node for node in nodes if node.name == name)
    return [argument.arg for argument in result.args.args]


def native_arguments(file: str, name: str) -> list[str]:
    """Return the argument names of the C++ function `name`."""
    text = (SOURCES / file).read_text("utf-8")
    (result,) = re.findall(rf"^(?:void|[\w:]+<int64_t>) {name}\(([^)]*)\) {{", text, re.MULTILINE)
    return [re.split(r"\s", item.partition("=")[0].strip())[-1] for item in split_arguments(result)]


def split_arguments(text: str) -> list[str]:
    """Split at the commas that are outside of angle brackets."""
    return re.split(r",(?![^<]*>)", text)


PLAN_NAMES = {
    "fa2": native_arguments("batch_prefill.cu", "BatchPrefillWithKVCachePlan"),
    "fa3": native_arguments("batch_prefill_sm90.cu", "BatchPrefillWithKVCacheSM90Plan"),
}
RUN_NAMES = python_arguments(prefill.get_batch_prefill_module, "paged_run")
JIT_RUN_NAMES = [
    *python_arguments(prefill.get_batch_prefill_jit_module, "paged_run"),
    "enable_pdl",
]
TRTLLM = "trtllm_fmha_kernel_launcher.cu"
TABLE_NAMES = {
    "decode": native_arguments(TRTLLM, "trtllm_paged_attention_decode"),
    "context": native_arguments(TRTLLM, "trtllm_paged_attention_context"),
}


def check_tensors(run: SimpleNamespace, module: SimpleNamespace) -> None:
    """Check dtypes, shapes, strides and alignment of a launch."""
    k, v = run.paged_k_cache, run.paged_v_cache
    require(k.stride() == v.stride(), "keys and values have different strides")
    tensors = (("q", run.q, module.dtype), ("o", run.o, module.dtype))
    for name, tensor, dtype in (
        *tensors,
        ("k", k, module.cache_dtype),
        ("v", v, module.cache_dtype),
    ):
        require(tensor.dtype == dtype, f"{name} is {tensor.dtype}, not {dtype}")
        require(tensor.shape[-1] == module.head_size, f"{name} has heads of {tensor.shape[-1]}")
        require(tensor.stride(-1) == 1, f"the last stride of {name} is not 1")
        size = tensor.element_size()
        strides = [tensor.data_ptr(), *(size * s for s in tensor.stride()[:-1])]
        require(not any(x % ALIGNMENT for x in strides), f"{name} is not aligned")
    require(module.head_size in HEAD_SIZES, f"head size {module.head_size}")
    require(module.backend == "fa3" or run.o.is_contiguous(), "o is strided")
    require(run.layout == utils.TensorLayout["HND"].value, "the layout is not HND")
    for name in ("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len"):
        tensor = getattr(run, name)
        require(tensor.dtype == torch.int32 and tensor.is_contiguous(), f"{name}: int32, dense")
    if run.maybe_lse is not None:
        require(run.maybe_lse.is_contiguous(), "lse is strided")


FP8_TYPES = (torch.float8_e4m3fn, torch.float8_e5m2)

IGNORED = (
    "maybe_custom_mask",
    "maybe_mask_indptr",
    "maybe_prefix_len_ptr",
    "maybe_token_pos_in_items_ptr",
    "maybe_max_item_len_ptr",
    "scale_q",
    "scale_k",
    "scale_v",
    "sinks",
    "key_block_scales",
    "value_block_scales",
    "skip_softmax_threshold_scale_factor",
)
"""Arguments that FA2 and FA3 ignore for causal attention with queries of 16 bits."""


NUMBER_BYTES = 8
plans: dict[int, SimpleNamespace] = {}
launches: dict[int, tuple[WrapperModule, SimpleNamespace, Rule]] = {}
"""All plans and launches of the process, by number. A captured launch may run again."""

FIXED_IN_GRAPHS = (
    "enable_cuda_graph",
    "total_num_rows",
    "batch_size",
    "num_qo_heads",
    "num_kv_heads",
    "page_size",
    "causal",
    "window_left",
)
"""The arguments of a plan that determine the launch, which a graph does not change."""

TENSORS = (
    "int_workspace_buffer",
    "q",
    "paged_k_cache",
    "paged_v_cache",
    "qo_indptr",
    "paged_kv_indptr",
    "paged_kv_indices",
    "paged_kv_last_page_len",
    "o",
    "maybe_lse",
)


def compute_launch(number: int, *tensors: torch.Tensor | None) -> None:
    """Run the launch of this number on the host. Its tensors are host tensors."""
    module, run, rule = launches[number]
    named_tensors = dict(zip(TENSORS, tensors, strict=False))
    module.compute(
        SimpleNamespace(**(vars(run) | named_tensors)), replace(rule, sinks_H=tensors[-1])
    )


library.define(
    "paged_run(int number, Tensor numbers, Tensor q, Tensor k, Tensor v, Tensor qo_indptr, "
    "Tensor indptr, Tensor indices, Tensor last, Tensor(a!) o, Tensor(b!)? lse, Tensor? sinks) "
    "-> ()"
)
library.impl("paged_run", compute_launch, "CPU")


class WrapperModule:
    """The kernels of a wrapper: `plan` and `paged_run` of one combination of template parameters.

    extra: names of additional arguments of a module with a custom attention variant.
    """

    ragged_run = None  # for keys that are not in pages

    def __init__(self, backend: str, dtypes, head_sizes, *, window: bool, cap: bool, extra=()):
        require(backend in PLAN_NAMES, f"unknown kernels {backend!r}")
        dtype, cache_dtype, out_dtype = dtypes
        require(dtype == out_dtype, f"queries and results have the dtypes {dtypes}")
        require(dtype in (torch.bfloat16, torch.float16), f"dtype {dtype}")
        other = cache_dtype in FP8_TYPES and backend == "fa2"
        require(cache_dtype == dtype or other, f"{backend} with a cache of {cache_dtype}")
        require(len({*head_sizes}) == 1, f"head sizes {head_sizes}")
        self.module = SimpleNamespace(
            backend=backend, dtype=dtype, cache_dtype=cache_dtype, head_size=head_sizes[0]
        )
        self.window, self.cap, self.extra = window, cap, tuple(extra)

    def plan(self, *args):
        """Store the arguments, and write the plan's number to the device as the kernels do."""
        names = PLAN_NAMES[self.module.backend]
        require(len(args) == len(names), f"plan has {len(args)} arguments, not {len(names)}")
        plan = named(names, args)
        for name in ("qo_indptr", "kv_indptr", "kv_len_arr"):
            require(getattr(plan, name).device.type == "cpu", f"{name} is not on the host")
        require(plan.head_dim_qk == self.module.head_size, "plan has a different head size")
        require((plan.window_left >= 0) == self.window, "the module has no window, or needs one")
        require(plan.num_qo_heads % plan.num_kv_heads == 0, "heads do not divide evenly")
        calls.append(("plan " + self.module.backend, vars(plan) | {"module": self}))
        number = next(numbers)
        # The tensors of the wrapper are not kept.
        kept = {name: x for name, x in vars(plan).items() if not name.endswith("buffer")}
        plans[number] = SimpleNamespace(**kept)
        pinned = plan.page_locked_int_workspace_buffer[:NUMBER_BYTES]
        pinned.view(torch.int64).fill_(number)
        plan.int_workspace_buffer[:NUMBER_BYTES].copy_(pinned, non_blocking=True)
        return [number]

    def paged_run(self, *args):
        """Compute attention for all requests of the last plan, as one operation of the device."""
        run, rule = self._read_extra(args) if self.extra else self._read(args)
        number = next(numbers)
        launches[number] = (self, run, rule)
        tensors = [getattr(run, name) for name in TENSORS]
        torch.ops.flashinfer_reference.paged_run(number, *tensors, rule.sinks_H)

    def compute(self, run: SimpleNamespace, rule: Rule) -> None:
        """Compute attention on the host."""
        plan = self._plan_of(run)
        check_tensors(run, self.module)
        starts, ends = run.qo_indptr.tolist(), run.paged_kv_indptr.tolist()
        require(starts == plan.qo_indptr.tolist(), "qo_indptr differs from the plan")
        require(ends == plan.kv_indptr.tolist(), "paged_kv_indptr differs from the plan")
        room = len(run.paged_kv_indices)
        is_graph = plan.enable_cuda_graph
        require(ends[-1] <= room if is_graph else ends[-1] == room, "the page list is too short")
        require(run.q.shape[0] == starts[-1] == plan.total_num_rows, "q has a different length")
        require(run.paged_k_cache.shape[2] == plan.page_size, "another page size")
        calls.append(("run " + self.module.backend, vars(run) | {"module": self}))
        for row, last in enumerate(run.paged_kv_last_page_len.tolist()):
            pages = run.paged_kv_indices[ends[row] : ends[row + 1]].long()
            require(len(pages) > 0 and 1 <= last <= plan.page_size, "a row without keys")
            length = (len(pages) - 1) * plan.page_size + last
            require(length == int(plan.kv_len_arr[row]), "lengths differ from the plan")
            tokens = slice(starts[row], starts[row + 1])
            num_queries = tokens.stop - tokens.start
            require(rule.causal or num_queries == 1, "a run of several tokens without a mask")
            require(num_queries <= length, "more queries than keys")
            keys, values = (
                taken(cache, pages).transpose(1, 2).flatten(0, 1)[:length]
                for cache in (run.paged_k_cache, run.paged_v_cache)
            )
            out, lse = attend(run.q[tokens], keys, values, rule)
            run.o[tokens] = out.to(run.o.dtype)
            if run.maybe_lse is not None:
                run.maybe_lse[tokens] = lse

    def _plan_of(self, run: SimpleNamespace) -> SimpleNamespace:
        """Return the plan in the device's memory, which must be compatible with the launch."""
        current = int(run.int_workspace_buffer[:NUMBER_BYTES].view(torch.int64))
        (number,) = run.plan_info_vec
        plan, launched = plans[current], plans[number]
        if not launched.enable_cuda_graph:
            require(current == number, "another plan has overwritten the plan")
        for name in FIXED_IN_GRAPHS:
            require(getattr(plan, name) == getattr(launched, name), f"{name} has changed")
        require(run.window_left == plan.window_left, "the window differs from the plan")
        return plan

    def _read(self, args) -> tuple[SimpleNamespace, Rule]:
        run = named(RUN_NAMES, args)
        for name in IGNORED:
            require(getattr(run, name) is None, f"{name} is ignored")
        require((run.logits_soft_cap > 0) == self.cap, "the module has no cap, or needs one")
        rule = Rule(
            scale=run.sm_scale,
            soft_cap=run.logits_soft_cap,
            window_left=run.window_left,
            causal=run.mask_mode == utils.MaskMode.CAUSAL.value,
        )
        return run, rule

    def _read_extra(self, args) -> tuple[SimpleNamespace, Rule]:
        require(self.extra == ("sink", "sm_scale"), f"unknown variant with {self.extra}")
        run = named([*JIT_RUN_NAMES, *self.extra], args)
        require(run.sink is not None and run.sink.dtype == torch.float32, "sinks are not float32")
        require(run.sink.shape == (run.q.shape[1],), "sinks have a different shape")
        require(run.maybe_lse is None, "the logsumexp of this variant contains the sinks")
        require(run.mask_mode == utils.MaskMode.CAUSAL.value, "the mask is not causal")
        return run, Rule(scale=run.sm_scale, window_left=run.window_left, sinks_H=run.sink)


def taken(cache: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """Return the pages `pages` of a cache. torch cannot index tensors of all dtypes."""
    if cache.dtype not in FP8_TYPES:
        return cache[pages]
    return cache.view(torch.uint8)[pages].view(cache.dtype)


@functools.cache
def batch_prefill_module(backend, *args) -> WrapperModule:
    """Stand in for FlashInfer's `get_batch_prefill_module`."""
    *dtypes, index_dtype, size_qk, size_vo, position, window, cap, fp16 = args
    require(index_dtype == torch.int32, f"indices are {index_dtype}")
    require(position == 0 and not fp16, "positions are encoded, or sums are float16")
    return WrapperModule(backend, dtypes, (size_qk, size_vo), window=window, cap=cap)


loaded_variants: dict[str, tuple] = {}


def customized_module(backend, uri, *args, **kwargs) -> WrapperModule:
    """Stand in for `get_customize_batch_prefill_module`.

    A second module of the same name is not loaded.
    """
    built = (backend, args[:6])
    require(
        loaded_variants.setdefault(uri, built) == built, f"{uri} is loaded with different sizes"
    )
    *dtypes, index_dtype, size_qk, size_vo = args[:6]
    require(index_dtype == torch.int32, f"indices are {index_dtype}")
    extra = (*args[6], *args[8])
    window = kwargs["use_sliding_window"]
    sizes = (size_qk, size_vo)
    return WrapperModule(backend, dtypes, sizes, window=window, cap=False, extra=extra)


NUM_PROCESSORS = 8
_empty = torch.empty


def pageable_empty(*args, pin_memory=False, **kwargs) -> torch.Tensor:
    """Stand in for `torch.empty`, which cannot lock pages without an accelerator."""
    return _empty(*args, **kwargs)


def install() -> None:
    """Replace the compiled kernels and the functions that need an accelerator."""
    trtllm = SimpleNamespace(
        trtllm_paged_attention_decode=functools.partial(
            run_tables, "decode", TABLE_NAMES["decode"]
        ),
        trtllm_paged_attention_context=functools.partial(
            run_tables, "context", TABLE_NAMES["context"]
        ),
    )
    torch.empty = pageable_empty
    for module in (prefill, decode):
        module.get_batch_prefill_module = batch_prefill_module
        module.get_trtllm_gen_fmha_module = lambda: trtllm
        module.get_device_sm_count = lambda device: NUM_PROCESSORS
    prefill.get_customize_batch_prefill_module = customized_module
