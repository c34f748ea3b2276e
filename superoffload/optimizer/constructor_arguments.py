"""The arguments of ``superoffload.AdamW`` are checked before anything is made or changed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from superoffload.engine.placement import Asked, check_placement
from superoffload.errors import ArgumentError
from superoffload.host.numbers import check_threads, check_whole_number
from superoffload.optimizer.arguments import (
    as_groups,
    check_accumulate_dtype,
    check_delivery,
    check_groups,
    check_in_module,
    check_is_of,
    check_keep_grads,
    check_master_dtype,
    check_process_group,
    check_rank_check,
    check_replicated,
    check_seed,
    check_state_dtype,
    named_in,
)
from superoffload.optimizer.fp32_accumulation import check_fp32_sums


@dataclass(frozen=True)
class ConstructorArguments:
    """Keeps the arguments that an optimizer needs again when it starts anew on other parameters."""

    speculation: str
    on_demand: bool
    bucket_numel: int | None
    threads: int | None
    replicated: str
    check: tuple[bool, int]
    process_group: Any
    rank_timeout: float | None
    model: Callable[[], nn.Module | None]  # returns None once the model is freed
    keep_grads: bool | None
    placement: Asked
    fp32_sums: bool
    state_dtype: torch.dtype
    split_masters: bool
    seed: int


def check_given(
    params: Any, defaults: dict[str, Any], given: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], ConstructorArguments]:
    """Checks all arguments, ``given`` by name; returns the param groups and the other arguments."""
    placement = check_placement(given["placement"])
    check_keep_grads(given["keep_grads"])
    check_whole_number("bucket_numel", given["bucket_numel"])
    check_process_group(given["process_group"])
    check = check_rank_check(given["rank_check"])
    replicated = check_replicated(given["replicated"])
    delivery, module = given["delivery"], given["module"]
    check_delivery(delivery, module, given["model"], replicated)
    model: nn.Module | None = module if module is not None else given["model"]
    check_threads("threads", given["threads"])
    groups = as_groups(params)
    if not any(group["params"] for group in groups):  # one empty group among others is common: nothing to decay
        raise ArgumentError("params: only empty param groups; expected parameters to train")
    check_groups(groups, defaults)
    if model is not None:
        check_model = check_in_module if delivery == "on_demand" else check_is_of
        check_model(model, [param for group in groups for param in group["params"]])
    fp32_sums = check_accumulate_dtype(given["accumulate_dtype"])
    if fp32_sums:
        check_fp32_sums(named_in(groups), model)
    return groups, ConstructorArguments(
        speculation=given["speculation"],
        on_demand=delivery == "on_demand",
        bucket_numel=given["bucket_numel"],
        threads=given["threads"],
        replicated=replicated,
        check=check,
        process_group=given["process_group"],
        rank_timeout=given["rank_timeout"],
        model=weakref.ref(model) if model is not None else _no_model,
        keep_grads=given["keep_grads"],
        placement=placement,
        fp32_sums=fp32_sums,
        state_dtype=check_state_dtype(given["state_dtype"]),
        split_masters=check_master_dtype(given["master_dtype"], named_in(groups)),
        seed=check_seed(given["seed"]),
    )


def params_of(groups: list[dict[str, Any]]) -> list[Tensor]:
    """Returns the parameters of groups from ``as_groups``, without names."""
    return [entry[1] if isinstance(entry, tuple) else entry for group in groups for entry in group["params"]]


def _no_model() -> None:
    """Returns None where no model was given."""
