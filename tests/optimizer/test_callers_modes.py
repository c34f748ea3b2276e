"""Modes of the caller's around calls of ours change nothing. (Around whole programs: tests/fuzz.)"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from superoffload import AdamW, CPUAdamW, checkpoints
from tests.support.callers_modes import MODES, Mode

LEAN: dict[str, Any] = {"state_dtype": "8bit", "master_dtype": "split"}
if hasattr(torch.Tensor, "grad_dtype"):
    LEAN["accumulate_dtype"] = "fp32"
KINDS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "lean": (AdamW, {"max_grad_norm": 0.5, "bucket_numel": 1000, **LEAN}),
    "CPUAdamW": (CPUAdamW, {}),
}


def trained(kind: str, mode: Mode, half: int, folder: Path) -> list[Any]:
    """``mode`` is around every second call: what one call has made in it, others use outside."""
    calls = [half]

    def call(work: Callable[..., Any], *args: Any, **options: Any) -> Any:
        calls[0] += 1
        with mode() if calls[0] % 2 else nullcontext():
            return work(*args, **options)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 3)).bfloat16()
    later = nn.Parameter(torch.ones(3))
    make, options = KINDS[kind]
    optimizer = call(make, model.parameters(), lr=1e-2, **options)
    for step in range(4):
        model(torch.linspace(-1, 1, 1200).view(4, 300).bfloat16() * (1 + step)).float().square().sum().backward()
        if step:
            entry = optimizer.state[model[0].weight]
            call(entry.__setitem__, "exp_avg", 0.5 * call(entry.__getitem__, "exp_avg"))
        if step == 2:
            call(optimizer.add_param_group, {"params": [later]})
            later.grad = torch.ones(3)
        call(optimizer.step)
        call(optimizer.zero_grad)
        call(optimizer.load_state_dict, call(optimizer.state_dict))
        if step == 1 and kind == "lean":
            call(checkpoints.save, folder, model, optimizer)
            call(checkpoints.load, folder, model, optimizer)
            for method in (optimizer.sleep, optimizer.wake, optimizer.refresh_masters, optimizer.synchronize):
                call(method)
    state = optimizer.state_dict()["state"]
    call(optimizer.close)
    return [one.tolist() for one in (*model.parameters(), later, *(v for one in state.values() for v in one.values()))]


CASES = [*(("lean", mode) for mode in MODES), ("CPUAdamW", "device context"), ("CPUAdamW", "inference_mode")]


@pytest.mark.parametrize(("kind", "mode"), CASES)
def test_a_mode_around_any_call_changes_nothing(kind: str, mode: str, tmp_path: Path) -> None:
    expected = trained(kind, nullcontext, 0, tmp_path / "plain")
    for half in range(2):
        assert trained(kind, MODES[mode], half, tmp_path / str(half)) == expected, half
