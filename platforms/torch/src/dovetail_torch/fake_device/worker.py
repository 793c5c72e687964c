"""Workers on the fake device: a hidden wait or a fault within a step raises an error."""

from __future__ import annotations

from typing import Any, ClassVar

from dovetail.interfaces import GrammarOutput
from dovetail.plan import SchedulerOutput
from dovetail_torch.accelerator.worker import AcceleratorWorker
from dovetail_torch.fake_device.device import DEVICE


class StrictSteps:
    """A mixin for worker classes: steps of the worker must not make the host wait.

    A step that would cause an error or a wait on a device raises HiddenWaitError or FlightError.
    """

    def execute_model(self, plan: SchedulerOutput) -> None:
        """Apply the plan and run the model."""
        with DEVICE.strict():
            super().execute_model(plan)  # type: ignore[misc]

    def sample_tokens(self, grammar: GrammarOutput | None = None) -> Any:
        """Sample tokens from the logits of the last plan."""
        with DEVICE.strict():
            return super().sample_tokens(grammar)  # type: ignore[misc]


class FakeDeviceWorker(StrictSteps, AcceleratorWorker):
    """The accelerator worker on the fake device, with sleep mode."""

    provides: ClassVar[frozenset[str]] = AcceleratorWorker.provides | {"sleep"}
