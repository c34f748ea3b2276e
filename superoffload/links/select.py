"""Selects the link for given parameters. Tests replace ``link_for`` to put another link under the same optimizer."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from superoffload.errors import ArgumentError
from superoffload.host.tensors import local_of
from superoffload.links.base import Link
from superoffload.links.host import HostLink, InPlaceLink


def on_device(params: Sequence[Tensor]) -> bool:
    """Tells whether these parameters are on an accelerator, all of them or none."""
    return local_of(params[0]).device.type != "cpu"


def keeps_gradients(params: Sequence[Tensor], asked: bool | None, *, reduced: bool) -> bool | None:
    """Resolves ``keep_grads`` for these parameters; None leaves the choice to the link. ``reduced``: the model itself
    reduces gradients over ranks, in memory of its own."""
    if asked is False and (reduced or not on_device(params)):
        where = "under DistributedDataParallel, which reuses their memory," if reduced else "on the CPU"
        raise ArgumentError(f"keep_grads=False: gradients {where} are always kept; pass True or None")
    return True if reduced else asked


def link_for(params: Sequence[Tensor], *, keep_grads: bool | None, in_place: bool) -> Link:
    """Makes the link for parameters that are all on one device (optimizer/arguments.py has checked that).

    ``in_place``: on the CPU nothing need be stepped before ``step()``, or after it.
    """
    if not on_device(params):
        return InPlaceLink() if in_place else HostLink()
    from superoffload.links.cuda.link import cuda_link  # loads the driver

    return cuda_link(local_of(params[0]).device, keep_grads=keep_grads)
