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
        self.skipped_steps = 0
        self.steps = 0

    @property
    def parameters(self) -> list[Parameter]:
        """All parameters in registration order."""
        return [parameter for group in self.groups for parameter in group.parameters]

    def step(self, gradients: Sequence[npt.NDArray[Any] | None], unscale: float = 1.0) -> Verdict:
        """One step with a gradient for each parameter in registration order; None leaves its parameter as it is.

        A non-finite element anywhere skips the step: nothing changes, no step is counted for any parameter.
        """
        parameters = self.parameters
        if len(gradients) != len(parameters):
            raise ValueError(f"{len(gradients)} gradients for {len(parameters)} parameters: expected one each")
        flat = [None if gradient is None else np.asarray(gradient).reshape(-1) for gradient in gradients]
        present = [gradient for gradient in flat if gradient is not None]
        decision = adam.verdict([adam.sum_of_squares(g) for g in present], self.max_grad_norm, unscale)
        if decision.found_inf:
            self.skipped_steps += 1
            return decision
        remaining = iter(flat)
        for group in self.groups:
            for parameter in group.parameters:
                gradient = next(remaining)
                if gradient is not None:
                    self._step_one(group, parameter, gradient, decision.gradient_factor)
        self.steps += 1
        return decision

    def digests(self) -> dict[str, str]:
        """One SHA-256 per kind of array, over all parameters in registration order."""
        kinds = ("master", "exp_avg", "exp_avg_sq", "published")
        return {
            kind: hashlib.sha256(b"".join(getattr(p, kind).tobytes() for p in self.parameters)).hexdigest()
            for kind in kinds
        }

    @staticmethod
    def _step_one(group: Group, parameter: Parameter, gradient: npt.NDArray[Any], gradient_factor: float) -> None:
        parameter.step += 1
        hyper = adam.Hyper(
            lr=group.lr,
            beta1=group.betas[0],
            beta2=group.betas[1],
            eps=group.eps,
            weight_decay=group.weight_decay,
            step=parameter.step,
            gradient_factor=gradient_factor,
            l2=group.l2,
        )
        stepped = adam.step(
            parameter.master, parameter.exp_avg, parameter.exp_avg_sq, gradient, parameter.published_format, hyper
        )
        parameter.master, parameter.exp_avg, parameter.exp_avg_sq, parameter.published = stepped
