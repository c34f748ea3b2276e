"""Adapts ``torch.distributed.fsdp.fully_shard``: what a forward gathers, and when; its gradients can stay in fp32.

Its DTensors tell the rest.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from superoffload.distributed.session import Gathered
from superoffload.errors import ArgumentError, StateError
from superoffload.host.tensors import is_dtensor, local_of
from superoffload.optimizer.accumulation import GradDtypes
from superoffload.optimizer.frameworks import Framework

_Place = tuple[nn.Module, str, Tensor]


def is_sharded_module(module: nn.Module) -> bool:
    """Tells whether ``fully_shard`` was called on the module, without loading FSDP2."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, getattr(fsdp, "FSDPModule", ()))


class ShardedModule:
    """Is a module that ``fully_shard`` was called on."""

    def __init__(self, module: nn.Module) -> None:
        self._module: Any = module

    def together(self) -> list[nn.Module] | None:
        """Returns the sharded modules that are all-gathered when the forward begins: this one, those of its group
        (``fully_shard([a, b])``), and those that it prefetches. None: this version of torch does not show it."""
        try:
            state = self._module._get_fsdp_state()
            states = [state, *state._states_to_forward_prefetch, *state._states_to_backward_prefetch]
            return [member for one in states for member in one._modules]
        except AttributeError:
            return None

    def streams(self) -> list[int]:
        """Returns the GPU streams on which FSDP2 reads sharded parameters. They wait for the current stream only when
        the outermost forward begins, so they must also wait for later writes. Empty before that forward."""
        try:
            context = self._module._get_fsdp_state()._comm_ctx
        except AttributeError as error:
            if all(local_of(param).device.type == "cpu" for param in self._module.parameters()):
                return []
            raise StateError(
                "delivery='on_demand': this version of torch does not show on which stream fully_shard gathers "
                "parameters, so nothing can wait for them there; use delivery='eager'"
            ) from error
        handle = getattr(getattr(context, "all_gather_copy_in_stream", None), "cuda_stream", None)
        return [int(handle)] if handle is not None else []

    def call_before(self, function: Callable[[], None]) -> UnshardHook:
        """Calls ``function`` when ``module.unshard()`` is called, which gathers without a forward."""
        return UnshardHook(self._module, function)


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


def _gathered(places: dict[nn.Module, list[_Place]]) -> Iterator[tuple[Tensor, Tensor]]:
    for module, mine in places.items():
        sharded: Any = module
        was_sharded = any(_now(place) is place[2] for place in mine)
        sharded.unshard()
        for place in mine:
            whole = _now(place)
            if whole is not place[2]:
                yield place[2], whole.detach()
        if was_sharded:
            sharded.reshard()


def _places(module: nn.Module) -> Iterator[_Place]:
    """Yields the sharded parameters below ``module`` that no nested sharded module manages."""
    for name, param in module.named_parameters(recurse=False):
        if is_dtensor(param):
            yield module, name, param
    for child in module.children():
        if not is_sharded_module(child):
            yield from _places(child)


def _now(place: _Place) -> Tensor:
    """Returns the module's present tensor under the parameter's name: sharded or gathered."""
    module, name, _ = place
    tensor: Tensor = getattr(module, name)
    return tensor


# ---- gradients stay in fp32 after their reduction, where torch would round them -------------------------------------


def sharded_in_16_bits(model: nn.Module, params: Sequence[Tensor]) -> list[Any]:
    """Finds the groups of ``fully_shard`` that have any of ``params``, which all are bf16 or fp16. ArgumentError if a
    group does not reduce gradients in fp32: then they are rounded before they are added up."""
    wanted = {id(param) for param in params}
    found = []
    for group in all_groups(model) if wanted else ():
        if not any(id(one.sharded_param) in wanted for one in group.fsdp_params):
            continue
        if group.mp_policy.reduce_dtype is not torch.float32:
            raise ArgumentError(
                f"accumulate_dtype='fp32' with fully_shard and reduce_dtype={group.mp_policy.reduce_dtype}: gradients "
                "would be rounded before they are added up; pass fully_shard "
                "mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32)"
            )
        found.append(group)
    return found


class KeptGroup:
    """Keeps one ``fully_shard`` group's gradients in fp32 after the reduction, until all holders put it back.

    It widens parameters again when the group learns its dtypes, at the first forward: they may have been replaced.
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
        """Returns the group's one instance, with one more holder."""
        kept: KeptGroup = getattr(group, "_kept_by_superoffload", None) or cls(group)
        kept.add_holder()
        return kept

    def add_holder(self) -> None:
        self._holders += 1

    def _keep(self) -> None:
        for one in self._group.fsdp_params:
            self._dtypes.widen(one.sharded_param)
        self._rounded_to = getattr(self._group, "_orig_dtype", None)
        self._group._orig_dtype = torch.float32  # the dtype that gradients are cast to after the reduction

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


def all_groups(model: nn.Module) -> list[Any]:
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


def keep_reduced_gradients(model: nn.Module) -> None:
    """Keeps the gradients of sharded parameters in fp32 if the policy reduces them in fp32.

    torch (2.13 and before) rounds them to the dtype of the sharded parameter after the reduction, so a bf16 model loses
    the precision of ``reduce_dtype=torch.float32``. Call this after ``fully_shard`` and before making the optimizer;
    ``AdamW(accumulate_dtype="fp32", model=model)`` does it by itself. It costs 2 more bytes per parameter of this rank,
    on the device and on the host.
    """
    groups = all_groups(model)
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


class Fsdp2(Framework):
    def forward_view(self, model: nn.Module) -> Gathered | None:
        """Returns what yields the values. Under tensor parallelism each is a DTensor, of which this rank's part was
        gathered. Call this while the parameters are sharded, as they are between a backward and the next forward. A
        parameter that is still gathered when the generator runs (stale, if that was before the step) is yielded as it
        is."""
        owners = [module for module in model.modules() if is_sharded_module(module)]
        places = {module: list(_places(module)) for module in owners}
        return (lambda: _gathered(places)) if owners else None

    def gathering(self, module: nn.Module) -> ShardedModule | None:
        return ShardedModule(module) if is_sharded_module(module) else None

    def await_gradient(self, param: Tensor) -> None:
        """Waits until the gradient is in host memory, where ``CPUOffloadPolicy`` copies it.

        Before torch 2.13 hooks run while the copy is under way, on the stream that is current then."""
        mesh: Any = getattr(param, "device_mesh", None)
        if mesh is not None and mesh.device_type != "cpu" and local_of(param).device.type == "cpu":
            torch.get_device_module(mesh.device_type).current_stream().synchronize()

    def check_fp32_sums(self, model: nn.Module, params: Sequence[tuple[str, Tensor]]) -> None:
        sharded_in_16_bits(model, [param for _, param in params])

    def keep_fp32_sums(self, model: nn.Module, params: Sequence[Tensor]) -> Callable[[], None]:
        kept = [KeptGroup.hold(group) for group in sharded_in_16_bits(model, params)]

        def put_back() -> None:
            for group in kept:
                group.put_back()

        return put_back


ADAPTER = Fsdp2()
