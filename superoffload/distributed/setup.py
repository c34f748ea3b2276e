"""Finds, from the arguments of ``superoffload.AdamW``, the ranks that share a verdict and each rank's elements."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from superoffload.distributed.ownership import Holding, holder
from superoffload.host.processors import RankOnNode, allowed_cpus, cpus_near_gpu, share_cpus
from superoffload.host.tensors import is_dtensor

if TYPE_CHECKING:
    from superoffload.distributed.session import RankSession

_WRAPPERS = ("module.", "_orig_mod.", "_checkpoint_wrapped_module.")


@dataclass(frozen=True)
class RankSetup:
    """Describes this rank among the others. ``session`` None: it decides alone. ``sharing``: the ranks, of all
    ``world``, that share a verdict; ``first``: this is the first of them. ``reduced``: gradients of plain parameters
    are reduced over ranks during backward, though this rank may decide alone."""

    session: RankSession | None
    holding_of: Callable[[str, Tensor], Holding]
    cpus: list[int] | None = None  # this rank's share of the node's processors, if it shares the node with other ranks
    sharing: tuple[int, ...] = (0,)
    world: int = 1
    first: bool = True
    reduced: bool = False

    def is_early(self, param: Tensor) -> bool:
        """Tells whether a gradient is final when its accumulation hook runs: not if a reduction is still to come."""
        return is_dtensor(param) or not (self.reduced or self.session is not None)


def set_up_ranks(
    params: Sequence[Tensor],
    model: nn.Module | None,
    *,
    replicated: str,
    check: tuple[bool, int],
    process_group: Any,
    timeout: float | None,
    gradient_of: Callable[[Tensor], Tensor | None],
) -> RankSetup:
    """Makes the setup, collectively if there are several ranks; loads nothing of torch.distributed if there are not."""
    import torch.distributed as dist

    from superoffload.distributed.group import rank_group, rank_timeout

    seconds = rank_timeout(timeout)
    if not dist.is_available() or not dist.is_initialized():
        return RankSetup(None, holder("local", None, 0))
    rank, world = dist.get_rank(), dist.get_world_size()
    if replicated == "local" and not any(is_dtensor(param) for param in params):
        return RankSetup(None, holder("local", None, 0), sharing=(rank,), world=world, reduced=_is_ddp(model))
    group = rank_group(process_group, seconds)
    if group is None:
        return RankSetup(None, holder("local", None, rank), sharing=(rank,), world=world, reduced=_is_ddp(model))
    from superoffload.distributed.fully_shard import forward_view
    from superoffload.distributed.session import RankCheck, RankSession

    view = forward_view(model) if model is not None else None
    session = RankSession(group, RankCheck(*check), view, gradient_of)
    mine = RankOnNode(socket.gethostname(), group.rank, tuple(allowed_cpus()), near_gpu(params))
    cpus = share_cpus(group.exchange_objects("the processors of each rank", mine), group.rank)
    ranks = tuple(group.ranks)
    return RankSetup(session, holder(replicated, ranks, rank), cpus, ranks, world, rank == ranks[0], _is_ddp(model))


def _is_ddp(model: nn.Module | None) -> bool:
    return isinstance(model, nn.parallel.DistributedDataParallel)


def near_gpu(params: Sequence[Tensor]) -> tuple[int, ...]:
    """Returns the processors next to the parameters' GPU, where that is known."""
    device = next((param.device for param in params if param.device.type == "cuda"), None)
    if device is None:
        return ()
    properties: Any = torch.cuda.get_device_properties(device)
    try:
        bus = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    except AttributeError:  # older versions of torch
        return ()
    return cpus_near_gpu(bus)


def qualified_names(model: nn.Module | None) -> dict[int, str]:
    """Maps the ids of a model's parameters to their names, without the prefixes of wrappers."""
    named = model.named_parameters() if model is not None else ()
    return {id(param): plain_name(name) for name, param in named}


def plain_name(name: str) -> str:
    """Removes the prefixes of wrappers from ``name``."""
    for wrapper in _WRAPPERS[1:]:
        name = name.replace(wrapper, "")
    return name.removeprefix(_WRAPPERS[0])
