"""The GPU suite's races, at toy size on a CPU: they find a delivery that comes too late."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from benchmarks.gpu_suite import races
from benchmarks.gpu_suite.devices import Device
from superoffload import _native


def test_a_parameter_that_a_delay_keeps_back_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Delays change no bit; with the planted fault a delivery that comes after a delay is lost."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # races would set it for good
    assert races.run_races("cpu", "always", "eager", seeds=[1], steps=3)["different_seeds"] == []
    delayed: list[bool] = []
    delay, publish = Device.delay, _native.HostPieces.publish

    def remembering(self: Device, generator: random.Random, stream: Any = None) -> None:
        delayed.append(True)
        delay(self, generator, stream)

    def losing(pieces: Any, parameters: Any) -> None:
        if not delayed:
            publish(pieces, parameters)
        delayed.clear()

    monkeypatch.setattr(Device, "delay", remembering)
    monkeypatch.setattr(_native.HostPieces, "publish", losing)
    assert races.run_races("cpu", "always", "eager", seeds=[1], steps=3)["different_seeds"] == [1]
    assert not torch.are_deterministic_algorithms_enabled()
