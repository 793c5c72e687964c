"""The trtllm-gen kernels: attention of Blackwell GPUs over block tables.

The kernels need no plan. They have no soft cap and read whole blocks: masked values are multiplied
by 0, so the layer clears unused slots of values first (TensorRT-LLM does the same since
https://github.com/NVIDIA/TensorRT-LLM/pull/18925).

Shape legend: T tokens, H query heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import flashinfer.decode
import flashinfer.prefill
import flashinfer.utils
import torch

from dovetail.interfaces.kv_cache import FullAttentionSpec
from dovetail_attn_flashinfer.layout import PageTables, Part
from dovetail_attn_flashinfer.shape import Launch, LayerShape

KERNELS = "trtllm-gen"
LAYOUT = "HND"


class TrtllmLauncher:
    """Creates the launches of a KV-cache group, and owns the counters of its kernels.

    workspace: uint8, shared with the wrappers. max_num_seqs: maximum number of requests of a step.
    num_processors: the device's number of multiprocessors. pdl: whether kernels may start before
    the previous kernel has ended.
    """

    def __init__(
        self,
        spec: FullAttentionSpec,
        workspace: torch.Tensor,
        *,
        max_num_seqs: int,
        num_processors: int,
        pdl: bool,
    ) -> None:
        self._window_left = spec.sliding_window - 1 if spec.sliding_window else -1
        self._workspace = workspace
        self._max_num_seqs = max_num_seqs
        self._num_processors = num_processors
        self._pdl = pdl
        self._counters: dict[int, torch.Tensor] = {}

    def launch(self, shape: LayerShape, part: Part, tables: PageTables) -> Launch:
        """Return the launch that computes `part` for the layers of `shape`."""
        return TrtllmLaunch(
            workspace=self._workspace,
            counters=self._counters_of(shape.num_heads),
            part=part,
            tables=tables,
            scale=shape.scale,
            window_left=self._window_left,
            pdl=self._pdl,
        )

    def _counters_of(self, num_heads: int) -> torch.Tensor:
        """Return the counters for splits of contexts: zero at first; each launch resets them."""
        result = self._counters.get(num_heads)
        if result is None:
            num_bytes = flashinfer.utils.get_trtllm_gen_multi_ctas_kv_counter_bytes(
                self._max_num_seqs, num_heads, self._num_processors
            )
            with torch.inference_mode(False):
                device = self._workspace.device
                result = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
            self._counters[num_heads] = result
        return result


@dataclass(frozen=True, slots=True, kw_only=True)
class TrtllmLaunch:
    """A launch for the requests of a part of a step."""

    workspace: torch.Tensor
    counters: torch.Tensor
    part: Part
    tables: PageTables
    scale: float
    window_left: int
    pdl: bool

    def __call__(
        self,
        q_THD: torch.Tensor,
        kv_cache: torch.Tensor,
        sinks_H: torch.Tensor | None,
        out_THD: torch.Tensor,
    ) -> None:
        """Compute attention for the tokens of the part, and write the result to `out_THD`."""
        part, tables = self.part, self.tables
        # FlashInfer copies strided queries, too: with them, the kernels' results are incorrect.
        query = q_THD[part.tokens].contiguous()
        both: dict[str, object] = {
            "kv_cache": kv_cache,
            "workspace_buffer": self.workspace,
            "block_tables": tables.table_RM[part.rows],
            "seq_lens": tables.key_lens_R[part.rows],
            "bmm1_scale": self.scale,
            "bmm2_scale": 1.0,
            "window_left": self.window_left,
            "out": out_THD[part.tokens],
            "kv_layout": LAYOUT,
            "enable_pdl": self.pdl,
            "sinks": sinks_H,
            "multi_ctas_kv_counter_buffer": self.counters,
            "backend": KERNELS,
        }
        if part.is_decode:
            flashinfer.decode.trtllm_batch_decode_with_kv_cache(
                query=query, max_seq_len=max(part.key_lens), q_len_per_req=1, **both
            )
            return
        starts = slice(part.rows.start, part.rows.stop + 1)
        assert tables.query_start_R1 is not None and tables.key_start_R1 is not None
        query_start_R1, key_start_R1 = tables.query_start_R1[starts], tables.key_start_R1[starts]
        if part.rows.start:
            query_start_R1 = query_start_R1 - query_start_R1[:1]
            key_start_R1 = key_start_R1 - key_start_R1[:1]
        flashinfer.prefill.trtllm_batch_context_with_kv_cache(
            query=query,
            max_q_len=max(part.query_lens),
            max_kv_len=max(part.key_lens),
            batch_size=len(part.query_lens),
            cum_seq_lens_q=query_start_R1,
            cum_seq_lens_kv=key_start_R1,
            **both,
        )
