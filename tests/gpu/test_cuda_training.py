"""How users train: with state on the device, checkpointed activations, micro-batches, a compiled model, no NVRTC.

Bits are compared with ``speculation="never"`` on the same device, or with the host's where gradients are given.
"""

from __future__ import annotations

import shutil
from functools import cache
from typing import Any

import pytest
import torch

from benchmarks.gpu_suite.given_gradients import Run, train
from superoffload.errors import KernelsUnavailable
from tests.gpu.small_training import Outcome, Way, devices, runs

NEVER: dict[str, Any] = {"speculation": "never"}
ALWAYS: dict[str, Any] = {"speculation": "always"}
ADAPTIVE: dict[str, Any] = {"speculation": "adaptive"}
ON_DEMAND: dict[str, Any] = {"speculation": "always", "delivery": "on_demand"}


@cache
def on_host(dtype: torch.dtype) -> Run:
    return train("cpu", dtype, speculation="never")


@cache
def plain(device: str) -> Outcome:
    (found,) = runs(device, Way(), [NEVER])
    return found


def check_near_the_host(way: Way, found: Outcome, *, exactly: bool = False) -> None:
    """Other kernels compute the gradients of a GPU, and those of a compiled model; the stand-in's are the host's."""
    (host,) = runs("cpu", way, [NEVER])
    if exactly:
        assert found.results == host.results
    assert found.losses == pytest.approx(host.losses, rel=0.1) and found.norms == pytest.approx(host.norms, rel=0.2)


def check_alike(found: list[Outcome], expected: Outcome) -> None:
    for one in found:
        assert one.losses == expected.losses, "every forward has read the new parameters"
        assert one.norms == expected.norms
        assert one.digests[-1] == expected.digests[-1]
        if len(one.digests) == len(expected.digests):
            assert one.digests == expected.digests


# ---- state on the device --------------------------------------------------------------------------------------------


@devices
@pytest.mark.parametrize("speculation", ["always", "never"])
@pytest.mark.parametrize("placement", [{"gpu_fraction": 0.25}, {"gpu_fraction": 1.0}, "auto"], ids=str)
def test_state_on_the_device_has_the_hosts_bits(device: str, placement: Any, speculation: str) -> None:
    run = train(device, torch.bfloat16, speculation=speculation, placement=placement)
    expected = on_host(torch.bfloat16)
    assert run.norms == expected.norms and run.digests == expected.digests
    assert all(torch.equal(one, other) for one, other in zip(run.parameters, expected.parameters, strict=True))
    if placement != "auto":  # which decides by measured times
        numel = sum(param.numel() for param in run.parameters)
        at_most = placement["gpu_fraction"] * numel
        assert 0 < run.stats["params_on_device"] <= at_most
        assert (run.stats["params_on_device"] == numel) == (at_most == numel)


@devices
@pytest.mark.parametrize(
    ("dtype", "options"),
    [(torch.float32, {}), (torch.float16, {}), (torch.bfloat16, {"state_dtype": "bf16", "seed": 3})],
    ids=["fp32", "fp16", "bf16 moments"],
)
def test_state_on_the_device_in_other_formats(device: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    run = train(device, dtype, speculation="always", placement={"gpu_fraction": 0.5}, **options)
    assert run.bits() == train("cpu", dtype, speculation="never", **options).bits()
    assert run.stats["params_on_device"] > 0


# ---- gradients that the device computes ------------------------------------------------------------------------------


@devices
def test_speculation_and_delivery_change_no_bit(device: str) -> None:
    found = runs(device, Way(), [ALWAYS, ADAPTIVE, ON_DEMAND])
    check_alike(found, plain(device))
    assert found[0].stats["buckets_speculated"] > 0 and found[0].stats["clipped_steps"] == 2
    check_near_the_host(Way(), found[0], exactly=device == "stand-in")


@devices
@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
def test_activation_checkpointing(device: str, reentrant: bool) -> None:
    """The forward of every block runs again inside of backward, when later blocks' gradients are packed and freed."""
    found = runs(device, Way(reentrant=reentrant), [NEVER, ALWAYS, ON_DEMAND])
    check_alike(found, plain(device))
    assert found[1].stats["buckets_speculated"] > 0


@devices
def test_micro_batches(device: str) -> None:
    way = Way(micro_batches=3)
    never, *others = runs(device, way, [NEVER, ALWAYS, ADAPTIVE, ON_DEMAND])
    check_alike(others, never)
    assert others[0].stats["buckets_speculated"] > 0
    check_near_the_host(way, never, exactly=device == "stand-in")


@devices
@pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("c++") is None,
    reason="needs a C++ compiler (apt-get install g++): torch.compile builds with it",
)
def test_a_compiled_model(device: str) -> None:
    blocks = 0 if device == "stand-in" else 1  # the compiler for CPUs takes half a minute for a block
    never, *others = runs(device, Way(compiled=True, blocks=blocks), [NEVER, ALWAYS, ADAPTIVE])
    check_alike(others, never)
    assert others[0].stats["buckets_speculated"] > 0
    check_near_the_host(Way(blocks=blocks), never)


# ---- without NVRTC ---------------------------------------------------------------------------------------------------


@devices
def test_without_kernels_it_works_or_says_what_to_install(device: str) -> None:
    try:
        run = train(device, torch.bfloat16, speculation="always", link={"image": b""})
    except KernelsUnavailable as error:
        assert "install" in str(error)
        return
    assert run.bits() == on_host(torch.bfloat16).bits()
    assert run.link["residency"] is None, "there were none"
