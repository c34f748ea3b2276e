"""Stands in for a GPU: CPU tensors over a driver without a device (tests/support/fake_cuda.py).

With it the whole suite can be rehearsed: links, kernels and streams are those of a GPU, times are not.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn

from benchmarks.gpu_suite.devices import LONGEST_DELAY, Device
from superoffload.engine import layout
from superoffload.engine.bucket import Shard
from superoffload.engine.placement import move_state
from tests.support.fake_cuda import Fake, on_fake_device


class StandIn(Device):
    """Makes gradients appear late, and parameters be read late, on a stream of the stand-in."""

    kind = "stand-in"

    def __init__(self) -> None:
        super().__init__()
        self._fake = Fake()

    @contextmanager
    def links(self, **options: Any) -> Iterator[None]:
        def move(shard: Shard, device: torch.device | None) -> None:
            self._fake.synchronize()  # as a copy from a GPU does, behind its stream
            move_state(shard, device)

        with mock.patch.object(layout, "move_state", move), on_fake_device(self._fake, **options):
            yield

    def prepare(self, model: nn.Module) -> None:
        for module in model.modules():
            module.register_forward_pre_hook(lambda *_: self._fake.synchronize())

    def catch_up(self) -> None:
        self._fake.synchronize()

    def synchronize(self) -> None:
        self._fake.synchronize()

    def streams_of(self, link: Any) -> list[Any]:
        return [handle for name, handle in link.roles.items() if name != "current"]

    def delay(self, generator: random.Random, stream: Any = None) -> None:
        self._fake.sleep(1e6 * generator.random() * LONGEST_DELAY, stream)

    def facts(self) -> dict[str, Any]:
        return {"device": self.kind}
