"""The GPU suite at toy size on a CPU: its contestants train alike, it finds a race, its targets are computed right."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from benchmarks.gpu_suite import races, training
from benchmarks.gpu_suite.contestants import ALL_ON_DEVICE, BARE, OURS, OURS_CLIPPED, OURS_FSDP2, OURS_SYNCHRONOUS
from benchmarks.gpu_suite.devices import Device
from benchmarks.gpu_suite.settings import TOY, train_row
from superoffload import _native

PEER, GPU_PEER = "DeepSpeed ZeRO-Offload", "DeepSpeed SuperOffload"
OURS_HALF = "ours, 50 % clipped"


@pytest.fixture(autouse=True)
def no_rank_afterwards(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Contestants make this process the only rank of a run; Accelerate would take what follows for distributed."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CUBLAS_WORKSPACE_CONFIG"):
        monkeypatch.setenv(name, "")  # so that it is put back as it was
        monkeypatch.delenv(name)
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


# ---- contestants -----------------------------------------------------------------------------------------------------


def measured(contestant: str) -> dict[str, Any]:
    return training.measure(train_row(contestant, "cpu", TOY, 64, False))


def test_all_contestants_of_a_cpu_train_the_same_way() -> None:
    """The same loss from the same model and batches, and clipping that does what the row says."""
    names = (ALL_ON_DEVICE, OURS, OURS_CLIPPED, OURS_SYNCHRONOUS, OURS_HALF, OURS_FSDP2, BARE)
    results = {name: measured(name) for name in names}
    ours, stats = results[OURS], {name: results[name].get("stats", {}) for name in names}
    assert len({result["losses"][0] for result in results.values()}) == 1 and "digests" not in results[BARE]
    assert ours["losses"] == pytest.approx(results[ALL_ON_DEVICE]["losses"], abs=2e-3)
    assert ours["losses"] == pytest.approx(results[OURS_FSDP2]["losses"], abs=2e-3)
    assert ours["digests"] == results[OURS_SYNCHRONOUS]["digests"] != results[OURS_CLIPPED]["digests"]
    assert [stats[name]["clip_rate"] for name in (OURS, OURS_CLIPPED)] == [0.0, 1.0]
    assert results[OURS_HALF]["timed"]["clipped_steps"] == results[OURS_HALF]["timed"]["steps"] / 2
    assert stats[OURS_SYNCHRONOUS]["buckets_speculated"] == 0 < stats[OURS]["buckets_speculated"]
    assert stats[OURS]["steps"] == TOY.warm_up + TOY.blocks * TOY.steps


# ---- races -----------------------------------------------------------------------------------------------------------


def test_a_parameter_that_a_delay_keeps_back_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Delays change no bit; with the planted fault a delivery that comes after a delay is lost."""
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
