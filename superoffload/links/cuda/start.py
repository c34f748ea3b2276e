"""Makes the link of a torch device: compiles the kernels for it and reads the environment."""

from __future__ import annotations

import os

import torch

from superoffload.errors import KernelsUnavailable, warn
from superoffload.host.environment import device_timeout
from superoffload.links.cuda.device import TorchDevice
from superoffload.links.cuda.link import CudaLink, CudaOptions

LIBRARY_VARIABLE = "SUPEROFFLOAD_LIBCUDA"


def cuda_link(device: torch.device, *, keep_grads: bool | None) -> CudaLink:
    """Makes the link for parameters on ``device``, with the settings of this process' environment."""
    opened = TorchDevice(device)
    return CudaLink(opened, options_for(opened, keep_grads=keep_grads))


def options_for(device: TorchDevice, *, keep_grads: bool | None) -> CudaOptions:
    return CudaOptions(
        keep_grads=bool(keep_grads),
        image=kernels_for(torch.cuda.get_device_capability(device.torch_device)),
        timeout_seconds=device_timeout(),
        library=os.environ.get(LIBRARY_VARIABLE) or CudaOptions.library,
    )


def kernels_for(capability: tuple[int, int]) -> bytes:
    """Returns the compiled kernels; empty, with a warning, if nothing can compile them."""
    from superoffload.links.cuda.compile import compile_kernels

    try:
        return compile_kernels(f"sm_{capability[0]}{capability[1]}")
    except KernelsUnavailable as error:
        warn(
            f"{error}. Training goes on without them: gradients are copied one by one and summed on the "
            "CPU, with the same result"
        )
        return b""
