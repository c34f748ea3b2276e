"""Memory of freed gradients that is written again without asking; priorities; what torch says of memory."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from superoffload import AdamW
from superoffload.host.memory import is_out_of_memory
from superoffload.links.cuda.device import TorchDevice, active_bytes, peak_active_bytes
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


def test_memory_that_a_stream_still_reads_is_not_free(device: TorchDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Active, though no longer allocated: 300 of 500 bytes at the peak."""
    stats = {"allocated_bytes.all.peak": 100, "active_bytes.all.peak": 300, "active_bytes.all.current": 50}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 2000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 500)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 1.0, raising=False)
    assert (peak_active_bytes(), active_bytes(), device.free_bytes()) == (300, 50, 1200)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 0.25)
    assert device.free_bytes() == 500 - 300, "what set_per_process_memory_fraction has left"
    refused = mock.Mock(side_effect=NotImplementedError("not of this allocator"))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", refused)
    assert device.free_bytes() == 1200
    monkeypatch.delattr(torch.cuda, "get_per_process_memory_fraction")
    assert device.free_bytes() == 1200, "older torch"
    stats = {"allocated_bytes.all.peak": 100, "active_bytes.all.peak": 0}  # as cudaMallocAsync counts
    assert peak_active_bytes() == 100


def test_memory_is_held_for_the_stream_that_is_named(device: TorchDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Handle 0 is the default stream's, of which ``ExternalStream`` would make another one."""
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, of: ("external", handle, of))
    monkeypatch.setattr(torch.cuda, "default_stream", lambda of: ("default", of))
    gradients: list[Any] = [mock.Mock(), mock.Mock()]
    for handle, named in ((7, ("external", 7, device.torch_device)), (0, ("default", device.torch_device))):
        device.release(gradients, handle)
        for gradient in gradients:
            gradient.record_stream.assert_called_with(named)


def test_out_of_memory_is_told_in_several_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_out_of_memory(out_of_memory())
    assert not is_out_of_memory(RuntimeError("the cupboard is out of memory"))
    later: Any = getattr(torch, "AcceleratorError", None)  # since torch 2.8 what a later call of the runtime raises
    if later is not None:
        for text, code, expected in (
            ("out of memory\nCompile with ...", None, True),
            ("cudaErrorMemoryAllocation", 2, True),
            ("an illegal memory access was encountered", 700, False),
        ):
            error = later(f"CUDA error: {text}")
            if code is not None:
                error.error_code = code
            assert is_out_of_memory(error) is expected
        monkeypatch.delattr(torch, "AcceleratorError")
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert not is_out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))


def test_torch_is_asked_whether_it_captures(device: TorchDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the link's device, whichever is the current one."""
    current = [torch.device("cuda", 0)]

    @contextmanager
    def of(chosen: torch.device) -> Iterator[None]:
        current.append(chosen)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", of)
    for capturing in (torch.device("cuda", 0), torch.device("cuda", 1)):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda one=capturing: one == current[-1])
        assert device.is_capturing() is (capturing == device.torch_device)


def test_streams_have_the_priority_that_is_asked_for(device: TorchDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = mock.Mock(return_value=SimpleNamespace(cuda_stream=5))
    monkeypatch.setattr(torch.cuda, "Stream", stream)
    assert device.make_stream() == device.make_stream(ahead=True) == 5
    assert stream.mock_calls == [mock.call(device.torch_device, priority=priority) for priority in (0, -1)]
