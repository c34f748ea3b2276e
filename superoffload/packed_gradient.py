"""What stands in ``p.grad`` for a gradient that was packed and freed: it has no memory, and using it is an error.

So code that would clip, edit, average or add to gradients by hand learns that they are gone, instead of changing
nothing silently. ``None`` would do that: ``clip_grad_norm_`` skips parameters without a gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from superoffload.errors import StateError


class PackedGradient(Tensor):
    """Shape, dtype and device of a parameter's gradient; made once per parameter."""

    of: str  # the name of the parameter
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, name: str, param: Tensor, dtype: torch.dtype) -> PackedGradient:
        made: PackedGradient = torch.Tensor._make_wrapper_subclass(
            cls, param.shape, dtype=dtype, device=param.device, requires_grad=False
        )
        made.of = name
        return made

    def __init__(self, name: str, param: Tensor, dtype: torch.dtype) -> None:
        """All is done in ``__new__``, as for every tensor."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        found = next(_packed_in([args, kwargs or {}]))
        raise gradient_is_gone(found.of, f"{func} was called on it")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"PackedGradient({self.of!r}: packed and freed during backward)"

    @property
    def _local_tensor(self) -> Tensor:  # what fully_shard adds to, where a DTensor's gradient is there already
        raise gradient_is_gone(self.of, "another backward pass would have been added to it")


def gradient_is_gone(name: str, why: str) -> StateError:
    return StateError(
        f"{name}: its gradient was packed and freed during backward, and {why}. To clip, pass max_grad_norm; the norm "
        "is in grad_norm. For several backward passes before a step(), put all but the last into "
        "`with optimizer.accumulate():`. Between steps call zero_grad() (set_to_none=True). Code that must see or "
        "edit gradients (a GradScaler, clip_grad_norm_) needs AdamW(..., keep_grads=True)"
    )


def _packed_in(value: Any) -> Iterator[PackedGradient]:
    if isinstance(value, PackedGradient):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _packed_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _packed_in(item)
