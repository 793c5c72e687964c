"""Replaces FlashInfer's compiled kernels by torch functions, so that its Python code runs on a CPU.

Only the factories of kernel modules are replaced; wrappers, plans, checks and argument lists are
FlashInfer's own. Names of arguments are read from the sources in the installed package. Each
function raises ValueError for an argument that the real kernel ignores or misreads, and multiplies
masked values by 0 as the kernels do, so that NaN in a value that a kernel reads gives NaN.

Import this module only in a process of its own: the replacements are not undone.

Shape legend: R runs, H query heads, K key-value heads, D head size, N blocks, B block size,
Q queries and L positions of a run.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import re
from collections import deque
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import torch

HEAD_SIZES = (64, 128, 256)
PAGE_SIZES_OF_TABLES = (16, 32, 64)
ALIGNMENT = 16
LOG_2_E = 1.4426950408889634

prefill = import_module("flashinfer.prefill")
decode = import_module("flashinfer.decode")
utils = import_module("flashinfer.utils")
SOURCES = Path(prefill.__file__).parent / "data" / "csrc"

MAX_CALLS = 40
calls: deque[tuple[str, dict]] = deque(maxlen=MAX_CALLS)
"""The latest plans and launches: name, and arguments by name."""

_numbers = itertools.count(1)


def require(right: bool, text: str) -> None:
    """Raise ValueError with `text` unless `right`."""
    if not right:
        raise ValueError(f"the kernel would not do what was requested: {text}")


def python_arguments(function, name: str) -> list[str]:
    """Return the argument names of the function `name` inside `function`."""
    tree = ast.parse(inspect.getsource(inspect.unwrap(function)))
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    (found,) = (node for node in nodes if node.name == name)
    return [argument.arg for argument in found.args.args]


def native_arguments(file: str, name: str) -> list[str]:
    """Return the argument names of the C++ function `name`."""
    text = (SOURCES / file).read_text("utf-8")
    (found,) = re.findall(rf"^(?:void|[\w:]+<int64_t>) {name}\(([^)]*)\) {{", text, re.MULTILINE)
    return [re.split(r"\s", one.partition("=")[0].strip())[-1] for one in split_arguments(found)]


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


def named(names: list[str], args: tuple) -> SimpleNamespace:
    """Return positional arguments by name. Missing arguments at the end are None."""
    require(len(args) <= len(names), f"{len(args)} arguments for {len(names)} parameters")
    return SimpleNamespace(**(dict.fromkeys(names) | dict(zip(names, args, strict=False))))


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What a query sees, and how scores are computed. sinks_H: float32 or None."""

    scale: float
    soft_cap: float = 0.0
    window_left: int = -1
    causal: bool = True
    sinks_H: torch.Tensor | None = None


def attend(q_QHD, k_LKD, v_PKD, rule: Rule):
    """Return the attention of a run, float32 [Q, H, D], and its logsumexp to base 2, [Q, H].

    The queries are the last Q of L positions. v_PKD: the values that the kernel reads, P ≥ L.
    """
    num_queries, length = q_QHD.shape[0], k_LKD.shape[0]
    group = q_QHD.shape[1] // k_LKD.shape[1]
    keys, values = (x.float().repeat_interleave(group, 1) for x in (k_LKD, v_PKD))
    scores_HQL = torch.einsum("qhd,lhd->hql", q_QHD.float(), keys) * rule.scale
    if rule.soft_cap:
        scores_HQL = rule.soft_cap * torch.tanh(scores_HQL / rule.soft_cap)
    keys_L = torch.arange(length)
    own_Q1 = keys_L[length - num_queries :, None]
    seen_QL = keys_L <= own_Q1 if rule.causal else torch.ones(num_queries, length).bool()
    if rule.window_left >= 0:
        seen_QL &= keys_L >= own_Q1 - rule.window_left
    scores_HQL = scores_HQL.masked_fill(~seen_QL, float("-inf"))
    if rule.sinks_H is not None:
        sinks_HQ1 = rule.sinks_H[:, None, None].expand(-1, num_queries, 1)
        scores_HQL = torch.cat([scores_HQL, sinks_HQ1], -1)
    weights_HQL = scores_HQL.softmax(-1)[..., :length]
    weights_HQP = torch.nn.functional.pad(weights_HQL, (0, values.shape[0] - length))
    out_QHD = torch.einsum("hqp,phd->qhd", weights_HQP, values)
    return out_QHD, scores_HQL.logsumexp(-1).T * LOG_2_E


def check_tensors(run: SimpleNamespace, module: SimpleNamespace) -> None:
    """Check dtypes, shapes, strides and alignment of a launch."""
    k, v = run.paged_k_cache, run.paged_v_cache
    require(k.stride() == v.stride(), "keys and values have different strides")
    for name, tensor in (("q", run.q), ("k", k), ("v", v), ("o", run.o)):
        require(tensor.dtype == module.dtype, f"{name} is {tensor.dtype}, not {module.dtype}")
        require(tensor.shape[-1] == module.head_size, f"{name} has heads of {tensor.shape[-1]}")
        require(tensor.stride(-1) == 1, f"the last stride of {name} is not 1")
        strides = [tensor.data_ptr(), *(2 * s for s in tensor.stride()[:-1])]
        require(not any(x % ALIGNMENT for x in strides), f"{name} is not aligned")
    require(module.head_size in HEAD_SIZES, f"head size {module.head_size}")
    require(module.backend == "fa3" or run.o.is_contiguous(), "o is strided")
    require(run.layout == utils.TensorLayout["HND"].value, "the layout is not HND")
    for name in ("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len"):
        tensor = getattr(run, name)
        require(tensor.dtype == torch.int32 and tensor.is_contiguous(), f"{name}: int32, dense")
    if run.maybe_lse is not None:
        require(run.maybe_lse.is_contiguous(), "lse is strided")


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
"""Arguments that FA2 and FA3 ignore for causal attention over a cache of 16 bits."""


class WrapperModule:
    """The kernels of a wrapper: `plan` and `paged_run` of one combination of template parameters.

    extra: names of additional arguments of a module with a custom attention variant.
    """

    ragged_run = None  # for keys that are not in pages

    def __init__(self, backend: str, dtypes, head_sizes, *, window: bool, cap: bool, extra=()):
        require(backend in PLAN_NAMES, f"unknown kernels {backend!r}")
        require(len({*dtypes}) == 1, f"queries, cache and results have the dtypes {dtypes}")
        require(dtypes[0] in (torch.bfloat16, torch.float16), f"dtype {dtypes[0]}")
        require(len({*head_sizes}) == 1, f"head sizes {head_sizes}")
        self.module = SimpleNamespace(backend=backend, dtype=dtypes[0], head_size=head_sizes[0])
        self.window, self.cap, self.extra = window, cap, tuple(extra)
        self.plans: dict[int, tuple[int, SimpleNamespace]] = {}

    def plan(self, *args):
        """Store the arguments. A kernel reads them from the wrapper's memory of integers."""
        names = PLAN_NAMES[self.module.backend]
        require(len(args) == len(names), f"plan has {len(args)} arguments, not {len(names)}")
        plan = named(names, args)
        for name in ("qo_indptr", "kv_indptr", "kv_len_arr"):
            require(getattr(plan, name).device.type == "cpu", f"{name} is not on the host")
        require(plan.head_dim_qk == self.module.head_size, "plan has another head size")
        require((plan.window_left >= 0) == self.window, "the module has no window, or needs one")
        require(plan.num_qo_heads % plan.num_kv_heads == 0, "heads do not divide evenly")
        calls.append(("plan " + self.module.backend, vars(plan) | {"module": self}))
        number, address = next(_numbers), plan.int_workspace_buffer.data_ptr()
        # The tensors of the wrapper are not kept.
        kept = {name: x for name, x in vars(plan).items() if not name.endswith("buffer")}
        self.plans[address] = (number, SimpleNamespace(**kept))
        return [number]

    def paged_run(self, *args):
        """Attend for all runs of the last plan."""
        run, rule = self._read_extra(args) if self.extra else self._read(args)
        plan = self._plan_of(run)
        check_tensors(run, self.module)
        starts, ends = run.qo_indptr.tolist(), run.paged_kv_indptr.tolist()
        require(starts == plan.qo_indptr.tolist(), "qo_indptr differs from the plan")
        require(ends == plan.kv_indptr.tolist(), "paged_kv_indptr differs from the plan")
        require(ends[-1] == len(run.paged_kv_indices), "the page list has another length")
        require(run.q.shape[0] == starts[-1] == plan.total_num_rows, "q has another length")
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
                cache[pages].transpose(1, 2).flatten(0, 1)[:length]
                for cache in (run.paged_k_cache, run.paged_v_cache)
            )
            out, lse = attend(run.q[tokens], keys, values, rule)
            run.o[tokens] = out.to(run.o.dtype)
            if run.maybe_lse is not None:
                run.maybe_lse[tokens] = lse

    def _plan_of(self, run: SimpleNamespace) -> SimpleNamespace:
        number, plan = self.plans[run.int_workspace_buffer.data_ptr()]
        require([number] == run.plan_info_vec, "another plan has overwritten the plan")
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
        require(run.sink.shape == (run.q.shape[1],), "sinks have another shape")
        require(run.maybe_lse is None, "the logsumexp of this variant contains the sinks")
        require(run.mask_mode == utils.MaskMode.CAUSAL.value, "the mask is not causal")
        return run, Rule(scale=run.sm_scale, window_left=run.window_left, sinks_H=run.sink)


@functools.cache
def batch_prefill_module(backend, *args) -> WrapperModule:
    """Replace `get_batch_prefill_module`."""
    *dtypes, index_dtype, size_qk, size_vo, position, window, cap, fp16 = args
    require(index_dtype == torch.int32, f"indices are {index_dtype}")
    require(position == 0 and not fp16, "positions are encoded, or sums are float16")
    return WrapperModule(backend, dtypes, (size_qk, size_vo), window=window, cap=cap)


loaded_variants: dict[str, tuple] = {}


def customized_module(backend, uri, *args, **kwargs) -> WrapperModule:
    """Replace `get_customize_batch_prefill_module`. A second module of a name is not loaded."""
    built = (backend, args[:6])
    require(loaded_variants.setdefault(uri, built) == built, f"{uri} is loaded with other sizes")
    *dtypes, index_dtype, size_qk, size_vo = args[:6]
    require(index_dtype == torch.int32, f"indices are {index_dtype}")
    extra = (*args[6], *args[8])
    window = kwargs["use_sliding_window"]
    sizes = (size_qk, size_vo)
    return WrapperModule(backend, dtypes, sizes, window=window, cap=False, extra=extra)


def run_tables(kind: str, *args) -> None:
    """Attend as a trtllm-gen kernel: over block tables, with whole blocks of values."""
    names = TABLE_NAMES[kind]
    require(len(args) == len(names), f"{len(args)} arguments for {len(names)} parameters")
    run = named(names, args)
    run.q, run.o, run.layout, run.maybe_lse = run.query, run.out, 0, None
    calls.append((kind, vars(run)))
    k_NKBD, v_NKBD = run.key_cache, run.value_cache
    size, head_size = k_NKBD.shape[2:]
    require(head_size in HEAD_SIZES, f"head size {head_size}")
    require(size in PAGE_SIZES_OF_TABLES, f"page size {size}")
    require(k_NKBD.stride() == v_NKBD.stride() and k_NKBD.stride(-1) == 1, "strides of the cache")
    require(run.q.is_contiguous() and run.o.is_contiguous(), "q or out is strided")
    require(run.q.dtype == k_NKBD.dtype == run.o.dtype, "dtypes differ")
    for name in ("block_tables", "seq_lens"):
        tensor = getattr(run, name)
        require(tensor.dtype == torch.int32 and tensor.is_contiguous(), f"{name}: int32, dense")
    counters = run.multi_ctas_kv_counter_buffer
    require(not counters.any() and counters.data_ptr() % ALIGNMENT == 0, "counters are not zero")
    need = max(run.batch_size * run.q.shape[1], run.sm_count)
    require(counters.numel() >= 4 * need, "too few counters")
    require(run.bmm2_scale == 1.0 and run.lse is None, "scales or lse")
    sinks_H = run.attention_sinks
    require(sinks_H is None or sinks_H.dtype == torch.float32, "sinks are not float32")
    starts = list(range(run.batch_size + 1))
    if kind == "context":
        require(run.is_causal, "the mask is not causal")
        require(run.cum_seq_lens_q.dtype == run.cum_seq_lens_kv.dtype == torch.int32, "int32")
        starts = run.cum_seq_lens_q.tolist()
        ends = [0, *run.seq_lens.cumsum(0).tolist()]
        require(run.cum_seq_lens_kv.tolist() == ends, "cum_seq_lens_kv differs from seq_lens")
    else:
        require(run.max_q_len == 1, "several queries per run")
    require(starts[0] == 0 and starts[-1] == run.q.shape[0], "q has another length")
    require(int(run.seq_lens.max()) == run.max_kv_len, "max_kv_len")
    rule = Rule(scale=run.bmm1_scale, window_left=run.window_left, sinks_H=sinks_H)
    for row, length in enumerate(run.seq_lens.tolist()):
        pages = run.block_tables[row, : -(-length // size)].long()
        tokens = slice(starts[row], starts[row + 1])
        require(0 < tokens.stop - tokens.start <= run.max_q_len, "max_q_len")
        keys, values = (x[pages].transpose(1, 2).flatten(0, 1) for x in (k_NKBD, v_NKBD))
        run.o[tokens] = attend(run.q[tokens], keys[:length], values, rule)[0].to(run.o.dtype)


NUM_PROCESSORS = 8
_empty = torch.empty


def pageable_empty(*args, pin_memory=False, **kwargs) -> torch.Tensor:
    """Replace `torch.empty`, which cannot lock pages without an accelerator."""
    return _empty(*args, **kwargs)


def install() -> None:
    """Replace the compiled kernels, and what cannot run without an accelerator."""
    trtllm = SimpleNamespace(
        trtllm_paged_attention_decode=functools.partial(run_tables, "decode"),
        trtllm_paged_attention_context=functools.partial(run_tables, "context"),
    )
    torch.empty = pageable_empty
    for module in (prefill, decode):
        module.get_batch_prefill_module = batch_prefill_module
        module.get_trtllm_gen_fmha_module = lambda: trtllm
        module.get_device_sm_count = lambda device: NUM_PROCESSORS
    prefill.get_customize_batch_prefill_module = customized_module
