"""Compares versions, addresses and, in host memory, bits of many parameters and gradients in one pass each.

Most were not edited, so a pass returns those that may have been: they need a closer look.

The parameter must be an ordinary tensor, in the order of its dimensions, that this rank has in full; its gradient too.
A pass costs about a microsecond each: it compares versions and addresses, and all bits in host memory at once.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

import torch
from torch import Tensor

from superoffload import _native
from superoffload.engine.bucket import Shard
from superoffload.host.tensors import is_dtensor
from superoffload.optimizer.tracked_gradient import TrackedGradient, remember_all
from superoffload.optimizer.tracked_param import TrackedParam, remember_plain, remember_values


def ready_gradients(
    several: Sequence[TrackedParam], arrived: Container[int]
) -> tuple[list[tuple[Shard, Tensor]], list[TrackedParam]]:
    """Finds and remembers gradients that can be packed as they are; returns them, and those that need a closer look.

    ``arrived``: shards, by index, whose gradients the engine has.
    """
    ready: list[tuple[Shard, Tensor]] = []
    watched: list[tuple[TrackedGradient, Tensor]] = []
    others: list[TrackedParam] = []
    bits_compared = bool(several) and several[0].bits.every_step
    for tracked in several:
        param, shard = tracked.param, tracked.shard
        grad = param.grad
        if (
            tracked.is_plain
            and type(grad) is Tensor
            and shard.index not in arrived
            and grad.dtype is shard.gradient_dtype
            and grad.layout is torch.strided
            and grad.is_contiguous()
            and not grad.is_neg()
            and grad.numel() == shard.numel
            and grad.data_ptr()  # 0 for torch's zeros without memory
            and not (shard.keeps_gradient or shard.sums_gradient)
            and "main_grad" not in param.__dict__
            and param._version == tracked.version[0]
            and param.data_ptr() == tracked.address
            and (bits_compared or tracked.place.is_of(param))
        ):
            ready.append((shard, grad))
            watched.append((tracked.gradient, grad))
        else:
            others.append(tracked)
    remember_all(watched)
    return ready, others


def unwritten(several: Sequence[TrackedParam]) -> tuple[list[TrackedParam], list[TrackedParam]]:
    """Returns those whose parameters were not written, and those that need a closer look.

    It also compares bits in host memory, since versions do not show every write.
    """
    alike: list[TrackedParam] = []
    others: list[TrackedParam] = []
    runs: list[tuple[int, int]] = []
    bits_compared = bool(several) and several[0].bits.every_step
    for tracked in several:
        param = tracked.param
        if (
            tracked.is_plain
            and param._version == tracked.version[0]
            and param.data_ptr() == tracked.address
            and (tracked.sums is not None if bits_compared else tracked.is_in_its_storage)
            and param.is_contiguous()
            and not param.is_neg()
            and param.numel() == tracked.shard.numel
        ):
            alike.append(tracked)
            runs.append((tracked.address, param.nbytes))
        else:
            others.append(tracked)
    if not (alike and bits_compared):
        return alike, others
    now = _native.bit_sums(runs, torch.get_num_threads())
    others += [tracked for tracked, sums in zip(alike, now, strict=True) if sums != tracked.sums]
    return [tracked for tracked, sums in zip(alike, now, strict=True) if sums == tracked.sums], others


def unedited(several: Iterable[TrackedParam], arrived: Container[int]) -> tuple[list[TrackedParam], list[TrackedParam]]:
    """Returns those whose gradients are still the ones handed over, and those that need a closer look.

    ``arrived``: shards, by index, whose gradients the engine has.
    """
    alike: list[TrackedParam] = []
    others: list[TrackedParam] = []
    for tracked in several:
        param, gradient = tracked.param, tracked.gradient
        handed = gradient.handed
        as_handed = (
            tracked.is_plain
            and param.grad is handed
            and (handed is not None) is (tracked.shard.index in arrived)
            and (
                handed is None or (type(handed) is Tensor and handed._version == gradient.version) or gradient.is_asleep
            )
            and gradient.reduced is None
            and gradient.sums is None
            and not tracked.shard.sums_gradient
            and "main_grad" not in param.__dict__
        )
        (alike if as_handed else others).append(tracked)
    return alike, others


def outdate(several: Iterable[TrackedParam]) -> None:
    """Raises versions, since values will be delivered later: graphs that need the old values must not be used."""
    plain = [tracked for tracked in several if not is_dtensor(tracked.param)]  # graphs hold gathered copies of DTensors
    torch.autograd.graph.increment_version([tracked.param for tracked in plain])
    for tracked in plain:
        tracked.is_outdated()


def remember(several: Sequence[TrackedParam], *, on_device: bool) -> None:
    """Remembers values as ``remember_values`` does, those of ordinary parameters in host memory all at once."""
    plain = [
        tracked
        for tracked in several
        if tracked.is_plain
        and tracked.bits.every_step
        and tracked.param.is_contiguous()
        and tracked.param.numel() == tracked.shard.numel
    ]
    if len(plain) < len(several):
        known = set(plain)
        remember_values([tracked for tracked in several if tracked not in known], on_device=on_device)
    runs = [(tracked.param.data_ptr(), tracked.param.nbytes) for tracked in plain]
    sums = _native.bit_sums(runs, torch.get_num_threads()) if runs else ()
    remember_plain(zip(plain, [address for address, _ in runs], sums, strict=True))
