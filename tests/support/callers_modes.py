"""Modes that a program may be in when it calls us: default device and dtype, inference, anomalies, function modes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

Mode = Callable[[], AbstractContextManager[Any]]


class Functions(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


class Dispatched(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


@contextmanager
def default(kind: str, value: Any, before: Any) -> Iterator[None]:
    getattr(torch, f"set_default_{kind}")(value)
    try:
        yield
    finally:
        getattr(torch, f"set_default_{kind}")(before)


MODES: dict[str, Mode] = {
    "device context": lambda: torch.device("meta"),
    "default device": lambda: default("device", "meta", None),
    "default dtype": lambda: default("dtype", torch.float64, torch.float32),
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "detect_anomaly": lambda: torch.autograd.detect_anomaly(check_nan=False),
    "function mode": Functions,
    "dispatch mode": Dispatched,
}
OF_WHOLE_PROGRAMS = [name for name in MODES if name not in ("inference_mode", "no_grad")]  # they train, too
