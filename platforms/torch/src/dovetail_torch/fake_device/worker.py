"""Workers on the fake device: strict inside a step."""

from __future__ import annotations

from typing import Any

from dovetail.interfaces import GrammarOutput
from dovetail.plan import SchedulerOutput
from dovetail_torch.accelerator.worker import AcceleratorWorker
from dovetail_torch.fake_device.device import DEVICE


class StrictSteps:
    """A mixin in front of a worker's class: its steps must not make the host wait.

    A step that would cause an error or a wait on a device raises HiddenWaitError or FlightError.
    """

    def execute_model(self, plan: SchedulerOutput) -> None:
        """Run the model."""
        with DEVICE.strict():
            super().execute_model(plan)  # type: ignore[misc]

    def sample_tokens(self, grammar: GrammarOutput | None = None) -> Any:
        """Sample."""
        with DEVICE.strict():
            return super().sample_tokens(grammar)  # type: ignore[misc]


class FakeDeviceWorker(StrictSteps, AcceleratorWorker):
    """The worker of accelerators on the fake device."""
