"""Keeps gradients of ``fully_shard`` in fp32 after their reduction, where torch would round them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from superoffload.distributed.fully_shard import is_sharded_module
from superoffload.errors import ArgumentError, StateError


class Widens(Protocol):
    """Sets the dtype that gradients of parameters may have to fp32, and back."""

    def widen(self, param: Any) -> None: ...

    def put_back(self) -> None: ...


def keep_in_fp32(model: nn.Module, params: Iterable[Tensor], dtypes: Callable[[], Widens]) -> Callable[[], None]:
    """Keeps gradients in fp32 for the groups that have any of ``params``; returns what restores torch's rounding."""
    kept = [KeptGroup.hold(group, dtypes) for group in sharded_in_16_bits(model, params)]

    def put_back() -> None:
        for group in kept:
            group.put_back()

    return put_back


def sharded_in_16_bits(model: nn.Module, params: Iterable[Tensor]) -> list[Any]:
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
        """Returns the group's one instance, with one more holder."""
        kept: KeptGroup = getattr(group, "_kept_by_superoffload", None) or cls(group, dtypes())
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
