"""Gradients of ``fully_shard`` that stay in fp32 behind their reduction, where torch would round them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from superoffload.errors import ArgumentError, StateError
from superoffload.ranks.fully_shard import is_sharded_module


class Widens(Protocol):
    """Sets the dtype that gradients of parameters may have to fp32, and back."""

    def widen(self, param: Any) -> None: ...

    def put_back(self) -> None: ...


def keep_in_fp32(model: nn.Module, params: Iterable[Tensor], dtypes: Callable[[], Widens]) -> Callable[[], None]:
    """Keeps them so for the groups that have any of ``params``. What it returns puts torch's rounding back."""
    kept = [KeptGroup.hold(group, dtypes) for group in sharded_in_16_bits(model, params)]

    def put_back() -> None:
        for group in kept:
            group.put_back()

    return put_back


def sharded_in_16_bits(model: nn.Module, params: Iterable[Tensor]) -> list[Any]:
    """The groups of ``fully_shard`` that have any of ``params``, which all are bf16 or fp16; ArgumentError where
    gradients are not reduced in fp32, and so not added up in it before they are."""
    wanted = {id(param) for param in params}
    found = []
    for group in all_groups(model) if wanted else ():
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

    def __init__(self, group: Any, dtypes: Widens) -> None:
        self._group = group
        self._holders = 0
        self._learn = group._init_mp_dtypes
        self._rounded_to: torch.dtype | None = None
        self._dtypes = dtypes
        self._keep()
        group._init_mp_dtypes = self._learn_and_keep
        group._kept_by_superoffload = self

    @classmethod
    def hold(cls, group: Any, dtypes: Callable[[], Widens]) -> KeptGroup:
        """The same one for every holder."""
        kept: KeptGroup = getattr(group, "_kept_by_superoffload", None) or cls(group, dtypes())
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
