"""Computes SHA-256 digests of a step's input and result, with torch set up so that they can be compared."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

STATE_PARTS = ("master", "exp_avg", "exp_avg_sq", "published")


@dataclass(frozen=True)
class StepDigests:
    """Holds digests of one step: of the gradients just before step(), and of the state after it."""

    gradients: str
    master: str
    exp_avg: str
    exp_avg_sq: str
    published: str

    def differing_state(self, other: StepDigests) -> list[str]:
        """Returns which parts of the state differ."""
        return [part for part in STATE_PARTS if getattr(self, part) != getattr(other, part)]


def gradient_digest(model: nn.Module) -> str:
    """Returns one digest over the names and gradient bits of all parameters, with a mark for a missing gradient."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(name.encode())
        if parameter.grad is None:
            digest.update(b" has no gradient")
        else:
            digest.update(parameter.grad.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


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
