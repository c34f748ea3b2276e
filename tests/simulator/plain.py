"""The plain model that simulations are compared with: no buckets, no threads, no link, no speculation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from superoffload import _native
from superoffload.engine.bucket import ELEMENT_TYPES, GroupHyper, Shard
from superoffload.engine.layout import STATE_TYPES
from superoffload.engine.master_halves import join
from superoffload.engine.moments import scales_address
from superoffload.engine.verdict import Verdict, decide

STATE = ("master", "exp_avg", "exp_avg_sq")


def words(tensor: Tensor) -> Tensor:
    """The bits, so that comparing them tells zeros and NaNs apart."""
    return tensor.view({4: torch.int32, 2: torch.int16, 1: torch.uint8}[tensor.element_size()])


def state_of(shard: Shard) -> list[Tensor]:
    """The parts that STATE names, masters in fp32."""
    return [shard.read_masters(), shard.exp_avg, shard.exp_avg_sq]


class PlainShard:
    """The state of one shard, copied from where a simulation begins, and one step on all of it at once."""

    def __init__(self, shard: Shard, published: Tensor) -> None:
        self._master, self.exp_avg, self.exp_avg_sq, self.published = (
            tensor.clone() for tensor in (shard.master, shard.exp_avg, shard.exp_avg_sq, published)
        )
        self._split = shard.upper is not None
        self.group, self.steps = shard.group, 0
        self._packed = torch.zeros(shard.numel, dtype=shard.gradient_dtype)
        self._sums = shard.block_sums.copy()
        self._type = ELEMENT_TYPES[shard.gradient_dtype]
        run = _native.Run(
            master=self._master.data_ptr(),
            exp_avg=self.exp_avg.data_ptr(),
            exp_avg_sq=self.exp_avg_sq.data_ptr(),
            gradient=self._packed.data_ptr(),
            shadow=self.published.data_ptr(),
            numel=shard.numel,
            gradient_type=self._type,
            shadow_type=ELEMENT_TYPES[shard.published_dtype],
            state_type=STATE_TYPES[self.exp_avg.dtype],
            noise_stream=shard.noise_stream,
            split_master=self._split,
            exp_avg_scales=scales_address(self.exp_avg, shard.numel),
            exp_avg_sq_scales=scales_address(self.exp_avg_sq, shard.numel),
        )
        self._work = _native.BucketWork([run], 0)

    def pack(self, gradient: Tensor) -> float:
        _native.pack(gradient.data_ptr(), self._packed.data_ptr(), self._type, gradient.numel(), self._sums.ctypes.data)
        return _native.fold_sums([(self._sums.ctypes.data, len(self._sums))])[0]

    def step(self, hyper: GroupHyper, factor: float) -> None:
        self.steps += 1
        adam = hyper.lr, hyper.beta1, hyper.beta2, hyper.eps, hyper.weight_decay
        self._work.freeze(*adam, factor, hyper.l2, [self.steps])
        self._work.run_all(_native.Operation.step)

    def state(self) -> list[Tensor]:
        """The parts that STATE names."""
        master = join(self.published, self._master) if self._split else self._master
        return [master, self.exp_avg, self.exp_avg_sq]

    def write(self, value: Tensor) -> None:
        """What the optimizer does when a user has written to the parameter: a split master has no remainder then."""
        self._master.copy_(torch.zeros_like(self._master) if self._split else value)
        self.published.copy_(value)


class PlainModel:
    """Every shard, and the step as it is defined."""

    def __init__(self, shards: Sequence[Shard], hyper_of: Callable[[int], GroupHyper]) -> None:
        self.shards = [PlainShard(shard, shard.target()) for shard in shards]
        self._hyper_of = hyper_of

    def decide(self, gradients: Mapping[int, Tensor], unscale: float, max_grad_norm: float | None) -> Verdict:
        sums = [self.shards[index].pack(gradients[index]) for index in sorted(gradients)]
        return decide(sums, unscale=unscale, max_grad_norm=max_grad_norm)

    def apply(self, gradients: Mapping[int, Tensor], verdict: Verdict) -> None:
        """All of it or, where anything is not finite, nothing."""
        for index in () if verdict.found_inf else gradients:
            shard = self.shards[index]
            shard.step(self._hyper_of(shard.group), verdict.gradient_factor)
