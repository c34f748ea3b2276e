"""The verdict is decided once per step, from sums in a fixed order: gradient norm, clip coefficient, found-inf."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol


class Verdict(NamedTuple):
    """Holds the decision of a step, on which all ranks act.

    ``grad_norm`` is the norm of the unscaled gradient; ``gradient_factor`` = unscale x clip multiplies every gradient
    element.
    """

    grad_norm: float
    clip_coefficient: float
    found_inf: bool
    gradient_factor: float


class SumExchange(Protocol):
    """Exchanges sums of squares with other ranks; ``start`` and ``finish`` are called once per step."""

    def start(self, sums: Mapping[int, float]) -> None:
        """Sends the sums of this rank's shards, by index, in registration order."""

    def finish(self) -> Sequence[float] | None:
        """Returns the sums of all ranks, equal on each, in the order to fold them; None if no rank has a gradient."""


def decide(shard_sums: Iterable[float], *, unscale: float = 1.0, max_grad_norm: float | None = None) -> Verdict:
    """Decides from the shards' sums of squares, which it folds one after the other, in registration order.

    The clip coefficient is that of ``torch.nn.utils.clip_grad_norm_``: min(1, max_grad_norm / (norm + 1e-6)).
    A non-finite sum (a NaN or infinity among the gradients) or norm gives ``found_inf``.
    """
    total = 0.0
    for value in shard_sums:
        total += value
    norm = math.sqrt(total) * abs(unscale) if math.isfinite(total) else math.inf
    if not math.isfinite(norm):
        return Verdict(norm, 1.0, True, unscale)
    # Speculator.expect() stops speculating where this formula must clip: change both
    coefficient = 1.0 if max_grad_norm is None else min(1.0, max_grad_norm / (norm + 1e-6))
    return Verdict(norm, coefficient, False, unscale * coefficient)
