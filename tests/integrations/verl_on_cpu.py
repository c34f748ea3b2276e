"""The CPU as a platform of verl, which has none of its own, and verl's own FSDP2 engines for it.

For the environment: ``VERL_PLATFORM=cpu VERL_USE_EXTERNAL_MODULES=tests.integrations.verl_on_cpu``, in front of others.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry


def _nothing(*args: Any, **options: Any) -> int:
    return 0


class PlatformCPU(PlatformBase):
    """Answers for the processors, where nothing runs on its own and memory has no cache."""

    device_name = "cpu"
    vendor_name = "generic"
    device_module = SimpleNamespace(
        **dict.fromkeys(("empty_cache", "synchronize", "set_device", "manual_seed", "ipc_collect"), _nothing),
        **dict.fromkeys(("max_memory_allocated", "max_memory_reserved", "memory_allocated"), _nothing),
        **dict.fromkeys(("memory_reserved", "reset_peak_memory_stats", "current_device"), _nothing),
        get_rng_state=torch.get_rng_state,
        set_rng_state=torch.set_rng_state,
        is_available=lambda: True,
        get_device_name=lambda *args: "CPU",
        mem_get_info=lambda *args: (0, 0),
    )
    synchronize = set_device = manual_seed = manual_seed_all = set_allocator_settings = empty_cache = _nothing
    profiler_start = profiler_stop = cudart = _nothing

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return torch.device("cpu")  # verl moves tensors there, and a number would be a GPU's

    def device_count(self) -> int:
        return 1

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def ray_resource_name(self) -> str:
        return "CPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False


PlatformRegistry.register(platform="cpu")(PlatformCPU)


def register_engines() -> None:
    """Registers verl's FSDP2 engines, which it does for GPUs and NPUs only. Loading them needs the platform."""
    from verl.workers.engine.base import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead

    for model_type, engine in (("language_model", FSDPEngineWithLMHead), ("value_model", FSDPEngineWithValueHead)):
        EngineRegistry.register(model_type, backend=["fsdp", "fsdp2"], device="cpu")(engine)


register_engines()
