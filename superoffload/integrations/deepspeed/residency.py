"""Serves DeepSpeed's ``"ratio"`` below 1: some sub-groups' state stays on the accelerator and is stepped there.

DeepSpeed chooses the sub-groups (the first in forward order, whose gradients come last) and makes their masters on the
accelerator. Their gradients stay there too, and only block sums come down.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from superoffload.engine.bucket import Shard
from superoffload.engine.placement import Placer, Residency
from superoffload.errors import ArgumentError, KernelsUnavailable
from superoffload.links.base import Link


def resident_sub_groups(devices: Mapping[int, str]) -> frozenset[int]:
    """Returns the sub-groups that ``subgroup_to_device`` puts on an accelerator; none if that is the CPU."""
    return frozenset(sub_group for sub_group, device in devices.items() if device != "cpu")


def check_resident(masters: Mapping[int, Tensor], published: Mapping[int, Tensor]) -> None:
    """Checks that masters and parameters share a device: the kernel that steps a master also writes the parameter."""
    for sub_group, master in masters.items():
        if published[sub_group].device != master.device:
            raise ArgumentError(
                f'"offload_optimizer": "ratio" below 1 together with "offload_param": the parameters of sub-group '
                f"{sub_group} are on {published[sub_group].device}, their state on {master.device}; set ratio to 1.0"
            )


def accelerator_link(device: torch.device) -> Link:
    """Makes the link that packs and steps on ``device``. KernelsUnavailable: its kernels could not be compiled."""
    from superoffload.links.cuda.start import cuda_link  # loads the driver

    link = cuda_link(device, keep_grads=True)
    if link.residency is None:
        link.close()
        raise KernelsUnavailable(
            '"offload_optimizer": "ratio" below 1: state on the accelerator is stepped by kernels, which could not be '
            "compiled (see the warning before this); make NVRTC available, or set ratio to 1.0"
        )
    return link


class GivenPlaces(Placer):
    """Leaves shards where DeepSpeed has put them."""

    def __init__(self, residency: Residency) -> None:
        super().__init__(0.0, residency)
        self.why = "as DeepSpeed's ratio says"

    def choose(self, shards: Sequence[Shard]) -> set[int]:
        return {shard.index for shard in shards if shard.resident}
