"""A whole synchronous optimizer: gradients in, one verdict, then every parameter stepped or none."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.support.reference import adam
from tests.support.reference.adam import Float32Array, Verdict
from tests.support.reference.convert import narrow


@dataclass
class Parameter:
    """One parameter's truth and its own count of steps. The published format of a split master is "split"."""

    master: Float32Array
    published_format: str = "fp32"
    exp_avg: Float32Array = field(init=False)
    exp_avg_sq: Float32Array = field(init=False)
    published: npt.NDArray[Any] = field(init=False)
    step: int = 0

    def __post_init__(self) -> None:
        self.master = np.array(self.master, dtype=np.float32).reshape(-1)
        self.exp_avg = np.zeros_like(self.master)
        self.exp_avg_sq = np.zeros_like(self.master)
        self.published = narrow(self.master, self.published_format)


@dataclass
class Group:
    """Parameters that share hyper-parameters; all of them may be changed between steps."""

    parameters: Sequence[Parameter]
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2
    l2: bool = False


class Trainer:
    """Steps groups of parameters the plain way: nothing is touched before the verdict is known."""

    def __init__(self, groups: Sequence[Group], max_grad_norm: float | None = None) -> None:
        self.groups = list(groups)
        self.max_grad_norm = max_grad_norm
        self.skipped_steps = self.steps = 0

    @property
    def parameters(self) -> list[Parameter]:
        """All parameters in registration order."""
        return [parameter for group in self.groups for parameter in group.parameters]

    def step(self, gradients: Sequence[npt.NDArray[Any] | None], unscale: float = 1.0) -> Verdict:
        """One step with a gradient for each parameter in registration order; None leaves its parameter as it is.

        A non-finite element anywhere skips the step: nothing changes, no step is counted for any parameter.
        """
        flat = [None if gradient is None else np.asarray(gradient).reshape(-1) for gradient in gradients]
        sums = [adam.sum_of_squares(gradient) for gradient in flat if gradient is not None]
        decision = adam.verdict(sums, self.max_grad_norm, unscale)
        if decision.found_inf:
            self.skipped_steps += 1
            return decision
        grouped = [(group, parameter) for group in self.groups for parameter in group.parameters]
        for (group, one), gradient in zip(grouped, flat, strict=True):
            if gradient is None:
                continue
            one.step += 1
            numbers = group.lr, *group.betas, group.eps, group.weight_decay, one.step
            hyper = adam.Hyper(*numbers, gradient_factor=decision.gradient_factor, l2=group.l2)
            stepped = adam.step(one.master, one.exp_avg, one.exp_avg_sq, gradient, one.published_format, hyper)
            one.master, one.exp_avg, one.exp_avg_sq, one.published = stepped
        self.steps += 1
        return decision

    def digests(self) -> dict[str, str]:
        """One SHA-256 per kind of array, over all parameters in registration order."""
        kinds = ("master", "exp_avg", "exp_avg_sq", "published")
        data = {kind: b"".join(getattr(p, kind).tobytes() for p in self.parameters) for kind in kinds}
        return {kind: hashlib.sha256(values).hexdigest() for kind, values in data.items()}
