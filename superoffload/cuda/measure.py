"""How long a bucket takes to the host, through the processors and back, for each transfer policy; and which to use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from superoffload import _native
from superoffload.bucket import BLOCK, Bucket, Shard, lay_out
from superoffload.cuda.link import CudaLink
from superoffload.cuda.transfer import NARROW, POLICIES, TransferPolicy
from superoffload.errors import DeviceError

# What a policy must gain over the plain one: its side effects on the model (direct stores keep processors of the device
# busy, wide ones move twice the bytes of host memory) do not show in a measurement of the link alone.
_GAIN = 0.9
_TIMEOUT = 60.0


@dataclass(frozen=True)
class Rates:
    """Seconds per parameter, each part by itself; ``bytes``: on the link, per parameter and direction."""

    down: float
    step: float
    up: float
    bytes: int

    @property
    def slowest(self) -> float:
        """The three overlap, so the slowest one decides."""
        return max(self.down, self.step, self.up)


MakeLink = Callable[[TransferPolicy], CudaLink]


def measure_policies(
    make_link: MakeLink,
    policies: Sequence[TransferPolicy],
    *,
    dtype: torch.dtype,
    numel: int,
    cpus: Sequence[int],
    rounds: int = 3,
    device: torch.device | None = None,
) -> dict[str, Rates]:
    """In turn, in one process: one bucket of ``numel`` parameters and gradients of ``dtype``, nothing else running."""
    pool = _native.WorkerPool(list(cpus))
    try:
        return {
            policy.name: _measure(make_link(policy), pool, _trial_shard(numel, dtype, device), rounds)
            for policy in policies
        }
    finally:
        pool.close()


def _trial_shard(numel: int, dtype: torch.dtype, device: torch.device | None) -> Shard:
    target = torch.zeros(numel, dtype=dtype, device=device)
    master, exp_avg, exp_avg_sq = (torch.zeros(numel) for _ in range(3))
    return Shard(
        index=0,
        name="the trial bucket",
        group=0,
        numel=numel,
        gradient_dtype=dtype,
        published_dtype=dtype,
        master=master,
        exp_avg=exp_avg,
        exp_avg_sq=exp_avg_sq,
        target=lambda: target,
    )


def _measure(link: CudaLink, pool: _native.WorkerPool, shard: Shard, rounds: int) -> Rates:
    try:
        (bucket,) = lay_out([shard], shard.numel + BLOCK)
        link.prepare([bucket], anew=True)
        link.attach(bucket)
        bucket.make_work(0)
        bucket.present = [True]
        gradient = torch.zeros_like(shard.target())
        times = [_round(link, pool, bucket, gradient, step) for step in range(1, rounds + 2)][1:]
        down, step, up = (median(column) / shard.numel for column in zip(*times, strict=True))
        return Rates(down, step, up, bucket.packed_dtype.itemsize)
    finally:
        link.close()


def _round(
    link: CudaLink, pool: _native.WorkerPool, bucket: Bucket, gradient: Tensor, step: int
) -> tuple[float, float, float]:
    bucket.work.freeze(
        lr=0.0, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, gradient_factor=1.0, l2=False, steps=[step]
    )
    began = _native.now_seconds()
    _wait(link.arrived(link.pack(bucket, [gradient])))
    arrived = _native.now_seconds()
    _wait(pool.submit(bucket.work, _native.Operation.step))
    stepped = _native.now_seconds()
    _wait(link.deliver(bucket, _native.Completion.already_done()))
    link.make_visible(bucket)
    link.drain(_TIMEOUT)
    return arrived - began, stepped - arrived, _native.now_seconds() - stepped


def _wait(completion: _native.Completion) -> None:
    if not completion.wait(_TIMEOUT):
        raise DeviceError(f"the device did not finish within {_TIMEOUT:g} s")


def choose(rates: Mapping[str, Rates]) -> TransferPolicy:
    """The one whose slowest part is the fastest; the plain one, unless another gains 10 % on it."""
    best = min(rates, key=lambda name: rates[name].slowest)
    plain = rates.get(NARROW.name)
    if plain is not None and rates[best].slowest > _GAIN * plain.slowest:
        return NARROW
    return POLICIES[best]


def worth_measuring(dtypes: Sequence[torch.dtype], *, kernels: bool, pinned: bool) -> list[TransferPolicy]:
    """Those that can be used, without those that come to the same."""
    narrow_only = all(dtype is torch.float32 for dtype in dtypes)
    return [
        policy
        for policy in POLICIES.values()
        if policy.fits(kernels=kernels, pinned=pinned) and not (policy.wide and narrow_only)
    ]
