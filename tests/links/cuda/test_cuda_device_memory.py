"""Memory of freed gradients that is written again without asking; what torch says of memory."""

from __future__ import annotations

import sys
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from superoffload import AdamW
from superoffload.host.memory import is_out_of_memory
from superoffload.links.cuda.device import TorchDevice
from tests.support.adamw_training import train
from tests.support.fake_cuda import Fake
from tests.support.fake_cuda_training import LATE, deep_model, out_of_memory, run

GRAPH_TREES = "torch._inductor.cudagraph_trees"


# ---- gradients of a pool that CUDA graphs share ---------------------------------------------------------------------


def replayed(fake: Fake, seed: int, *, waits: bool = True) -> dict[str, str]:
    """Each gradient's memory is written again on the current stream as soon as it was packed."""

    def program(model: nn.Module, optimizer: AdamW) -> None:
        link: Any = optimizer._engine.link
        link.fake_device.reusing = True
        if not waits:
            fake.drop_waits(link.roles["current"], link.roles["pack"])
        fake.delays(seed, LATE)
        train(model, optimizer, range(4))
        fake.synchronize()
        assert link.fake_device.ahead == [link.roles["pack"]], "the pack stream goes ahead of backward"
        assert not link.fake_device.released, "record_stream would keep the graphs' pool from its checkpoints"

    return run(program, make=deep_model, fake=fake).digests


def test_gradients_that_graphs_write_again_are_read_first(fake: Fake) -> None:
    expected = run(partial(train, seeds=range(4)), make=deep_model).digests
    assert all(replayed(fake, seed) == expected for seed in range(2))
    assert any(replayed(fake, seed, waits=False) != expected for seed in range(6))


# ---- what torch is asked --------------------------------------------------------------------------------------------


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> TorchDevice:
    """TorchDevice without a GPU; tests say what torch answers."""
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.delitem(sys.modules, GRAPH_TREES, raising=False)
    return TorchDevice(torch.device("cuda", 1))


def test_graph_trees_of_the_device_write_gradients_again(device: TorchDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not device.reuses_unasked(), "nothing was compiled"
    managers: dict[int, object] = {0: object()}

    def get_manager(ordinal: int, create_if_none_exists: bool) -> object | None:
        assert not create_if_none_exists
        return managers.get(ordinal)

    monkeypatch.setitem(sys.modules, GRAPH_TREES, SimpleNamespace(get_manager=get_manager))
    assert not device.reuses_unasked(), "those of another device"
    managers[1] = object()
    assert device.reuses_unasked()
    monkeypatch.setitem(sys.modules, GRAPH_TREES, SimpleNamespace())
    assert device.reuses_unasked(), "a version whose trees we cannot ask"
    asserting = mock.Mock(side_effect=AssertionError)
    monkeypatch.setitem(sys.modules, GRAPH_TREES, SimpleNamespace(get_manager=asserting))
    assert not device.reuses_unasked(), "torch's own answer in a thread without trees, before 2.13"
    from torch._inductor import cudagraph_trees

    monkeypatch.setitem(sys.modules, GRAPH_TREES, cudagraph_trees)
    assert not device.reuses_unasked(), "this torch still answers"
    for backend, unasked in (("cudaMallocAsync", False), ("pluggable", True)):
        monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda backend=backend: backend)
        assert TorchDevice(torch.device("cuda", 0)).reuses_unasked() is unasked, backend


def test_out_of_memory_is_told_in_several_ways() -> None:
    assert is_out_of_memory(out_of_memory())
    assert not is_out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))
    later: Any = getattr(torch, "AcceleratorError", None)  # since torch 2.8 what a later call of the runtime raises
    if later is not None:
        assert is_out_of_memory(later("CUDA error: out of memory\nCompile with ..."))
        assert not is_out_of_memory(later("CUDA error: an illegal memory access was encountered"))
