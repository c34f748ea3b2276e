"""The reference itself: rounding as torch and by hand, and training as torch within a stated tolerance.

That its arithmetic is rounded operation by operation as defined: the kernels, which compute in hardware, have its bits.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.support import kernel_inputs as cases
from tests.support.reference.trainer import Group, Parameter, Trainer


def test_trainer_follows_torch_for_60_steps() -> None:
    torch = pytest.importorskip("torch", reason="needs torch: pip install torch")
    shapes = (700, 1500, 33)
    initial = [cases.ranged(n, 80 + i, -8, -2) for i, n in enumerate(shapes)]
    theirs = [torch.nn.Parameter(torch.from_numpy(values.copy())) for values in initial]
    optimizer = torch.optim.AdamW(theirs, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    ours = [Parameter(values) for values in initial]
    group = Group(ours, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    trainer = Trainer([group], max_grad_norm=1.0)
    accumulated_lr = 0.0
    clipped = 0
    for step in range(60):
        lr = 1e-3 * (step + 1) / 20 if step < 20 else 1e-3 * (1 - step / 75)
        group.lr = optimizer.param_groups[0]["lr"] = lr
        accumulated_lr += lr
        scale = np.float32(1.0 if step % 3 else 0.01)
        gradients = [cases.ranged(n, 1000 + 10 * step + i, -8, -2) * scale for i, n in enumerate(shapes)]
        for parameter, gradient in zip(theirs, gradients, strict=True):
            parameter.grad = torch.from_numpy(gradient.copy())
        torch.nn.utils.clip_grad_norm_(theirs, 1.0)
        optimizer.step()
        clipped += trainer.step(gradients).clip_coefficient < 1.0
        for mine, parameter in zip(ours, theirs, strict=True):
            expected = parameter.detach().numpy().astype(np.float64)
            allowed = 1e-6 * np.maximum(np.abs(expected), accumulated_lr)
            assert np.all(np.abs(mine.master - expected) <= allowed), f"step {step}"
    assert 0 < clipped < 60
