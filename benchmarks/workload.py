"""Holds arrays as a training run leaves them: weights, moments and gradients with realistic journal escapes."""

from __future__ import annotations

import torch
from torch import Tensor

from superoffload import _native
from superoffload.engine.bucket import ELEMENT_TYPES
from superoffload.engine.layout import STATE_TYPES
from superoffload.engine.moments import scales_address, stored_numel
from superoffload.host.memory import exceeds_caches, host_empty, host_zeros

LR, BETAS, EPS, WEIGHT_DECAY = 1e-3, (0.9, 0.999), 1e-8, 1e-2

_TILE = 1 << 20  # random numbers are drawn for so many elements and repeated
_GRADIENTS = 2  # packed gradients that steps use in turn
_FIRST_STEP = 1
_WARM_UP_STEPS = 12
_JOURNAL_BYTES_PER_PARAM = 2.5  # one bucket's own: two-byte codes and their escapes
_JOURNAL_BYTES = 1 << 16  # besides those per parameter, since few parameters average less

# Bytes per parameter of everything here, with both journals' pages touched.
BYTES_PER_PARAM = 12 + 2 * _GRADIENTS + 2 + 2 + _JOURNAL_BYTES_PER_PARAM * _GRADIENTS


class Workload:
    """Owns one bucket's worth of state with two gradients, stepped on `pool` until it looks like training.

    `moments`: dtype of exp_avg and exp_avg_sq; uint8: codes of eight bits, with their scales behind. `split`: whether
    the master is, with the shadow as its upper half.
    """

    def __init__(
        self, numel: int, pool: _native.WorkerPool, moments: torch.dtype = torch.float32, *, split: bool = False
    ) -> None:
        random = torch.Generator().manual_seed(0)
        tile = min(numel, _TILE)

        def normal() -> Tensor:
            return torch.randn(tile, generator=random)

        self.numel = numel
        self.split = split
        self.step = _FIRST_STEP - 1
        initial = 0.02 * normal()
        self.shadow = _repeated(initial.to(torch.bfloat16), numel)
        self.master = host_zeros(numel, torch.int16) if split else _repeated(initial, numel)
        self.exp_avg = host_zeros(stored_numel(numel, moments), moments)
        self.exp_avg_sq = host_zeros(stored_numel(numel, moments), moments)
        # Every element has its own scale and direction, as the rows of real matrices do, under more noise.
        scale = 1e-3 * torch.exp(normal())
        direction = 0.3 * normal()
        self.gradients = [
            _repeated((scale * (direction + normal())).to(torch.bfloat16), numel) for _ in range(_GRADIENTS)
        ]
        self.codes = host_zeros(2 * numel, torch.uint8)  # for the memory limit; journals have their own
        self._works = [self._work(gradient) for gradient in self.gradients]
        self._turn = 0
        for _ in range(_WARM_UP_STEPS):
            pool.submit(self.next_work(), _native.Operation.step).wait()

    def _work(self, gradient: Tensor) -> _native.BucketWork:
        run = _native.Run(
            master=self.master.data_ptr(),
            exp_avg=self.exp_avg.data_ptr(),
            exp_avg_sq=self.exp_avg_sq.data_ptr(),
            gradient=gradient.data_ptr(),
            shadow=self.shadow.data_ptr(),
            numel=self.numel,
            gradient_type=ELEMENT_TYPES[gradient.dtype],
            shadow_type=ELEMENT_TYPES[self.shadow.dtype],
            state_type=STATE_TYPES[self.exp_avg.dtype],
            past_cache=exceeds_caches(self.numel),
            split_master=self.split,
            exp_avg_scales=scales_address(self.exp_avg, self.numel),
            exp_avg_sq_scales=scales_address(self.exp_avg_sq, self.numel),
        )
        return _native.BucketWork([run], int(_JOURNAL_BYTES_PER_PARAM * self.numel) + _JOURNAL_BYTES)

    @property
    def gradient(self) -> Tensor:
        """Returns the gradient whose turn it is."""
        return self.gradients[self._turn]

    def next_work(self) -> _native.BucketWork:
        """Returns the work with the next gradient, frozen for the next step."""
        self._turn = (self._turn + 1) % len(self._works)
        self.step += 1
        self.freeze()
        return self.current_work

    def take_back(self) -> None:
        """Takes back the number of the last step."""
        self.step -= 1

    @property
    def current_work(self) -> _native.BucketWork:
        return self._works[self._turn]

    def freeze(self, gradient_factor: float = 1.0) -> None:
        """Freezes what the next step, replay or publish of the current work uses."""
        self.current_work.freeze(
            lr=LR,
            beta1=BETAS[0],
            beta2=BETAS[1],
            eps=EPS,
            weight_decay=WEIGHT_DECAY,
            gradient_factor=gradient_factor,
            l2=False,
            steps=[self.step],
        )


def _repeated(tile: Tensor, numel: int) -> Tensor:
    """Returns `numel` elements of repeated `tile`."""
    result = host_empty(numel, tile.dtype)
    whole = numel // tile.numel()
    result[: whole * tile.numel()].view(whole, tile.numel()).copy_(tile)
    result[whole * tile.numel() :].copy_(tile[: numel - whole * tile.numel()])
    return result
