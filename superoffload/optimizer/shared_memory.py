"""Two parameters that share memory are refused: each would have a master, and publish over the other's values."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from superoffload.errors import ArgumentError
from superoffload.host.tensors import local_of


def check_apart(named: Iterable[tuple[str, Tensor]]) -> None:
    """Raises ArgumentError if two parameters that train, of one device, have elements in the same memory.

    Parameters that are different parts of one flat tensor are apart. A parameter fills a run of memory, so that its
    first byte and its size tell.
    """
    end, last = 0, ""
    for begin, nbytes, name in sorted(_run(name, local_of(param)) for name, param in named if param.requires_grad):
        if nbytes and begin < end:
            raise ArgumentError(
                f"{name}: shares memory with {last}, and each would be stepped by itself and overwrite the other. To "
                "tie parameters, use one of them in both places (head.weight = embedding.weight, not .data); else "
                "give one of them memory of its own (.clone())"
            )
        end, last = max(end, begin + nbytes), name


def _run(name: str, local: Tensor) -> tuple[int, int, str]:
    return local.data_ptr(), local.numel() * local.element_size(), name
