"""Workers on the fake device: strict inside a step."""

from __future__ import annotations

from typing import Any

from dovetail.interfaces import GrammarOutput
from dovetail.plan import SchedulerOutput
from dovetail_torch.accelerator.worker import AcceleratorWorker
from dovetail_torch.fake_device.device import DEVICE


class StrictSteps:
    """Goes before a worker's class in the bases of another: its steps may not make the host wait.

    HiddenWaitError or FlightError comes out of a step that a device would suffer from.
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
    """An accelerator's worker, as it is."""
