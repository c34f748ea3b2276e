"""Sets torch up so that runs can be repeated: deterministic algorithms, a number of threads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def deterministic_torch(threads: int | None) -> Iterator[int]:
    """Sets deterministic algorithms and a thread count, so that equal steps give equal gradients; yields the count."""
    algorithms = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    with torch_threads(threads) as count:
        torch.use_deterministic_algorithms(True)
        try:
            yield count
        finally:
            torch.use_deterministic_algorithms(algorithms, warn_only=warn_only)


@contextmanager
def torch_threads(threads: int | None) -> Iterator[int]:
    """Sets torch's own thread count for a while (None: unchanged); yields the count."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)
