"""``AdamW.check_reads()`` finds reads and writes of parameters whose new values were not delivered yet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from superoffload.errors import StateError
from superoffload.host.tensors import local_of

# These use a tensor's shape, dtype and device, not its values.
_LIKE = {"empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"}
_NEW = {"new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full"}


class CheckReads(TorchDispatchMode):
    """Raises when an operation uses a tensor of ``undelivered()``, which returns names and values."""

    def __init__(self, undelivered: Callable[[], Sequence[tuple[str, Tensor]]]) -> None:
        super().__init__()
        self._undelivered = undelivered

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not (func.is_view or func.overloadpacket.__name__ in _LIKE | _NEW):
            undelivered = self._undelivered()
            if undelivered:
                self._check(func, undelivered, tree_leaves((args, kwargs)))
        return func(*args, **kwargs)

    def _check(self, func: Any, undelivered: Sequence[tuple[str, Tensor]], leaves: Sequence[Any]) -> None:
        used = [extent for extent in map(_extent, leaves) if extent is not None]
        for name, value in undelivered:
            mine = _extent(value)
            if mine is not None and any(begin < mine[1] and mine[0] < end for begin, end in used):
                raise StateError(
                    f"{name}: {func.overloadpacket} uses it before its value of the last step was delivered; call "
                    "synchronize() before parameters are read or written outside of the module's own forward passes"
                )


def _extent(leaf: Any) -> tuple[int, int] | None:
    """Returns the address of a tensor's first byte and the one behind its last byte; None where it has no memory."""
    if not isinstance(leaf, Tensor):
        return None
    tensor = local_of(leaf)
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.numel() == 0:
        return None
    try:
        begin = tensor.data_ptr()
    except RuntimeError:  # a tensor without memory of its own
        return None
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * tensor.element_size()
