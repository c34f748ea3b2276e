"""Modes of the caller's around any call of ours change nothing: default device and dtype, inference, grad and anomaly
mode, function and dispatch modes."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import nn

from superoffload import AdamW, CPUAdamW, checkpoints
from tests.support.callers_modes import MODES, Mode

LEAN: dict[str, Any] = {"state_dtype": "8bit", "master_dtype": "split", "accumulate_dtype": "fp32"}


class Training:
    """Trains a little and calls everything that an optimizer has; ``mode`` is around calls of these ``methods``."""

    def __init__(self, make: Callable[..., Any], options: dict[str, Any], mode: Mode, methods: Collection[str]) -> None:
        self._mode, self._methods, self.called = mode, methods, dict[str, None]()
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 3)).bfloat16()
        self.later = nn.Parameter(torch.ones(3))
        self.optimizer = self._call("make", lambda: make(self.model.parameters(), lr=1e-2, **options))

    def _call(self, method: str, call: Callable[[], Any]) -> Any:
        self.called[method] = None
        with self._mode() if method in self._methods else nullcontext():
            return call()

    def run(self, folder: Path) -> list[torch.Tensor]:
        optimizer, call = self.optimizer, self._call
        inputs = torch.randn(4, 300, generator=torch.Generator().manual_seed(1)).bfloat16()
        for step in range(4):
            self.model(inputs * (1 + step)).float().square().sum().backward()
            if step:
                state = optimizer.state[self.model[0].weight]
                moment = call("read state", partial(state.__getitem__, "exp_avg"))
                call("edit state", partial(state.__setitem__, "exp_avg", 0.5 * moment))
                if not moment.is_inference():  # as copies are
                    moment.mul_(0.5)
            if step == 3:
                optimizer.param_groups[0]["params"].reverse()
                call("state_dict of changed groups", optimizer.state_dict)
            call("step", optimizer.step)
            call("zero_grad", optimizer.zero_grad)
            if step == 1:
                saved = call("state_dict", optimizer.state_dict)
                call("load_state_dict", partial(optimizer.load_state_dict, saved))
                if isinstance(optimizer, AdamW):
                    call("save", lambda: checkpoints.save(folder, self.model, optimizer))
                    call("load", lambda: checkpoints.load(folder, self.model, optimizer))
                    call("sleep", optimizer.sleep)
                    call("wake", optimizer.wake)
                    call("refresh_masters", optimizer.refresh_masters)
                    call("synchronize", optimizer.synchronize)
            if step == 2:
                call("add_param_group", lambda: optimizer.add_param_group({"params": [self.later]}))
                self.later.grad = torch.ones(3)
        state = optimizer.state_dict()["state"]
        found = [*self.model.parameters(), self.later, *(value for one in state.values() for value in one.values())]
        call("close", optimizer.close)
        return [one.detach().clone() for one in found]


def clipping(params: Any, **options: Any) -> AdamW:
    return AdamW(params, max_grad_norm=0.5, bucket_numel=1000, **options)


CASES = [
    *(("lean", mode) for mode in MODES),
    *(("plain", mode) for mode in ("default device", "inference_mode")),
    *(("CPUAdamW", mode) for mode in ("device context", "default dtype", "inference_mode")),
]


def training(kind: str, mode: Mode = nullcontext, methods: Collection[str] = ()) -> Training:
    make: Callable[..., Any] = CPUAdamW if kind == "CPUAdamW" else clipping
    return Training(make, LEAN if kind == "lean" else {}, mode, methods)


@cache
def without_a_mode(kind: str) -> tuple[list[Any], list[str]]:
    """What it finds, and what it calls."""
    plain = training(kind)
    with TemporaryDirectory() as folder:
        return [one.tolist() for one in plain.run(Path(folder, "plain"))], list(plain.called)


@pytest.mark.parametrize(("kind", "mode"), CASES)
def test_a_mode_around_any_call_changes_nothing(kind: str, mode: str, tmp_path: Path) -> None:
    expected, called = without_a_mode(kind)
    for half in (called[::2], called[1::2]):  # what one call has made in the mode, others use outside of it
        found = training(kind, MODES[mode], half).run(tmp_path / half[0])
        assert [one.tolist() for one in found] == expected, half
