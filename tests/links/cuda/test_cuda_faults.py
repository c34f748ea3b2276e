"""What goes wrong on a device: a clear error, in bounded time, and the state of the last finished step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from superoffload import AdamW
from superoffload.errors import ArgumentError, DeviceError, StateError, WorkerError
from superoffload.host.environment import DEVICE_TIMEOUT, device_timeout
from superoffload.links.cuda.link import CudaLink, CudaOptions
from tests.support.adamw_training import batch, python, train
from tests.support.fake_cuda import Fake, LateLink, on_fake_device
from tests.support.fake_cuda_training import host_digests, state_of, training

OUT_OF_MEMORY, LAUNCH_FAILED = 2, 719


# ---- errors of the device -------------------------------------------------------------------------------------------


def test_out_of_memory_while_packing(fake: Fake) -> None:
    expected = host_digests(range(2))
    with training(fake) as (model, optimizer):
        optimizer.zero_grad()
        fake.fail("cuLaunchKernel", OUT_OF_MEMORY)
        with pytest.raises(DeviceError, match=r"packing .*CUDA_ERROR_OUT_OF_MEMORY.*smaller batch"):
            batch(model, 2).backward()
        with pytest.raises(StateError, match="gradients are missing"):
            optimizer.step()
        optimizer.zero_grad()
        fake.synchronize()
        assert optimizer.state_digests() == expected
        train(model, optimizer, range(2, 4))  # and it goes on
        fake.synchronize()
        assert optimizer.state_digests() == host_digests(range(4))


def test_a_device_that_fails_during_backward(fake: Fake) -> None:
    expected = host_digests(range(2))
    with training(fake) as (model, optimizer):
        optimizer.zero_grad()
        loss = batch(model, 2)
        fake.sleep(500_000)
        loss.backward()
        fake.breaks(LAUNCH_FAILED)
        with pytest.raises(WorkerError, match=r"CUDA_ERROR_LAUNCH_FAILED.*save state_dict"):
            optimizer.step()
        assert state_of(optimizer.state_digests()) == state_of(expected)
        assert all(int(state["step"]) == 2 for state in optimizer.state_dict()["state"].values())


def test_a_delivery_that_fails_is_an_error_with_the_step_done(fake: Fake) -> None:
    with training(fake) as (model, optimizer):
        optimizer.zero_grad()
        batch(model, 2).backward()
        fake.synchronize()
        fake.fail("cuMemcpyHtoDAsync_v2", OUT_OF_MEMORY, 1)  # the first is of what noticing reads
        with pytest.raises(DeviceError, match="cuMemcpyHtoDAsync of new parameters"):
            optimizer.step()
        assert state_of(optimizer.state_digests()) == state_of(host_digests(range(3)))
        optimizer.zero_grad()
        with pytest.raises(DeviceError, match="an earlier delivery of parameters has failed"):
            batch(model, 3).backward()


def test_no_driver() -> None:
    class Nothing:
        ordinal = 0

    with pytest.raises(DeviceError, match=r"libno-such-driver\.so.*install the NVIDIA driver"):
        CudaLink(Nothing(), CudaOptions(library="libno-such-driver.so"))  # type: ignore[arg-type]


# ---- the program ends, forks, is interrupted ------------------------------------------------------------------------


_LEAVES = """
from tests.support.adamw_training import batch
from tests.support.fake_cuda_training import training
from tests.support.fake_cuda import Fake, LateLink, on_fake_device
fake = Fake()
context = training(fake)
model, optimizer = context.__enter__()
fake.delays(1, 20_000)
optimizer.zero_grad()
batch(model, 2).backward()
print("leaving", flush=True)
"""


def test_interpreter_exit_with_work_in_flight(fake: Fake) -> None:
    done = python().run(["-c", _LEAVES])
    assert done.returncode == 0 and done.stdout.strip() == "leaving" and "Traceback" not in done.stderr, done.stderr


def test_backward_and_step_in_a_graph_capture_are_refused(fake: Fake) -> None:
    """Before anything of it is enqueued or noted; what comes after the capture is stepped as ever."""
    with training(fake) as (model, optimizer):
        link: Any = optimizer._engine.link
        optimizer.zero_grad()
        fake.synchronize()
        calls = {name: fake.calls(name) for name in ("cuEventRecord", "cuLaunchKernel", "cuStreamWaitEvent")}
        link.fake_device.capturing = True
        with pytest.raises(DeviceError, match=r"CUDA graph is captured.*make_graphed_callables\(\) before"):
            batch(model, 2).backward()
        assert not optimizer._engine.is_filling
        assert {name: fake.calls(name) for name in calls} == calls
        link.fake_device.capturing = False
        optimizer.zero_grad()
        batch(model, 2).backward()
        link.fake_device.capturing = True
        with pytest.raises(DeviceError, match=r"outside of torch\.cuda\.graph"):
            optimizer.step()
        link.fake_device.capturing = False
        optimizer.step()
        train(model, optimizer, [3])
        fake.synchronize()
        assert optimizer.state_digests() == host_digests(range(4))


class Plain(LateLink):
    """Gradients are written by the test itself."""

    pack = CudaLink.pack
    deliver = CudaLink.deliver


def test_a_packing_that_is_tried_again_waits_for_gradients_of_other_streams(fake: Fake) -> None:
    """The other parameter of the bucket has no gradient, so it is ``step()`` that packs."""
    idle, used = (nn.Parameter(torch.zeros(4096)) for _ in range(2))
    main, side = fake.current, fake.make_stream()
    with on_fake_device(fake, Plain), AdamW([idle, used], bucket_numel=8192, speculation="never") as optimizer:
        fake.current = side
        used.sum().backward()
        assert used.grad is not None
        gradient = used.grad.view(-1)  # whose memory stays until it is written
        fake.sleep(300_000, side)
        fake.write(side, gradient, torch.full((4096,), 5.0))
        fake.current = main
        fake.fail("cuStreamWaitEvent", OUT_OF_MEMORY)
        with pytest.raises(DeviceError):
            optimizer.step()
        fake.reset()
        optimizer.step()
        assert optimizer.grad_norm == 320.0
        fake.synchronize(side)


def test_a_bad_timeout_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DEVICE_TIMEOUT, "soon")
    with pytest.raises(ArgumentError, match=f"{DEVICE_TIMEOUT}='soon'"):
        device_timeout()
    monkeypatch.setenv(DEVICE_TIMEOUT, "12.5")
    assert device_timeout() == 12.5
    monkeypatch.setenv(DEVICE_TIMEOUT, "")
    assert device_timeout() == CudaOptions.timeout_seconds
