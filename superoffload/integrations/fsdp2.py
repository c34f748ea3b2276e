"""``torch.distributed.fsdp.fully_shard``: what a forward would gather. All else that FSDP2 needs is in its DTensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor, nn

from superoffload.ranks.layout import is_dtensor

_Place = tuple[nn.Module, str, Tensor]


def forward_view(model: nn.Module) -> Callable[[], Iterator[tuple[Tensor, Tensor]]] | None:
    """A collective generator of (sharded parameter, what forward gathers of it); None if nothing is sharded.

    To be made while the parameters are sharded, as they are between a backward and the next forward. A parameter that
    is still gathered at that time (a stale one, if it was gathered before the step) is shown as it is.
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
            was_sharded = any(is_dtensor(_now(place)) for place in mine)
            module.unshard()
            for place in mine:
                whole = _now(place)
                if not is_dtensor(whole):
                    yield place[2], whole.detach()
            if was_sharded:
                module.reshard()

    return gathered


def _places(module: nn.Module, kind: type) -> Iterator[_Place]:
    """The sharded parameters below ``module`` that no nested module of the kind manages."""
    for name, param in module.named_parameters(recurse=False):
        if is_dtensor(param):
            yield module, name, param
    for child in module.children():
        if not isinstance(child, kind):
            yield from _places(child, kind)


def _now(place: _Place) -> Tensor:
    """What the module has under the parameter's name at this moment: sharded or gathered."""
    module, name, _ = place
    tensor: Tensor = getattr(module, name)
    return tensor
