"""As on an accelerator: gradients are still being copied when the next ones come. Events of a device, on processors."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import torch

from tests.support.deepspeed.ranks import Ranks
from tests.support.deepspeed.scenarios import CLIP_SOME, Scenario
from tests.support.deepspeed.training import OURS, end

SCENARIO = Scenario({"clip": CLIP_SOME}, micros=2, one_step_call=True)
STEPS = 3


class Event:
    """Has not happened before ``step()`` waits for the whole stream."""

    def record(self, stream: Any) -> None:
        """Nothing: copies on processors have ended when they return."""

    def query(self) -> bool:
        return False


class Accelerator:
    """Only ``superoffload`` sees it: to DeepSpeed, tensors are where they are."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def is_synchronized_device(self) -> bool:
        return False

    def Event(self) -> Event:
        return Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)


def train(late: bool) -> tuple[dict[str, str], list[int]]:
    """Two backwards before each step. How often each partition was called final in a step."""
    from deepspeed.accelerator import get_accelerator

    calls: Counter[int] = Counter()
    accelerator = Accelerator(get_accelerator()) if late else get_accelerator()
    with (
        mock.patch("superoffload.integrations.deepspeed.stage3.copies.get_accelerator", lambda: accelerator),
        mock.patch.object(torch.Tensor, "record_stream", lambda tensor, stream: None),
    ):
        engine = SCENARIO.engine(OURS, {"speculation": "always"})
        optimizer = engine.optimizer
        final = optimizer.parts.driver.final

        def counted(partition: Any, **kwargs: Any) -> None:
            calls[partition.key] += 1
            final(partition, **kwargs)

        optimizer.parts.driver.final = counted
        with mock.patch.object(optimizer, "reduce_and_partition_stream", mock.Mock()):
            SCENARIO.train(engine, range(STEPS))
            digests = optimizer.state_digests()
    end(engine)
    return digests, sorted(calls.values())


def test_only_the_last_gradient_is_final(two_ranks: Ranks) -> None:
    at_once = two_ranks.run(train, False)
    late = two_ranks.run(train, True)
    for (expected, _), (found, calls) in zip(at_once, late, strict=True):
        assert found == expected
        assert set(calls) == {STEPS}, "a gradient was handed over while the next one was being copied"
