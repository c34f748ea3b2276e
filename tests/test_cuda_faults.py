"""What goes wrong on a device: a clear error, in bounded time, and the state of the last finished step. And gradients
that are freed: whoever would use them learns it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from superoffload import AdamW
from superoffload.arguments import _same_device
from superoffload.cuda.device import TorchDevice
from superoffload.cuda.link import CudaOptions
from superoffload.cuda.start import LIBRARY_VARIABLE
from superoffload.cuda.transfer import DIRECT, NARROW, WIDE, TransferPolicy
from superoffload.errors import ArgumentError, DeviceError, StateError, WorkerError
from superoffload.packed_gradient import PackedGradient
from tests.adamw_tools import batch, model_of, train
from tests.fake_cuda import Fake, LateLink, on_fake_device, on_host

OUT_OF_MEMORY, LAUNCH_FAILED = 2, 719
BOUND = 30  # seconds; on an idle machine all of these end within 5


@pytest.fixture(scope="module")
def fake() -> Fake:
    return Fake()


@pytest.fixture(autouse=True)
def _as_new(fake: Fake) -> Iterator[None]:
    fake.reset()
    yield
    fake.reset()
    fake.synchronize()


@contextmanager
def training(fake: Fake, *, link: dict[str, Any] | None = None, **options: Any) -> Iterator[tuple[nn.Module, AdamW]]:
    """Two steps are done; parameters are read behind the current stream."""
    model = model_of(torch.bfloat16)
    model.register_forward_pre_hook(lambda *_: fake.synchronize())
    options = {"speculation": "always", "threads": 2, "bucket_numel": 1024, **options}
    with on_fake_device(fake, **(link or {})):
        optimizer = AdamW(model.parameters(), **options)
        try:
            train(model, optimizer, range(2))
            fake.synchronize()
            yield model, optimizer
        finally:
            optimizer.close()


def host_digests(seeds: range, **options: Any) -> dict[str, str]:
    model = model_of(torch.bfloat16)
    with on_host(), AdamW(model.parameters(), threads=2, bucket_numel=1024, **options) as optimizer:
        train(model, optimizer, seeds)
        return optimizer.state_digests()


def state_of(digests: dict[str, str]) -> dict[str, str]:
    return {name: digest for name, digest in digests.items() if name != "published"}


# ---- errors of the device -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["cuLaunchKernel", "cuMemcpyDtoHAsync_v2", "cuEventRecord"])
def test_out_of_memory_while_packing(fake: Fake, call: str) -> None:
    expected = host_digests(range(2))
    with training(fake) as (model, optimizer):
        optimizer.zero_grad()
        fake.fail(call, OUT_OF_MEMORY)
        with pytest.raises(DeviceError, match=r"packing .*CUDA_ERROR_OUT_OF_MEMORY.*smaller batch"):
            batch(model, 2).backward()
        optimizer.zero_grad()
        fake.synchronize()
        assert optimizer.state_digests() == expected
        train(model, optimizer, range(2, 4))  # and it goes on
        fake.synchronize()
        assert optimizer.state_digests() == host_digests(range(4))


def test_a_step_after_a_failed_packing_packs_again(fake: Fake) -> None:
    with training(fake, bucket_numel=100_000) as (model, optimizer):
        optimizer.zero_grad()
        fake.fail("cuLaunchKernel", OUT_OF_MEMORY)  # of the only bucket: backward has ended all the same
        with pytest.raises(DeviceError):
            batch(model, 2).backward()
        fake.synchronize()
        optimizer.step()
        fake.synchronize()
        assert optimizer.state_digests() == host_digests(range(3))


def test_a_device_that_fails_during_backward(fake: Fake) -> None:
    expected = host_digests(range(2))
    with training(fake) as (model, optimizer):
        optimizer.zero_grad()
        loss = batch(model, 2)
        fake.sleep(500_000)
        loss.backward()
        fake.breaks(LAUNCH_FAILED)
        began = time.monotonic()
        with pytest.raises(WorkerError, match=r"CUDA_ERROR_LAUNCH_FAILED.*save state_dict"):
            optimizer.step()
        assert time.monotonic() - began < BOUND
        assert state_of(optimizer.state_digests()) == state_of(expected)
        states = optimizer.state_dict()["state"]
        assert all(int(state["step"]) == 2 for state in states.values())


def test_a_delivery_that_fails_is_an_error_with_the_step_done(fake: Fake) -> None:
    with training(fake) as (model, optimizer):
        optimizer.zero_grad()
        batch(model, 2).backward()
        fake.synchronize()
        fake.fail("cuMemcpyHtoDAsync_v2", OUT_OF_MEMORY)
        with pytest.raises(DeviceError, match="cuMemcpyHtoDAsync of new parameters"):
            optimizer.step()
        assert state_of(optimizer.state_digests()) == state_of(host_digests(range(3)))
        optimizer.zero_grad()
        with pytest.raises(DeviceError, match="an earlier delivery of parameters has failed"):
            batch(model, 3).backward()


def test_a_worker_that_throws(fake: Fake) -> None:
    with training(fake) as (model, optimizer):
        optimizer.zero_grad()
        optimizer._core.pool.inject_fault(0, "as told")
        batch(model, 2).backward()
        with pytest.raises(WorkerError, match="as told"):
            optimizer.step()
        fake.synchronize()
        assert optimizer.state_digests() == host_digests(range(2))
        train(model, optimizer, range(2, 3))
        fake.synchronize()
        assert optimizer.state_digests() == host_digests(range(3))


@pytest.mark.parametrize("policy", [NARROW, WIDE, DIRECT], ids=lambda policy: policy.name)
def test_pinned_memory_refused(fake: Fake, policy: TransferPolicy) -> None:
    """It goes on with ordinary memory, and says so once per piece of memory."""
    fake.registrable(4096)
    with (
        pytest.warns(RuntimeWarning, match=r"refused to pin .*memlock"),
        training(fake, link={"policy": policy}) as (model, optimizer),
    ):
        fake.delays(1, 1000)
        train(model, optimizer, range(2, 5))
        fake.synchronize()
        assert optimizer.state_digests() == host_digests(range(5))


def test_pinned_memory_is_reserved_once_and_given_back(fake: Fake) -> None:
    before = fake.registered_bytes()
    with training(fake) as (model, optimizer):
        reserved = fake.registered_bytes()
        assert reserved > before
        train(model, optimizer, range(2, 6))
        assert fake.registered_bytes() == reserved
        assert fake.calls("cuMemHostRegister_v2") == 2, "the flag, and all buckets together"
        optimizer.close()
        assert fake.registered_bytes() == before


def test_pinned_bytes_are_those_that_the_driver_registered(fake: Fake) -> None:
    before = fake.registered_bytes()
    with training(fake) as (model, optimizer):
        train(model, optimizer, range(2, 4))
        pinned = optimizer.stats()["pinned_bytes"]
        assert 0 <= fake.registered_bytes() - before - pinned < 2 * 4096, "whole pages of the flag and the buckets"
        assert pinned > 2 * 4 * sum(p.numel() for p in model.parameters()), "packed gradients and shadows"
        optimizer.close()
        assert optimizer.stats()["pinned_bytes"] == 0
    with AdamW(model.parameters(), threads=1) as on_the_cpu:
        assert on_the_cpu.stats()["pinned_bytes"] == 0


def test_memory_that_the_system_refused_to_pin_does_not_count(fake: Fake) -> None:
    fake.registrable(4096)
    with pytest.warns(RuntimeWarning, match="refused to pin"), training(fake) as (_, optimizer):
        assert optimizer.stats()["pinned_bytes"] == 4096, "the flag"


def test_no_copy_crosses_a_registration(fake: Fake) -> None:
    """The fake refuses copies that do."""
    with training(fake, link={"chunk": 8192}) as (model, optimizer):
        assert fake.calls("cuMemHostRegister_v2") > 3
        train(model, optimizer, range(2, 5))
        fake.synchronize()
        assert optimizer.state_digests() == host_digests(range(5))


def test_no_driver() -> None:
    from superoffload.cuda.link import CudaLink

    class Nothing:
        ordinal = 0

    with pytest.raises(DeviceError, match=r"libno-such-driver\.so.*install the NVIDIA driver"):
        CudaLink(Nothing(), CudaOptions(library="libno-such-driver.so"))  # type: ignore[arg-type]


def test_a_bad_timeout_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from superoffload.cuda.start import TIMEOUT_VARIABLE, _timeout

    monkeypatch.setenv(TIMEOUT_VARIABLE, "soon")
    with pytest.raises(ArgumentError, match=f"{TIMEOUT_VARIABLE}='soon'"):
        _timeout()
    monkeypatch.setenv(TIMEOUT_VARIABLE, "12.5")
    assert _timeout() == 12.5


# ---- the program ends, forks, is interrupted ------------------------------------------------------------------------


def test_interrupted_in_backward(fake: Fake) -> None:
    """Ctrl-C between two gradients, with copies in flight."""
    expected = host_digests(range(2))
    with training(fake) as (model, optimizer):
        optimizer.zero_grad()

        def interrupt(_: torch.Tensor) -> None:
            raise KeyboardInterrupt

        handle = next(model.parameters()).register_hook(interrupt)
        loss = batch(model, 2)
        fake.sleep(50_000)
        with pytest.raises(KeyboardInterrupt):
            loss.backward()
        handle.remove()
        began = time.monotonic()
        optimizer.close()
        assert time.monotonic() - began < BOUND
        fake.synchronize()
        assert optimizer.state_digests() == expected


def test_forked_after_construction(fake: Fake) -> None:
    with training(fake) as (model, optimizer):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                optimizer.step()
            except StateError as error:
                status = 0 if "fork" in str(error) else 2
            finally:
                os._exit(status)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        train(model, optimizer, range(2, 3))
        fake.synchronize()
        assert optimizer.state_digests() == host_digests(range(3))


_LEAVES = """
import sys
sys.path.insert(0, sys.argv[1])
from tests.test_cuda_faults import *
fake = Fake()
context = training(fake)
model, optimizer = context.__enter__()
fake.delays(1, 20_000)
optimizer.zero_grad()
batch(model, 2).backward()
print("leaving", flush=True)
"""


def test_interpreter_exit_with_work_in_flight(fake: Fake) -> None:
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run(
        [sys.executable, "-c", _LEAVES, str(root)], cwd=root, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "leaving"
    assert "Traceback" not in done.stderr


# ---- graphs that are captured ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_demand", [False, True])
def test_a_backward_in_a_graph_capture_is_refused(fake: Fake, on_demand: bool) -> None:
    """Before anything of it is enqueued or noted; what comes after the capture is stepped as ever."""
    model = model_of(torch.bfloat16)
    model.register_forward_pre_hook(lambda *_: fake.synchronize())
    options: dict[str, Any] = {"delivery": "on_demand", "module": model} if on_demand else {}
    with (
        on_fake_device(fake) as links,
        AdamW(model.parameters(), threads=2, bucket_numel=1024, **options) as optimizer,
    ):
        train(model, optimizer, range(2))
        optimizer.synchronize()
        optimizer.zero_grad()
        fake.synchronize()
        calls = {name: fake.calls(name) for name in ("cuEventRecord", "cuLaunchKernel", "cuStreamWaitEvent")}
        links[0].fake_device.capturing = True
        with pytest.raises(DeviceError, match=r"CUDA graph is captured.*make_graphed_callables\(\) before"):
            batch(model, 2).backward()
        assert not optimizer._core.is_filling
        assert {name: fake.calls(name) for name in calls} == calls
        links[0].fake_device.capturing = False
        optimizer.zero_grad()
        train(model, optimizer, range(2, 4))
        optimizer.synchronize()
        fake.synchronize()
        assert optimizer.state_digests() == host_digests(range(4))


def test_a_step_in_a_graph_capture_is_refused(fake: Fake) -> None:
    """With a backward before it; the step can be taken afterwards."""
    with training(fake) as (model, optimizer):
        optimizer.zero_grad()
        batch(model, 2).backward()
        link = optimizer._core.link
        assert isinstance(link, LateLink)
        device = link.fake_device
        device.capturing = True
        with pytest.raises(DeviceError, match=r"outside of torch\.cuda\.graph"):
            optimizer.step()
        device.capturing = False
        optimizer.step()
        fake.synchronize()
        assert optimizer.state_digests() == host_digests(range(3))


def test_torch_is_asked_whether_it_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    device = object.__new__(TorchDevice)
    for answer in (True, False):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda answer=answer: answer)
        assert device.is_capturing() is answer


# ---- memory that is refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("refusals", [1, 2, 3])
def test_memory_that_is_refused_when_buckets_are_laid_out_anew(fake: Fake, refusals: int) -> None:
    """After the first step buckets follow the observed order. The step is done; no gradient is lost afterwards."""

    def shuffled() -> nn.Module:
        torch.manual_seed(0)
        return nn.ModuleList([nn.Linear(24, 24) for _ in range(3)])

    def backward(model: Any, seed: int) -> None:
        values = torch.randn(4, 24, generator=torch.Generator().manual_seed(seed))
        for index in (1, 0, 2):  # not in the order of registration
            values = model[index](values)
        values.square().mean().backward()

    model = shuffled()
    with on_host(), AdamW(model.parameters(), threads=1, bucket_numel=1024) as host:
        for seed in range(3):
            host.zero_grad()
            backward(model, seed)
            host.step()
        expected = host.state_digests()
    model = shuffled()
    with on_fake_device(fake) as links, AdamW(model.parameters(), threads=1, bucket_numel=1024) as optimizer:
        backward(model, 0)
        links[0].fake_device.refused = refusals
        with pytest.raises(DeviceError, match="out of memory"):
            optimizer.step()
        fake.synchronize()
        assert optimizer.stats()["steps"] == 1
        for seed in (1, 2):
            while True:
                optimizer.zero_grad()
                fake.synchronize()
                try:
                    backward(model, seed)
                    break
                except DeviceError as error:
                    assert "out of memory" in str(error)
            optimizer.step()
        fake.synchronize()
        assert links[0].fake_device.refused == 0
        assert optimizer.state_digests() == expected


def test_a_group_whose_memory_is_refused_is_stepped_once_there_is_some(fake: Fake) -> None:
    def made() -> tuple[nn.Module, nn.Module]:
        torch.manual_seed(0)
        return nn.Linear(8, 8), nn.Linear(8, 8)

    def step(first: nn.Module, second: nn.Module, optimizer: AdamW, seed: int) -> None:
        optimizer.zero_grad()
        second(first(torch.full((2, 8), 0.1 * seed))).square().mean().backward()
        optimizer.step()

    digests = []
    for refused in (0, 2):
        first, second = made()
        with on_fake_device(fake) as links, AdamW(first.parameters(), threads=1) as optimizer:
            step(first, second, optimizer, 1)
            fake.synchronize()
            links[0].fake_device.refused = refused
            for name in ("weight", "bias"):
                group = {"params": [getattr(second, name)]}
                if refused:
                    with pytest.raises(DeviceError, match="out of memory"):
                        optimizer.add_param_group(group)
                else:
                    optimizer.add_param_group(group)
            for seed in (2, 3):
                step(first, second, optimizer, seed)
                fake.synchronize()
            digests.append(optimizer.state_digests())
    assert digests[0] == digests[1]


def test_host_memory_that_is_refused_is_a_device_error(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise MemoryError

    with training(fake) as (_, optimizer):
        link = optimizer._core.link
        monkeypatch.setattr("superoffload.cuda.link.PinnedArena", refuse)
        with pytest.raises(DeviceError, match="the host is out of memory; close other programs"):
            link.prepare(optimizer._core.buckets, anew=False)


# ---- gradients are freed --------------------------------------------------------------------------------------------


def _clip(model: nn.Module, _: AdamW) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def _scale_by_hand(model: nn.Module, _: AdamW) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)


def _second_backward(model: nn.Module, _: AdamW) -> None:
    batch(model, 3).backward()


def _scaler(model: nn.Module, optimizer: AdamW) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    scaler.step(optimizer)


def _second_step(_: nn.Module, optimizer: AdamW) -> None:
    optimizer.step()
    optimizer.step()


@pytest.mark.parametrize("use", [_clip, _scale_by_hand, _second_backward, _scaler, _second_step])
def test_using_a_freed_gradient_is_an_error(fake: Fake, use: Callable[[nn.Module, AdamW], None]) -> None:
    with training(fake) as (model, optimizer):
        optimizer.zero_grad()
        batch(model, 2).backward()
        assert all(isinstance(parameter.grad, PackedGradient) for parameter in model.parameters())
        with pytest.raises(StateError, match=r"max_grad_norm.*accumulate.*keep_grads=True"):
            use(model, optimizer)


def test_what_stands_in_for_a_gradient_goes_with_zero_grad(fake: Fake) -> None:
    with training(fake) as (model, optimizer):
        for set_to_none in (True, False):
            optimizer.zero_grad()
            batch(model, 2).backward()
            assert "packed and freed" in repr(next(model.parameters()).grad)
            optimizer.zero_grad(set_to_none)
            assert all(parameter.grad is None for parameter in model.parameters())
        fake.synchronize()
        assert optimizer.state_digests() == host_digests(range(2)), "steps that were never taken"


def test_a_gradient_that_is_taken_away_is_not_stepped(fake: Fake) -> None:
    def without_first(model: nn.Module, optimizer: AdamW) -> None:
        optimizer.zero_grad()
        batch(model, 2).backward()
        next(model.parameters()).grad = None
        optimizer.step()

    model: nn.Module = model_of(torch.bfloat16)
    with AdamW(model.parameters(), threads=2, bucket_numel=1024) as on_host:
        train(model, on_host, range(2))
        without_first(model, on_host)
        expected = on_host.state_digests()
    with training(fake) as (model, optimizer):
        without_first(model, optimizer)
        fake.synchronize()
        assert optimizer.state_digests() == expected


def test_model_zero_grad_and_another_backward(fake: Fake) -> None:
    """The first backward's gradients are gone: only the second counts."""
    with training(fake) as (model, optimizer):
        batch_of_another_step = 7
        model.zero_grad()
        batch(model, batch_of_another_step).backward()
        model.zero_grad()
        batch(model, 2).backward()
        optimizer.step()
        fake.synchronize()
        assert optimizer.state_digests() == host_digests(range(3))


def test_accumulated_gradients(fake: Fake) -> None:
    def window(model: nn.Module, optimizer: AdamW) -> None:
        optimizer.zero_grad()
        with optimizer.accumulate():
            batch(model, 10).backward()
        batch(model, 11).backward()
        optimizer.step()

    model: nn.Module = model_of(torch.bfloat16)
    with AdamW(model.parameters(), threads=2, bucket_numel=1024) as on_host:
        train(model, on_host, range(2))
        window(model, on_host)
        expected = on_host.state_digests()
    with training(fake) as (model, optimizer):
        window(model, optimizer)
        fake.synchronize()
        assert optimizer.state_digests() == expected


def test_kept_gradients_may_be_edited(fake: Fake) -> None:
    def edited(model: nn.Module, optimizer: AdamW) -> None:
        optimizer.zero_grad()
        batch(model, 2).backward()
        fake.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()

    model: nn.Module = model_of(torch.bfloat16)
    with AdamW(model.parameters(), threads=2, bucket_numel=1024) as on_host:
        train(model, on_host, range(2))
        edited(model, on_host)
        expected = on_host.state_digests()
    with training(fake, keep_grads=True) as (model, optimizer):
        edited(model, optimizer)
        fake.synchronize()
        assert optimizer.state_digests() == expected


# ---- arguments, state, timeline -------------------------------------------------------------------------------------


def test_parameters_on_several_devices() -> None:
    here, there = torch.device("cuda", 0), torch.device("cuda", 1)
    assert _same_device("a", here, None) == _same_device("b", here, here) == here
    with pytest.raises(ArgumentError, match=r"b: on cuda:1, while parameters before it are on cuda:0"):
        _same_device("b", there, here)


def test_a_parameter_moved_after_construction(fake: Fake) -> None:
    with training(fake) as (model, optimizer):
        expected = optimizer.state_digests()
        optimizer.zero_grad()
        batch(model, 2).backward()
        parameter = next(model.parameters())
        tracked = optimizer._tracked[parameter]
        tracked._device = torch.device("cuda", 1)  # where it was; here there is only one device
        with torch.no_grad():
            parameter.mul_(1)  # what moving it shows to version counters
        with pytest.raises(StateError, match=r"was on cuda:1, now on cpu.*after moving the model"):
            optimizer.step()
        tracked._device = parameter.device
        optimizer.zero_grad()
        fake.synchronize()
        assert state_of(optimizer.state_digests()) == state_of(expected)


@pytest.mark.parametrize("value", [0, "no", 1.5])
def test_keep_grads_is_checked(value: Any) -> None:
    with pytest.raises(ArgumentError, match="keep_grads"):
        AdamW(model_of().parameters(), keep_grads=value)


def test_checkpoints_between_devices(fake: Fake) -> None:
    """State that was saved over a device goes on on the host, and the other way."""
    with training(fake) as (model, optimizer):
        saved, weights = optimizer.state_dict(), {name: value.clone() for name, value in model.state_dict().items()}
        train(model, optimizer, range(2, 4))
        fake.synchronize()
        expected = optimizer.state_digests()
    other = model_of(torch.bfloat16, seed=5)
    other.load_state_dict(weights)
    with AdamW(other.parameters(), threads=2) as on_host:
        on_host.load_state_dict(saved)
        train(other, on_host, range(2, 4))
        assert on_host.state_digests() == expected
    with training(fake) as (model, optimizer):
        model.load_state_dict(weights)
        optimizer.load_state_dict(saved)
        train(model, optimizer, range(2, 4))
        fake.synchronize()
        assert optimizer.state_digests() == expected


def test_a_parameter_written_between_steps_is_kept(fake: Fake) -> None:
    def clamped(model: nn.Module, optimizer: AdamW) -> None:
        fake.synchronize()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.1, 0.1)
        train(model, optimizer, range(2, 4))

    model: nn.Module = model_of(torch.bfloat16)
    with AdamW(model.parameters(), threads=2, bucket_numel=1024) as on_host:
        train(model, on_host, range(2))
        clamped(model, on_host)
        expected = on_host.state_digests()
    with training(fake) as (model, optimizer):
        clamped(model, optimizer)
        fake.synchronize()
        assert optimizer.state_digests() == expected


def test_the_timeline_has_the_times_of_copies(fake: Fake, tmp_path: Path) -> None:
    with training(fake, trace=tmp_path / "trace.json") as (model, optimizer):
        fake.delays(1, 3000)
        train(model, optimizer, range(2, 4))
    events = [event for event in json.loads((tmp_path / "trace.json").read_text()) if event["ph"] == "X"]
    lanes = {event["cat"] for event in events}
    assert {"pack and down", "up and deliver"} <= lanes
    late = [event["dur"] for event in events if event["cat"] == "pack and down"]
    assert max(late) > 100, "microseconds until a gradient has arrived, not until it was enqueued"


def test_the_link_is_one_of_the_fake_device(fake: Fake) -> None:
    """Nothing above would show anything if it ran on the host link."""
    assert os.environ.get(LIBRARY_VARIABLE) is None
    with training(fake) as (_, optimizer):
        assert isinstance(optimizer._core.link, LateLink)
        assert fake.calls("cuLaunchKernel") > 0 and fake.calls("cuStreamWriteValue32_v2") > 0
