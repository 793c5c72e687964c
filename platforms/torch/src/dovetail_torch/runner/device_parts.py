"""The objects of the platform and the op provider that the runner uses."""

from __future__ import annotations

from dataclasses import dataclass

from dovetail_torch.device_runtime import AsyncDevice
from dovetail_torch.graph_provider import GraphProvider
from dovetail_torch.graphs.capture import GraphCapture
from dovetail_torch.graphs.plan import USUAL_OPTIONS, GraphOptions
from dovetail_torch.layers.step_inputs import prepare_inputs
from dovetail_torch.runner.device_inputs import PrepareInputs
from dovetail_torch.sampling.blocks import best_tokens
from dovetail_torch.sampling.device_access import DrawTokens
from dovetail_torch.sampling.grammar import MaskTokens, mask_tokens
from dovetail_torch.sampling.sampler import BestTokens


@dataclass(frozen=True, kw_only=True)
class DeviceParts:
    """best_tokens, mask_tokens: functions of the op provider.

    graph_provider: None to run every step eagerly.
    asynchronous: lets the host run ahead of the device; None if steps are synchronous.
    graph_capture: captures graphs of an asynchronous device; None to run every step eagerly.
    graph_options: the sizes of these graphs. shows_progress: whether their capture shows a
    progress bar.
    prepare_inputs, draw_tokens: functions of the op provider, for asynchronous devices only;
    draw_tokens may be None.
    """

    best_tokens: BestTokens = best_tokens
    mask_tokens: MaskTokens = mask_tokens
    graph_provider: GraphProvider | None = None
    asynchronous: AsyncDevice | None = None
    graph_capture: GraphCapture | None = None
    graph_options: GraphOptions = USUAL_OPTIONS
    shows_progress: bool = False
    prepare_inputs: PrepareInputs = prepare_inputs
    draw_tokens: DrawTokens | None = None


TORCH_PARTS = DeviceParts()
