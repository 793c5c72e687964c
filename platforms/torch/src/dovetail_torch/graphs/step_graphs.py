"""The graphs of a runner's steps, captured at startup.

Steps with one token per request are padded to the next captured number of requests and replayed as
one graph, with the attention and the LM head. Other steps are padded to the next captured
number of tokens and replayed in pieces; attention runs between the pieces, with this step's
metadata. Steps without a graph run eagerly. Padding uses a row (batch slot) without a request: its
tokens have position 0 in block 0.
Legend: T tokens of the step, D hidden size, V vocabulary, H query heads, K key-value heads.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from dovetail.interfaces import AttentionBatch, Model, RotaryArgs
from dovetail_torch.attention_table import AttentionTable, new_result
from dovetail_torch.graph_dispatcher import GraphCounts, Outputs
from dovetail_torch.graphs.capture import GraphCapture, ReplayableGraph
from dovetail_torch.graphs.plan import GraphPlan, plan_graphs
from dovetail_torch.progress_bar import progress_bar
from dovetail_torch.runner.device_inputs import DeviceBatch, DeviceInputs
from dovetail_torch.runner.kv_cache import AttentionState
from dovetail_torch.runner.loaded_model import LoadedModel

logger = logging.getLogger(__name__)

_MIB = 1 << 20


class CapturableBuilder(Protocol):
    """The metadata builder of a backend with the feature "graphs", whose layers can be captured.

    `build_for_graph` returns metadata for a batch of decodes, with one token per request. The
    launches of the layers may depend on the number of requests, but not on the lengths. Before each
    replay the tensors of that batch get new values at the same addresses. `seq_lens` contains the
    maximum length in `build_for_graph`, and the actual lengths in `update_for_replay`. The latter
    writes everything that the host computes to memory at a fixed address.
    """

    def build_for_graph(self, batch: AttentionBatch) -> Any:
        """Return metadata that stays valid, beside other metadata, until the engine shuts down."""

    def update_for_replay(self, metadata: Any, batch: AttentionBatch) -> None:
        """Update a result of `build_for_graph` for a replay. Does not wait for the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _DecodeGraph:
    """A captured step of decodes. metadata: one per builder."""

    graph: ReplayableGraph
    outputs: Outputs
    metadata: Sequence[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _AttentionCall:
    """An attention call between two pieces. The tensors are at fixed addresses."""

    index: int
    q_THD: torch.Tensor
    k_TKD: torch.Tensor
    v_TKD: torch.Tensor
    rotary_args: RotaryArgs | None
    out_THD: torch.Tensor


class _PiecewiseCapture:
    """Splits a capture at each attention call.

    pieces: the graphs and the calls between them, in order.
    """

    def __init__(self, capture: GraphCapture) -> None:
        self._capture = capture
        self.pieces: list[ReplayableGraph | _AttentionCall] = []

    def attend(
        self,
        index: int,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        rotary_args: RotaryArgs | None,
    ) -> torch.Tensor:
        """End the piece, record the call, and begin the next piece. Return the memory of results.

        The call keeps its tensors, so that later pieces do not reuse their memory.
        """
        out_THD = new_result(q_THD, v_TKD)
        self.pieces.append(self._capture.end())
        call = _AttentionCall(
            index=index,
            q_THD=q_THD,
            k_TKD=k_TKD,
            v_TKD=v_TKD,
            rotary_args=rotary_args,
            out_THD=out_THD,
        )
        self.pieces.append(call)
        self._capture.begin()
        return out_THD


class StepGraphs:
    """Captures and replays the graphs of one runner. counts: the number of steps of each kind."""

    def __init__(
        self,
        model: Model,
        attention: AttentionState,
        inputs: DeviceInputs,
        capture: GraphCapture,
        plan: GraphPlan,
    ) -> None:
        """inputs: computes the inputs of steps, and pads decode steps once graphs exist."""
        self._model = model
        self._attention = attention
        self._inputs = inputs
        self._capture = capture
        self._plan = plan
        self._decodes: dict[int, _DecodeGraph] = {}
        self._mixed: dict[int, tuple[list[ReplayableGraph | _AttentionCall], torch.Tensor]] = {}
        self.counts = GraphCounts()

    @torch.inference_mode()
    def capture(self, *, progress: bool) -> None:
        """Capture all graphs of the plan, largest first. Log their number, time and memory.

        progress: whether to show a progress bar. If a capture fails, the graphs of its kind of
        steps are not used, and a warning names the cause.
        """
        start_s, before = time.perf_counter(), self._capture.memory_bytes()
        mixed, decodes = self._plan.mixed_sizes, self._plan.decode_sizes
        with progress_bar("Capturing graphs", len(mixed) + len(decodes), shown=progress) as advance:
            if not self._capture_all("mixed steps", self._capture_mixed, mixed, advance):
                self._mixed.clear()
            if self._capture_all("decodes", self._capture_decode, decodes, advance):
                self._inputs.decode_sizes = decodes
            else:
                self._decodes.clear()
        self.counts.eager = 0  # without the steps of the warm-up
        used = (self._capture.memory_bytes() - before) / _MIB
        logger.info(
            "Captured %d graphs of decodes and %d of other steps in %.1f s; they use %.0f MiB.",
            len(self._decodes),
            len(self._mixed),
            time.perf_counter() - start_s,
            used,
        )

    def _capture_all(
        self,
        kind: str,
        capture_one: Callable[[int], None],
        sizes: Sequence[int],
        advance: Callable[[], object],
    ) -> bool:
        """Capture graphs of one kind. Return False, and warn, if a capture fails."""
        try:
            with self._capture.capturing():
                for size in reversed(sizes):
                    capture_one(size)
                    advance()
        except RuntimeError as error:
            name = type(self._model).__name__
            cause = str(error).partition("\n")[0]
            message = "The model %s runs without graphs of %s: a capture failed: %s"
            logger.warning(message, name, kind, cause)
            return False
        finally:
            self._attention.table.capture = None
        return True

    def run(self, batch: DeviceBatch) -> Outputs | None:
        """Replay the graph of a step and return its outputs, or None if it has no graph.

        The outputs are hidden states, and for decodes also logits, valid until the next step.
        """
        num_tokens = batch.plan.total_num_tokens
        result = self._decodes.get(batch.num_padded)
        if result is not None:
            for place, (builder, group) in enumerate(self._attention.builders):
                builder.update_for_replay(result.metadata[place], batch.attention[group])
            result.graph.replay()
            self.counts.replayed += 1
            return tuple(output[:num_tokens] for output in result.outputs)
        sizes = self._plan.mixed_sizes
        place = bisect_left(sizes, num_tokens)
        if place == len(sizes) or sizes[place] not in self._mixed:
            self.counts.eager += 1
            return None
        pieces, hidden_TD = self._mixed[sizes[place]]
        table = self._attention.table
        table.metadata = [
            builder.build(batch.attention[group]) for builder, group in self._attention.builders
        ]
        narrowed = _NarrowedRotary(num_tokens)
        for piece in pieces:
            if isinstance(piece, _AttentionCall):
                _attend(table, piece, num_tokens, narrowed)
            else:
                piece.replay()
        self.counts.replayed += 1
        return (hidden_TD[:num_tokens],)

    def _capture_decode(self, size: int) -> None:
        inputs, attention = self._inputs, self._attention
        step = inputs.padding_step(size, decodes=True)
        table = attention.table
        metadata = [
            builder.build_for_graph(step.attention[group]) for builder, group in attention.builders
        ]
        table.metadata, table.needed_S = metadata, None

        def forward() -> Outputs:
            hidden_TD = self._model.forward(step.input_ids_T, step.positions_T, table)
            return hidden_TD, self._model.compute_logits(hidden_TD)

        forward()  # compiles kernels, which is not possible during a capture
        self._capture.begin()
        outputs = forward()
        graph = self._capture.end()
        self._decodes[size] = _DecodeGraph(graph=graph, outputs=outputs, metadata=metadata)
        self.counts.captured += 1

    def _capture_mixed(self, size: int) -> None:
        step, table = self._inputs.padding_step(size, decodes=False), self._attention.table
        table.metadata = [
            builder.build(step.attention[group]) for builder, group in self._attention.builders
        ]
        table.needed_S = None
        self._model.forward(step.input_ids_T, step.positions_T, table)
        table.capture = capture = _PiecewiseCapture(self._capture)
        self._capture.begin()
        hidden_TD = self._model.forward(step.input_ids_T, step.positions_T, table)
        capture.pieces.append(self._capture.end())
        table.capture = None
        self._mixed[size] = capture.pieces, hidden_TD
        self.counts.captured += 1


class _NarrowedRotary:
    """Caches rotary arguments without the padding. Most layers of a step share the same ones."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._found: dict[int, RotaryArgs] = {}

    def of(self, args: RotaryArgs | None) -> RotaryArgs | None:
        """Return `args` for the step's tokens."""
        if args is None or len(args.positions_T) == self._num_tokens:
            return args
        key = args.cos_sin_PR.data_ptr()
        if key not in self._found:
            self._found[key] = replace(args, positions_T=args.positions_T[: self._num_tokens])
        return self._found[key]


def _attend(
    table: AttentionTable, call: _AttentionCall, num_tokens: int, narrowed: _NarrowedRotary
) -> None:
    """Run attention of the step's tokens, without the padding."""
    tensors = (call.q_THD, call.k_TKD, call.v_TKD, call.out_THD)
    if len(call.q_THD) != num_tokens:
        tensors = tuple(tensor[:num_tokens] for tensor in tensors)
    table.run_into(call.index, tensors, narrowed.of(call.rotary_args))


def make_step_graphs(
    loaded: LoadedModel, attention: AttentionState, inputs: DeviceInputs
) -> StepGraphs | None:
    """Return the graphs of a runner, not captured yet, or None if every step runs eagerly.

    Logs why fewer steps are captured than the options request.
    """
    parts = loaded.device_parts
    if parts.graph_capture is None or not attention.builders:
        return None
    options = parts.graph_options
    if not attention.supports_graphs and options.mode in ("full_and_piecewise", "full"):
        logger.warning(
            "graph_mode=%r: the attention backend %r does not support graphs, so %s.",
            options.mode,
            attention.backend_name,
            "all steps run eagerly" if options.mode == "full" else "attention runs between graphs",
        )
    plan = plan_graphs(options, loaded.limits, capturable=attention.supports_graphs)
    if plan == GraphPlan():
        return None
    return StepGraphs(loaded.model, attention, inputs, parts.graph_capture, plan)
