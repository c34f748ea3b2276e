"""What programs train: layers whose gradients are what an operation says, so that any value can be among them."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from tests.fuzz.program import Op, Settings

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_STEP = 97  # between the runs of two seeds


class UserError(Exception):
    """Raised by the program's own code in the middle of a backward."""


@cache
def _pool() -> Tensor:
    return torch.randn(1 << 18, generator=torch.Generator().manual_seed(1), dtype=torch.float32, device="cpu")


def values(seed: int, numel: int) -> Tensor:
    """Random, the same for the same seed; a view."""
    pool = _pool()
    start = seed * _STEP % (len(pool) - numel)
    return pool[start : start + numel]


class Layer(nn.Module):
    """The sum of its parameters times constants, which are their gradients; with ``coupling`` also of their squares."""

    def __init__(self, number: int, sizes: Sequence[int], dtype: torch.dtype, coupling: float) -> None:
        super().__init__()
        self.number, self.coupling = number, coupling
        for i, numel in enumerate(sizes):
            start = 0.1 * values(31 * number + i, numel)
            self.register_parameter(f"p{i}", nn.Parameter(start.to(dtype)))

    def forward(self, op: Op) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device="cpu")
        for i, param in enumerate(self.parameters()):
            constants = self._constants(op, i, param.numel())
            total = total + (param.float() * constants).sum()
            if self.coupling:
                total = total + 0.5 * self.coupling * param.float().square().sum()
        if op.get("raises") == self.number and total.requires_grad:
            total.register_hook(_raise_error if op.get("error") != "interrupt" else _raise_signal)
        return total

    def _constants(self, op: Op, i: int, numel: int) -> Tensor:
        constants: Tensor = op.get("scale", 1.0) * values(op["seed"] + 13 * self.number + i, numel)
        layer, value = op.get("poison", (-1, 0.0))
        if layer == self.number:
            constants[op["seed"] % numel] = float(value)
        return constants


class Net(nn.Module):
    def __init__(self, settings: Settings) -> None:
        super().__init__()
        described = enumerate(zip(settings.sizes, settings.dtypes, strict=True))
        made = [Layer(i, sizes, DTYPES[dtype], settings.coupling) for i, (sizes, dtype) in described]
        self.layers = nn.ModuleList(made)
        for number in settings.frozen:
            made[number].requires_grad_(False)
        self.idle_from = len(made) if settings.idle_from is None else settings.idle_from

    def layer(self, number: int) -> nn.Module:
        return self.layers[number % len(self.layers)]

    def forward(self, op: Op, only: Sequence[int] | None = None) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device="cpu")
        for number, layer in enumerate(self.layers):
            left_out = number in op.get("without", ()) or self._is_idle(number, op["seed"])
            if not left_out and (only is None or number in only):
                total = total + layer(op)
        return total

    def _is_idle(self, number: int, seed: int) -> bool:
        """Whether an expert, one of six, gets no token."""
        return number >= self.idle_from and values(seed + number, 1).item() > 1.0


def _raise_error(gradient: Any) -> None:
    raise UserError


def _raise_signal(gradient: Any) -> None:
    signal.raise_signal(signal.SIGINT)
