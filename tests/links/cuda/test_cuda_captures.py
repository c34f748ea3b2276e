"""CUDA graphs: a backward or a step inside of a capture is refused before anything of it is enqueued."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from superoffload import AdamW
from superoffload.errors import DeviceError
from superoffload.links.cuda.device import TorchDevice
from tests.support.adamw_training import batch, model_of, train
from tests.support.fake_cuda import Fake, on_fake_device
from tests.support.fake_cuda_training import host_digests


@pytest.mark.parametrize("on_demand", [False, True])
def test_backward_and_step_in_a_graph_capture_are_refused(fake: Fake, on_demand: bool) -> None:
    """Before anything of it is enqueued or noted; what comes after the capture is stepped as ever."""
    model = model_of(torch.bfloat16)
    options: dict[str, Any] = {"delivery": "on_demand", "module": model} if on_demand else {}
    with (
        on_fake_device(fake) as links,
        AdamW(model.parameters(), threads=2, bucket_numel=1024, **options) as optimizer,
    ):
        for module in model.modules():  # behind the optimizer's own hooks, which deliver
            module.register_forward_pre_hook(lambda *_: fake.synchronize())
        train(model, optimizer, range(2))
        optimizer.synchronize()
        optimizer.zero_grad()
        fake.synchronize()
        calls = {name: fake.calls(name) for name in ("cuEventRecord", "cuLaunchKernel", "cuStreamWaitEvent")}
        links[0].fake_device.capturing = True
        with pytest.raises(DeviceError, match=r"CUDA graph is captured.*make_graphed_callables\(\) before"):
            batch(model, 2).backward()
        assert not optimizer._engine.is_filling
        assert {name: fake.calls(name) for name in calls} == calls
        links[0].fake_device.capturing = False
        optimizer.zero_grad()
        batch(model, 2).backward()
        links[0].fake_device.capturing = True
        with pytest.raises(DeviceError, match=r"outside of torch\.cuda\.graph"):
            optimizer.step()
        links[0].fake_device.capturing = False
        optimizer.step()
        train(model, optimizer, [3])
        optimizer.synchronize()
        fake.synchronize()
        assert optimizer.state_digests() == host_digests(range(4))


def test_torch_is_asked_whether_it_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the link's device, whichever is the current one."""
    device = object.__new__(TorchDevice)
    device.torch_device = torch.device("cuda", 1)
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
