"""Launches our pack kernel alone through the driver: what the link enqueues per bucket, without the rest."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_suite.launches import THREADS, copy_pieces, grid_for, table_argument
from superoffload.errors import SuperOffloadError
from superoffload.links.cuda.compile import compile_kernels
from superoffload.links.cuda.geometry import count_blocks

# Enqueues a kernel by its name: (name, grid, arguments as ctypes values).
Launch = Callable[[str, int, Sequence[Any]], None]


class DriverKernels:
    """Loads the compiled kernels into the context that torch uses."""

    def __init__(self, device: torch.device) -> None:
        major, minor = torch.cuda.get_device_capability(device)
        cubin = compile_kernels(f"sm_{major}{minor}")
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._module = ctypes.c_void_p()
        self._functions: dict[str, ctypes.c_void_p] = {}
        self._call("cuModuleLoadData", ctypes.byref(self._module), ctypes.c_char_p(cubin))

    def _call(self, name: str, *arguments: Any) -> None:
        result = getattr(self._driver, name)(*arguments)
        if result != 0:
            raise SuperOffloadError(
                f"{name}: the CUDA driver answered {result}; nvidia-smi shows the state of the device"
            )

    def launch(self, name: str, grid: int, arguments: Sequence[Any]) -> None:
        if name not in self._functions:
            function = ctypes.c_void_p()
            self._call("cuModuleGetFunction", ctypes.byref(function), self._module, name.encode())
            self._functions[name] = function
        values = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(value) for value in arguments))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        self._call("cuLaunchKernel", self._functions[name], grid, 1, 1, THREADS, 1, 1, 0, stream, values, None)


class PackKernel:
    """Packs one flat gradient of bf16; ``sums`` are as the kernel leaves them."""

    def __init__(self, gradient: Tensor, packed: Tensor, launch: Launch) -> None:
        pieces = copy_pieces([(gradient.data_ptr(), 0, gradient.numel())])
        blocks = count_blocks(pieces)
        self.sums = torch.zeros(blocks, dtype=torch.float64, device=gradient.device)
        self._kept = gradient, packed
        self._launch, self._grid = launch, grid_for(self.name, blocks)
        addresses = (packed.data_ptr(), self.sums.data_ptr(), 0)  # no sums of bits, as if gradients were freed
        self._arguments = [
            table_argument(pieces, there=0),
            ctypes.c_uint(len(pieces)),
            *map(ctypes.c_void_p, addresses),
        ]

    name = "pack_bf16"

    def __call__(self) -> None:
        self._launch(self.name, self._grid, self._arguments)
