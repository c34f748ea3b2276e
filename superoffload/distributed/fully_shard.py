"""Reads what a forward of ``torch.distributed.fsdp.fully_shard`` gathers, and when; its DTensors tell the rest."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from superoffload.errors import StateError
from superoffload.host.tensors import is_dtensor, local_of

_Place = tuple[nn.Module, str, Tensor]


def forward_view(model: nn.Module) -> Callable[[], Iterator[tuple[Tensor, Tensor]]] | None:
    """Makes a collective generator of (sharded parameter, its gathered value in forward); None if nothing is sharded.

    Under tensor parallelism the value is a DTensor, of which this rank's part was gathered. Call this while the
    parameters are sharded, as they are between a backward and the next forward. A parameter that is still gathered when
    the generator runs (stale, if it was gathered before the step) is yielded as it is.
    """
    try:
        from torch.distributed.fsdp import FSDPModule
    except ImportError:
        return None
    owners = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not owners:
        return None
    places = {module: list(_places(module, FSDPModule)) for module in owners}

    def gathered() -> Iterator[tuple[Tensor, Tensor]]:
        for module in owners:
            mine = places[module]
            was_sharded = any(_now(place) is place[2] for place in mine)
            module.unshard()
            for place in mine:
                whole = _now(place)
                if whole is not place[2]:
                    yield place[2], whole.detach()
            if was_sharded:
                module.reshard()

    return gathered


def await_offload(param: Tensor) -> None:
    """Waits, in a hook of ``param``, until its gradient is in host memory, where ``CPUOffloadPolicy`` copies it.

    Before torch 2.13 hooks run while the copy is under way, on the stream that is current then.
    """
    mesh: Any = getattr(param, "device_mesh", None)
    if mesh is not None and mesh.device_type != "cpu" and local_of(param).device.type == "cpu":
        torch.get_device_module(mesh.device_type).current_stream().synchronize()


def is_sharded_module(module: nn.Module) -> bool:
    """Tells whether ``fully_shard`` was called on the module, without loading FSDP2."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, getattr(fsdp, "FSDPModule", ()))


def gathered_with(module: nn.Module) -> list[nn.Module] | None:
    """Lists the sharded modules that are all-gathered when ``module``'s forward begins: itself, those of its group
    (``fully_shard([a, b])``), and those that it prefetches. None: this version of torch does not show it."""
    sharded: Any = module
    try:
        state = sharded._get_fsdp_state()
        states = [state, *state._states_to_forward_prefetch, *state._states_to_backward_prefetch]
        return [member for one in states for member in one._modules]
    except AttributeError:
        return None


def gathering_streams(module: nn.Module) -> list[int]:
    """Returns the GPU streams on which FSDP2 reads sharded parameters. They wait for the current stream only when the
    outermost forward begins, so they must also wait for later writes. Empty before that forward."""
    sharded: Any = module
    try:
        context = sharded._get_fsdp_state()._comm_ctx
    except AttributeError as error:
        if all(local_of(param).device.type == "cpu" for param in module.parameters()):
            return []
        raise StateError(
            "delivery='on_demand': this version of torch does not show on which stream fully_shard gathers parameters, "
            "so nothing can wait for them there; use delivery='eager'"
        ) from error
    handle = getattr(getattr(context, "all_gather_copy_in_stream", None), "cuda_stream", None)
    return [int(handle)] if handle is not None else []


class UnshardHook:
    """Calls ``before`` when ``module.unshard()`` is called, which gathers without a forward."""

    def __init__(self, module: nn.Module, before: Callable[[], None]) -> None:
        original: Any = module.unshard

        def unshard(*args: Any, **kwargs: Any) -> Any:
            before()
            return original(*args, **kwargs)

        self._module = module
        self._wrapper = unshard
        object.__setattr__(module, "unshard", unshard)

    def remove(self) -> None:
        """Restores ``unshard``, unless other code has replaced it since."""
        if vars(self._module).get("unshard") is self._wrapper:
            object.__delattr__(self._module, "unshard")


def _places(module: nn.Module, kind: type) -> Iterator[_Place]:
    """Yields the sharded parameters below ``module`` that no nested module of the kind manages."""
    for name, param in module.named_parameters(recurse=False):
        if is_dtensor(param):
            yield module, name, param
    for child in module.children():
        if not isinstance(child, kind):
            yield from _places(child, kind)


def _now(place: _Place) -> Tensor:
    """Returns the module's present tensor under the parameter's name: sharded or gathered."""
    module, name, _ = place
    tensor: Tensor = getattr(module, name)
    return tensor
