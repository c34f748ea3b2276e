"""``torch.distributed.fsdp.fully_shard``: what a forward gathers, and when. All else is in its DTensors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from superoffload.errors import ArgumentError, StateError
from superoffload.grad_dtypes import GradDtypes
from superoffload.ranks.layout import is_dtensor, local_of

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


def await_offload(param: Tensor) -> None:
    """In a hook of ``param``: returns once its gradient is in host memory, where ``CPUOffloadPolicy`` copies it there.

    Before torch 2.13 hooks run while the copy is under way, on the stream that is current then.
    """
    mesh: Any = getattr(param, "device_mesh", None)
    if mesh is not None and mesh.device_type != "cpu" and local_of(param).device.type == "cpu":
        torch.get_device_module(mesh.device_type).current_stream().synchronize()


def keep_reduced_gradients(model: nn.Module) -> None:
    """Keeps the gradients of what ``fully_shard`` has sharded in fp32 where the policy reduces them in fp32.

    torch (2.13 and before) rounds them to the dtype of the sharded parameter behind the reduction; a bf16 model loses
    there what ``reduce_dtype=torch.float32`` was to save. To be called after ``fully_shard`` and before the optimizer
    is made, which takes them as they are; ``AdamW(accumulate_dtype="fp32", model=model)`` does it by itself. Costs 2
    more bytes per parameter of this rank, here and there.
    """
    groups = _all_groups(model)
    if not groups:
        raise ArgumentError(f"model: {type(model).__name__}, of which nothing is sharded; call fully_shard before this")
    kept = [group for group in groups if group.mp_policy.reduce_dtype is torch.float32]
    if not kept:
        raise ArgumentError(
            "model: fully_shard was called without MixedPrecisionPolicy(reduce_dtype=torch.float32), so that there are "
            "no fp32 gradients that could be kept; pass it as mp_policy="
        )
    for group in kept:
        KeptGroup.hold(group)


def keep_in_fp32(model: nn.Module, params: Iterable[Tensor]) -> Callable[[], None]:
    """Likewise for the groups that have any of ``params``; what it returns puts torch's rounding back."""
    kept = [KeptGroup.hold(group) for group in sharded_in_16_bits(model, params)]

    def put_back() -> None:
        for group in kept:
            group.put_back()

    return put_back


def sharded_in_16_bits(model: nn.Module, params: Iterable[Tensor]) -> list[Any]:
    """The groups of ``fully_shard`` that have any of ``params``, which all are bf16 or fp16; ArgumentError where
    gradients are not reduced in fp32, and so not added up in it before they are."""
    wanted = {id(param) for param in params}
    found = []
    for group in _all_groups(model) if wanted else ():
        if not any(id(one.sharded_param) in wanted for one in group.fsdp_params):
            continue
        if group.mp_policy.reduce_dtype is not torch.float32:
            raise ArgumentError(
                f"accumulate_dtype='fp32' with fully_shard and reduce_dtype={group.mp_policy.reduce_dtype}: gradients "
                "would be rounded before they are added up; pass it "
                "mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32)"
            )
        found.append(group)
    return found


class KeptGroup:
    """One group of ``fully_shard`` whose gradients stay in fp32 behind the reduction, until all holders put it back.

    Said again where the group learns its dtypes, at the first forward: parameters may have been replaced until then.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._holders = 0
        self._learn = group._init_mp_dtypes
        self._rounded_to: torch.dtype | None = None
        self._dtypes = GradDtypes()
        self._keep()
        group._init_mp_dtypes = self._learn_and_keep
        group._kept_by_superoffload = self

    @classmethod
    def hold(cls, group: Any) -> KeptGroup:
        """The same one for all who want it kept."""
        kept: KeptGroup = getattr(group, "_kept_by_superoffload", None) or cls(group)
        kept._holders += 1
        return kept

    def _keep(self) -> None:
        for one in self._group.fsdp_params:
            self._dtypes.widen(one.sharded_param)
        self._rounded_to = getattr(self._group, "_orig_dtype", None)
        self._group._orig_dtype = torch.float32  # to which gradients are cast behind the reduction

    def _learn_and_keep(self) -> None:
        self._learn()
        self._keep()

    def put_back(self) -> None:
        self._holders -= 1
        if self._holders > 0:
            return
        del self._group._kept_by_superoffload
        self._group._init_mp_dtypes = self._learn
        self._group._orig_dtype = self._rounded_to
        self._dtypes.put_back()


def _all_groups(model: nn.Module) -> list[Any]:
    return [group for module in model.modules() if is_sharded_module(module) for group in _groups_of(module)]


def _groups_of(module: nn.Module) -> list[Any]:
    sharded: Any = module
    state = sharded._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.12 and newer have several
    if groups is None:
        groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    for group in groups:
        params = [one.sharded_param for one in getattr(group, "fsdp_params", ())]
        if not (hasattr(group, "_init_mp_dtypes") and all(hasattr(param, "grad_dtype") for param in params)):
            raise StateError(
                f"torch {torch.__version__} does not show where fully_shard casts gradients, or has no p.grad_dtype "
                "(2.10 and newer have it): leave keep_reduced_gradients() and accumulate_dtype out, or keep the "
                "sharded parameters in fp32"
            )
    return list(groups)


def is_sharded_module(module: nn.Module) -> bool:
    """Whether ``fully_shard`` was called on it; without loading what does that."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, getattr(fsdp, "FSDPModule", ()))


def gathered_with(module: nn.Module) -> list[nn.Module] | None:
    """The sharded modules that are all-gathered when ``module``'s forward begins: itself, those of its group
    (``fully_shard([a, b])``), and those it was told to prefetch. None: this version of torch does not show it.
    """
    sharded: Any = module
    try:
        state = sharded._get_fsdp_state()
        states = [state, *state._states_to_forward_prefetch, *state._states_to_backward_prefetch]
        return [member for one in states for member in one._modules]
    except AttributeError:
        return None


def gathering_streams(module: nn.Module) -> list[int]:
    """Streams of a GPU on which FSDP2 reads sharded parameters. They wait for the current stream when the outermost
    forward begins and not again, so what is written later must be waited for on them, too. None before that forward.
    """
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
    """Calls ``before`` when somebody calls ``module.unshard()``, which gathers without a forward."""

    def __init__(self, module: nn.Module, before: Callable[[], None]) -> None:
        original: Any = module.unshard

        def unshard(*args: Any, **kwargs: Any) -> Any:
            before()
            return original(*args, **kwargs)

        self._module = module
        self._wrapper = unshard
        object.__setattr__(module, "unshard", unshard)

    def remove(self) -> None:
        """Leaves alone what somebody else has put in its place since."""
        if vars(self._module).get("unshard") is self._wrapper:
            object.__delattr__(self._module, "unshard")


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
