"""The optimizers of the training and their schedule: warm-up, constant rate, cool-down.

Contract: `Schedule.learning_rate` is a pure function of the step. Muon (Jordan et al. 2024) trains
the matrices of the layers, with the update size matched to AdamW. AdamW (Loshchilov and Hutter
2019) trains embedding and norms.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn, optim

MUON_WEIGHT_DECAY = 0.1
ADAM_WEIGHT_DECAY = 0.0


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The learning rate of `total` steps: rises for `warmup`, falls for the last `cooldown`."""

    peak: float
    warmup: int
    cooldown: int
    total: int

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        rising = (step + 1) / self.warmup
        falling = (self.total - step) / max(1, self.cooldown)
        return self.peak * max(0.0, min(1.0, rising, falling))


def build_optimizers(network: nn.Module) -> list[optim.Optimizer]:
    """Build the two optimizers. The learning rate is set before every step."""
    named = list(network.named_parameters())
    matrices = [p for name, p in named if p.dim() == 2 and "embed" not in name]
    others = [p for name, p in named if p.dim() != 2 or "embed" in name]
    return [
        optim.Muon(
            matrices, lr=0.0, weight_decay=MUON_WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw"
        ),
        optim.AdamW(others, lr=0.0, betas=(0.9, 0.95), weight_decay=ADAM_WEIGHT_DECAY),
    ]


def apply_step(optimizers: list[optim.Optimizer], learning_rate: float) -> None:
    """Take one step with every optimizer and clear the gradients."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
