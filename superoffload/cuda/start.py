"""From a torch device to its link: kernels, what the environment says, and the transfer policy that a trial chose."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import replace

import torch

from superoffload.cuda.device import Device, TorchDevice
from superoffload.cuda.link import CudaLink, CudaOptions
from superoffload.cuda.measure import choose, measure_policies, worth_measuring
from superoffload.cuda.transfer import NARROW, POLICIES, TransferPolicy
from superoffload.environment import TRANSFER, device_timeout, transfer_name
from superoffload.errors import ArgumentError, KernelsUnavailable

LIBRARY_VARIABLE = "SUPEROFFLOAD_LIBCUDA"
_TRIAL_NUMEL = 1 << 22  # of the measurement at the start: a fraction of a second


def cuda_link(
    device: torch.device, *, keep_grads: bool | None, dtypes: Sequence[torch.dtype], cpus: Sequence[int]
) -> CudaLink:
    """The link for parameters of these dtypes on ``device``, with what this process' environment says."""
    opened = TorchDevice(device)
    return open_link(opened, options_for(opened, keep_grads=keep_grads), dtypes, cpus, device)


def options_for(device: TorchDevice, *, keep_grads: bool | None) -> CudaOptions:
    return CudaOptions(
        keep_grads=bool(keep_grads),
        image=kernels_for(torch.cuda.get_device_capability(device.torch_device)),
        timeout_seconds=device_timeout(),
        library=os.environ.get(LIBRARY_VARIABLE) or CudaOptions.library,
    )


def open_link(
    device: Device,
    options: CudaOptions,
    dtypes: Sequence[torch.dtype],
    cpus: Sequence[int],
    where: torch.device | None = None,
) -> CudaLink:
    """With the policy that is named in the environment, or the one that is fastest here."""
    named = transfer_name()
    policy = _measured(device, options, dtypes, cpus, where) if named == "auto" else POLICIES[named]
    if not policy.fits(kernels=bool(options.image), pinned=True):
        raise ArgumentError(f"{TRANSFER}={named!r}: needs kernels on the device, which are missing; use 'narrow'")
    return CudaLink(device, replace(options, policy=policy))


def _measured(
    device: Device,
    options: CudaOptions,
    dtypes: Sequence[torch.dtype],
    cpus: Sequence[int],
    where: torch.device | None,
) -> TransferPolicy:
    trial = CudaLink(device, options)
    trial.close()
    policies = worth_measuring(dtypes, kernels=bool(options.image), pinned=trial.can_pin)
    if len(policies) == 1:
        return NARROW
    smallest = min(dtypes, key=lambda dtype: dtype.itemsize)
    rates = measure_policies(
        lambda policy: CudaLink(device, replace(options, policy=policy)),
        policies,
        dtype=smallest,
        numel=_TRIAL_NUMEL,
        cpus=cpus,
        device=where,
    )
    return choose(rates)


def kernels_for(capability: tuple[int, int]) -> bytes:
    """The compiled kernels; empty, with a warning, where nothing can compile them."""
    from superoffload.cuda.compile import compile_kernels

    try:
        return compile_kernels(f"sm_{capability[0]}{capability[1]}")
    except KernelsUnavailable as error:
        warnings.warn(
            f"superoffload: {error}. Training goes on without them: gradients are copied one by one and summed on the "
            "CPU, with the same result",
            RuntimeWarning,
            stacklevel=2,
        )
        return b""
