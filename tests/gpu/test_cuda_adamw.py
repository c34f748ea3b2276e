"""AdamW on CUDA parameters: the bits of a CPU run of the same gradients, whatever is speculated, delayed or goes wrong.

Everything that a CPU can show runs there as well: the reference has to hold before a GPU is compared with it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from functools import cache
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.gpu_suite.given_gradients import NAN_STEP, STEPS, Run, backward, make, train
from benchmarks.gpu_suite.races import run_races
from superoffload import AdamW
from superoffload.errors import ArgumentError, StateError
from superoffload.host.memory import is_out_of_memory
from superoffload.links.cuda.device import active_bytes, peak_active_bytes
from tests.support.checkout import ROOT

MODES = ("always", "never", "adaptive")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
devices = pytest.mark.parametrize("device", DEVICES)
with_stand_in = pytest.mark.parametrize("device", ("stand-in", DEVICES[1]))  # where the device makes the links
gpu = pytest.mark.gpu


@cache
def reference(dtype: torch.dtype) -> Run:
    """Synchronous, eager, on the CPU."""
    return train("cpu", dtype, speculation="never")


# ---- the same bits --------------------------------------------------------------------------------------------------


@with_stand_in
@pytest.mark.parametrize("speculation", MODES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_are_those_of_the_synchronous_cpu_run(device: str, speculation: str, dtype: torch.dtype) -> None:
    run, expected = train(device, dtype, speculation=speculation), reference(dtype)
    assert run.norms == expected.norms
    assert run.digests == expected.digests
    assert all(torch.equal(one, other) for one, other in zip(run.parameters, expected.parameters, strict=True))
    assert run.losses == pytest.approx(expected.losses, rel=1e-3, abs=1e-4, nan_ok=True)
    assert run.stats["skipped_steps"] == 1 and run.stats["steps"] == STEPS - 1
    assert run.stats["clipped_steps"] == STEPS // 2 and run.digests[NAN_STEP] == run.digests[NAN_STEP - 1]
    assert (run.stats["buckets_speculated"] > 0) == (speculation != "never")


@with_stand_in
@pytest.mark.parametrize("speculation", MODES)
def test_delivery_on_demand_changes_no_bit(device: str, speculation: str) -> None:
    run = train(device, torch.bfloat16, speculation=speculation, delivery="on_demand", waits=False)
    eager = train(device, torch.bfloat16, speculation="never")
    assert (run.digests[-1], run.norms) == (eager.digests[-1], eager.norms)
    assert run.digests[-1] == reference(torch.bfloat16).digests[-1]
    assert repr(run.losses) == repr(eager.losses), "every forward has read the new parameters"


@with_stand_in
@pytest.mark.parametrize("placement", [None, {"gpu_fraction": 0.5}], ids=str)
@pytest.mark.parametrize("speculation", MODES)
def test_split_masters_have_the_bits_of_the_synchronous_cpu_run(
    device: str, speculation: str, placement: dict[str, float] | None
) -> None:
    """Their upper halves are in pinned memory, and on the device those of resident parameters."""

    def look(model: Any, optimizer: Any) -> None:
        assert all(optimizer.parts.params[param].shard.upper is not None for param in model.parameters())

    options: dict[str, Any] = {"master_dtype": "split", "before_step": look}
    run = train(device, torch.bfloat16, speculation=speculation, placement=placement, **options)
    assert run.bits() == train("cpu", torch.bfloat16, speculation="never", **options).bits()
    assert (run.stats["params_on_device"] > 0) == (placement is not None)


@with_stand_in
@pytest.mark.parametrize("delivery", ["eager", "on_demand"])
def test_random_delays_change_no_bit(device: str, delivery: str) -> None:
    assert run_races(device, "always", delivery, seeds=[1, 2, 3], steps=6)["different_seeds"] == []


@gpu
def test_gradients_are_freed_once_they_are_packed() -> None:
    """In the first step their memory is left alone; later ones use it for parameters that go up before the verdict."""
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(16))).to("cuda", torch.bfloat16)
    batch = torch.randn(8, 1024, device="cuda", dtype=torch.bfloat16)
    model(batch).float().square().mean().backward()  # what libraries allocate once
    model.zero_grad()
    optimizer = AdamW(model.parameters(), bucket_numel=1 << 20)
    peaks = []
    for _ in range(3):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = active_bytes()
        model(batch).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.synchronize()
        peaks.append(peak_active_bytes() - before)
    optimizer.close()
    one = 2 * 1024 * 1024
    assert peaks[0] < 8 * one, "less than half of the gradients at a time"
    assert max(peaks) < 17 * one, "all of them, and activations"


def _halved(model: Any, optimizer: Any) -> None:
    torch._foreach_mul_([param.grad for param in model.parameters()], 0.5)


def _added_to(model: Any, optimizer: Any) -> None:
    backward(model, 200)
    backward(model, 201)


def _looked_at(model: Any, optimizer: Any) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e30)
    assert all(len(param.grad.tolist()) == param.numel() for param in model.parameters())


def _unscaled(model: Any, optimizer: Any) -> None:
    device = str(next(model.parameters()).device)
    scale, found = torch.tensor(0.25, device=device), torch.zeros(1, device=device)
    torch._amp_foreach_non_finite_check_and_unscale_([param.grad for param in model.parameters()], found, scale)
    for param in model.parameters():
        param.grad.data.mul_(2)


@devices
@pytest.mark.parametrize("use", [_halved, _added_to, _looked_at, _unscaled])
@pytest.mark.parametrize("options", [{}, {"speculation": "never"}, {"keep_grads": True}], ids=str)
@pytest.mark.filterwarnings("ignore:superoffload:RuntimeWarning")
def test_edits_of_freed_and_of_kept_gradients_are_seen(device: str, options: dict[str, Any], use: Any) -> None:
    """Freed ones are brought back, with the bits of gradients that were kept where they are."""
    if use is _unscaled and (device == "cpu" or "keep_grads" in options):
        pytest.skip("needs freed gradients: edits through .data are not noticed where they are kept")
    run = train(device, torch.float32, before_step=use, **{"speculation": "always", **options})
    expected = train("cpu", torch.float32, speculation="never", before_step=_halved if use is _unscaled else use)
    assert run.bits() == expected.bits()
    assert (run.bits() == reference(torch.float32).bits()) is (use is _looked_at)


@gpu
def test_parameters_are_visible_on_other_streams() -> None:
    """Eager delivery: what waits for the stream of step() reads new parameters."""
    model, optimizer = make("cuda", torch.bfloat16, speculation="always")
    stream = torch.cuda.Stream()
    for step in range(3):
        backward(model, step)
        sleep: Any = torch.cuda._sleep
        sleep(10_000_000)
        optimizer.step()
        optimizer.zero_grad()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            seen = [param.detach().clone() for param in model.parameters()]
        stream.synchronize()
        masters = [optimizer.state[param]["master"] for param in model.parameters()]
        for value, master in zip(seen, masters, strict=True):
            assert torch.equal(value.cpu(), master.to(torch.bfloat16).view_as(value.cpu()))
    optimizer.close()


# ---- faults ---------------------------------------------------------------------------------------------------------


@gpu
def test_a_full_gpu_is_survived() -> None:
    """All of the memory taken between two steps: the step works, or fails with nothing changed, and then works."""
    model, optimizer = make("cuda", torch.bfloat16, speculation="always")
    backward(model, 0)
    optimizer.step()
    optimizer.zero_grad()
    optimizer.synchronize()
    before = optimizer.state_digests()
    taken: list[torch.Tensor] = []
    for size in (1 << 30, 1 << 26, 1 << 22, 1 << 20, 1 << 12):
        try:
            while len(taken) < 4000:
                taken.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
    try:
        backward(model, 1)
    except RuntimeError as error:  # the allocator's, or the driver's own
        assert "out of memory" in str(error).lower()
        optimizer.zero_grad()
        assert optimizer.state_digests() == before
    taken.clear()
    torch.cuda.empty_cache()
    optimizer.zero_grad()
    backward(model, 1)
    optimizer.step()
    assert optimizer.state_digests() != before
    optimizer.close()


@gpu
def test_memory_that_cannot_be_pinned_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clear warning, and copies that do not overlap."""
    pinned: Any = import_module("superoffload.links.cuda.pinned")
    make_arena = pinned.PinnedArena.__init__

    def refused(self: Any, *args: Any, **kwargs: Any) -> None:
        make_arena(self, *args, **kwargs)
        self._memory.unpin()

    monkeypatch.setattr(pinned.PinnedArena, "__init__", refused)
    with pytest.warns(RuntimeWarning, match="refused to pin"):
        run = train("cuda", torch.bfloat16, speculation="always")
    assert run.bits() == reference(torch.bfloat16).bits()


@gpu
def test_a_model_on_several_devices_and_one_that_was_moved_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"parameter 1 of param_groups\[0\]: on cpu, while"):
        AdamW([nn.Parameter(torch.zeros(8, device=device)) for device in ("cuda", "cpu")])
    model, optimizer = make("cuda", torch.float32)
    backward(model, 0)
    optimizer.step()
    optimizer.zero_grad()
    model.to("cpu")
    with pytest.raises((ArgumentError, StateError)):
        backward(model, 1)
        optimizer.step()
    optimizer.close()


EXITS = {
    "after backward": "",
    "after a step that was not waited for": "optimizer.step()",
    "by an exception": "raise KeyboardInterrupt",
    "closed in flight": "optimizer.close()",
}


@pytest.mark.parametrize(
    ("device", "ending"), [("cpu", "after backward"), *(pytest.param("cuda", ending, marks=gpu) for ending in EXITS)]
)
def test_exit_with_work_in_flight_is_clean(device: str, ending: str) -> None:
    script = textwrap.dedent(
        f"""
        import time
        from benchmarks.gpu_suite.given_gradients import backward, make
        import torch
        model, optimizer = make({device!r}, torch.bfloat16, speculation="always")
        backward(model, 0)
        optimizer.step()
        optimizer.zero_grad()
        backward(model, 1)
        print(time.time(), flush=True)
        {EXITS[ending]}
        """
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=45
    )
    after = time.time() - float(ended.stdout.split()[0])
    interrupted = "raise" in EXITS[ending]
    assert interrupted or ended.returncode == 0, ended.stderr
    assert ("KeyboardInterrupt" in ended.stderr) == interrupted
    assert "Fatal" not in ended.stderr and "terminate called" not in ended.stderr
    assert after < 60, "it did not hang"
