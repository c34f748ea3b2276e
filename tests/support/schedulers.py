"""Every scheduler of torch.optim.lr_scheduler, as users make them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import lr_scheduler, swa_utils

Scheduler = Callable[[Any], Any]


def warmed_up(optimizer: Any) -> Any:
    first = lr_scheduler.LinearLR(optimizer, total_iters=3)
    return lr_scheduler.SequentialLR(optimizer, [first, lr_scheduler.ConstantLR(optimizer)], milestones=[3])


SCHEDULERS: dict[str, Scheduler] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1.0 / (1 + step)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4], 0.5),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 3),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=4),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.8),
    "SequentialLR": warmed_up,
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.5, threshold=10.0),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 1e-4, 1e-2, 2, cycle_momentum=True, base_momentum=0.8),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 1e-2, 10),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 8),
    "SWALR": lambda o: swa_utils.SWALR(o, 1e-4, 3),
}
