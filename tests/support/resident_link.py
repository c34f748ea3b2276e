"""A link whose accelerator is this processor: resident state is stepped by the emulated kernels of csrc/cuda."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor

from superoffload.engine.bucket import Bucket
from superoffload.links.cuda import geometry
from superoffload.links.host import HostLink
from tests.support import emulated_kernels


class HostResidency:
    """The side of ``ResidentHostLink`` that keeps state."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.stepped: list[str] = []  # names of shards, in the order of their steps
        self.free = 1 << 30

    def attach(self, bucket: Bucket) -> None:
        bucket.gradient = torch.zeros(bucket.padded, dtype=bucket.gradient_dtype)

    def step(self, bucket: Bucket) -> None:
        assert bucket.resident_work is not None
        scalars = bucket.resident_work.scalars
        emulated_kernels.launch(geometry.step_kernel(bucket), geometry.step_table(bucket, scalars))
        present = [piece.shard for piece, frozen in zip(bucket.pieces, scalars, strict=True) if frozen is not None]
        self.stepped.extend(shard.name for shard in present)
        torch.autograd.graph.increment_version([shard.target() for shard in present])

    def free_bytes(self) -> int:
        return self.free


class ResidentHostLink(HostLink):
    """The host link, with an accelerator."""

    def __init__(self) -> None:
        super().__init__()
        self.residency = HostResidency()


@contextmanager
def accelerator() -> Iterator[list[ResidentHostLink]]:
    """Optimizers made inside have a link with an accelerator; the links, in the order in which they were made."""
    made: list[ResidentHostLink] = []

    def link_for(params: Sequence[Tensor], *, keep_grads: bool | None, in_place: bool) -> ResidentHostLink:
        made.append(ResidentHostLink())
        return made[-1]

    with mock.patch("superoffload.optimizer.adamw_parts.link_for", link_for):
        yield made
