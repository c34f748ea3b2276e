"""Masters take over fp32 values: those a model had before its conversion, and those of parameters that were written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from superoffload.distributed.session import plain_name
from superoffload.engine.bucket import Shard
from superoffload.engine.master_halves import is_rounded
from superoffload.errors import ArgumentError
from superoffload.host.bits import all_finite


def following(masters: Tensor, published: Tensor) -> Tensor:
    """Returns flat ``published`` in float32; elements that still are round(master) keep the bits of flat ``masters``.

    It compares bits, since the user may have written the other zero, or a NaN.
    """
    published = published.to(masters.device)
    return torch.where(is_rounded(published, masters), masters, published.to(torch.float32))


def follow(shard: Shard, published: Tensor) -> None:
    """Has the masters of ``shard`` follow its parameter, which was written: flat ``published``."""
    shard.write_masters(following(shard.read_masters(), published))


def read_masters(
    masters: Any, params: Sequence[tuple[str, Tensor]], part_of: Callable[[Tensor, Tensor], Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """Returns (parameter, this rank's elements as flat float32); raises ArgumentError where a value does not fit.

    A mapping may have more names than there are parameters, as a model's state_dict has. ``part_of``: see
    ``superoffload.optimizer.state_dict.read_state``.
    """
    values = _in_order(masters, [name for name, _ in params])
    return [
        (param, _read_master(name, param, value, part_of)) for (name, param), value in zip(params, values, strict=True)
    ]


def _in_order(masters: Any, names: Sequence[str]) -> list[Any]:
    if isinstance(masters, Mapping):
        by_name = {plain_name(str(name)): value for name, value in masters.items()}
        for name in names:
            if plain_name(name) not in by_name:
                raise ArgumentError(
                    f"masters: no value for {name!r}; give one for every parameter of the optimizer. Names are those "
                    "of the model given to AdamW(model=...), or of named parameters"
                )
        return [by_name[plain_name(name)] for name in names]
    if isinstance(masters, Tensor) or not isinstance(masters, Sequence):
        raise ArgumentError(f"masters: {type(masters).__name__}, expected a mapping of names to tensors, or a list")
    if len(masters) != len(names):
        raise ArgumentError(f"masters: {len(masters)} tensors, expected {len(names)}, one per parameter that trains")
    return list(masters)


def _read_master(name: str, param: Tensor, value: Any, part_of: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    if not isinstance(value, Tensor) or value.shape != param.shape or not value.is_floating_point():
        found = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ArgumentError(f"masters: {name}: {found}, expected a tensor of shape {tuple(param.shape)}")
    flat = part_of(param, value.detach()).to("cpu", torch.float32)
    if not all_finite(flat):
        raise ArgumentError(f"masters: {name}: NaN or infinite values, expected finite ones; give undamaged weights")
    published = part_of(param, param.detach()).to("cpu")
    different = int((~is_rounded(published, flat) & (flat.to(param.dtype) != published)).sum())
    if different:
        raise ArgumentError(
            f"masters: {name}: the parameter is not their rounding in {different} of {flat.numel()} elements; convert "
            f"the model with model.to({param.dtype}) from exactly these values, and give them before it changes"
        )
    return flat
