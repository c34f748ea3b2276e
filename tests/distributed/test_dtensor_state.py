"""State in host memory of DTensors that are on a device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from superoffload.distributed.ownership import dtensor_holding, like_parameter
from superoffload.host.tensors import is_dtensor, local_of


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of this process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_state_of_a_dtensor_stays_where_it_is(alone: None) -> None:
    """`from_local` would move it to the mesh's device; here the mesh is the CPU's, so the state is on another one."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (1,))
    param = distribute_tensor(torch.randn(6, 4).bfloat16(), mesh, [Shard(0)])
    holding = dtensor_holding("weight", param)
    for device in ("cpu", "meta"):
        state = like_parameter(param, holding, torch.zeros(24, device=device))
        assert is_dtensor(state)
        assert state.shape == param.shape and state.dtype is torch.float32
        assert state.placements == param.placements and state.device_mesh == mesh
        assert local_of(state).device.type == device
