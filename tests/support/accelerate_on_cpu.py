"""Has Accelerate take on CPU ranks the paths that it offers for ranks with GPUs only."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

from tests.support.rank_processes import flat_mesh


@contextlib.contextmanager
def fsdp2_on_the_cpu() -> Iterator[None]:
    """Accelerate offers FSDP for ranks with GPUs only; this makes it take the same path on a CPU."""
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    more = {"ACCELERATE_USE_CPU": "true", "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    make = AcceleratorState.__init__

    def made(self: Any, *args: Any, **options: Any) -> None:
        make(self, *args, **options)
        self.distributed_type = DistributedType.FSDP
        if getattr(self, "fsdp_plugin", None) is None:
            self.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False)

    AcceleratorState._reset_state(reset_partial_state=True)
    kept = dict(os.environ)
    os.environ.update(TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1", **more)
    AcceleratorState.__init__ = made
    try:
        yield
    finally:
        AcceleratorState.__init__ = make
        AcceleratorState._reset_state(reset_partial_state=True)
        os.environ.clear()
        os.environ.update(kept)


@contextlib.contextmanager
def mesh_on_the_cpu() -> Iterator[None]:
    """Accelerate offers ParallelismConfig for ranks with GPUs only; this makes it take the same path on a CPU."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    with (
        mock.patch.dict(os.environ, ACCELERATE_USE_CPU="true", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1"),
        mock.patch.object(Accelerator, "multi_device", property(lambda _: True)),
    ):
        try:
            yield
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)


def on_the_cpu() -> contextlib.AbstractContextManager[None]:
    return mesh_on_the_cpu() if flat_mesh().ndim > 1 else fsdp2_on_the_cpu()
