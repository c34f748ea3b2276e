"""The kernel battery on a device: every kernel, every format, state in host memory and on the device; the CPU's bits.

Over the stand-in for the driver everywhere, through libcuda on a GPU.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any
from unittest import mock

import pytest

from tests.support import device_battery as battery
from tests.support import kernel_inputs as cases
from tests.support.device_battery import Place, Setting, Types
from tests.support.guarded_arrays import assert_bits
from tests.support.kernel_battery import RECORDED, digest, span_cases
from tests.support.reference.bit_sums import bit_sums

PLACES = ("stand-in", pytest.param("gpu", marks=pytest.mark.gpu))
MODES = pytest.mark.parametrize("l2", [False, True], ids=["adamw", "l2"])
PLACEMENTS = pytest.mark.parametrize("resident", [False, True], ids=["host", "device"])


@cache
def gpu_place() -> Place:
    return battery.gpu()


@pytest.fixture
def place(request: pytest.FixtureRequest) -> Place:
    if request.param == "gpu":
        return gpu_place()
    return battery.stand_in(request.getfixturevalue("fake"))


places = pytest.mark.parametrize("place", PLACES, indirect=True)
by_types = pytest.mark.parametrize("types", battery.step_types(), ids="-".join)


@cache
def expected(setting: Setting) -> list[battery.Stepped]:
    """By the CPU's kernels; where moments are fp32 they have the digest that the repository keeps."""
    found = battery.stepped_by_pipeline(battery.this_processor(), setting)
    if setting.moments == "fp32":
        assert digest(one.results for one in found) == recorded()[setting.recorded]
    return found


@cache
def recorded() -> dict[str, str]:
    found: dict[str, str] = json.loads(RECORDED.read_text())
    return found


def check_steps(place: Place, setting: Setting) -> None:
    for one, other in zip(
        battery.stepped_by_pipeline(place, setting),
        expected(Setting(setting.types, setting.l2, setting.moments)),
        strict=True,
    ):
        names = ("master", "exp_avg", "exp_avg_sq", "parameter")
        for name, got, wanted in zip(names, one.results, other.results, strict=True):
            assert_bits(name, got, wanted, str(one.case))
        assert_bits("gradient", one.gradient.read("the gradient"), one.case.gradient, str(one.case))
        assert_bits("block sums", one.shard.block_sums, other.shard.block_sums, str(one.case))


@MODES
@PLACEMENTS
@by_types
@places
def test_steps(place: Place, types: Types, resident: bool, l2: bool) -> None:
    """Hostile and ordinary values, all hyper-parameters, lengths around blocks, gradients of any alignment."""
    check_steps(place, Setting(types, l2, resident=resident))


@PLACEMENTS
@by_types
@places
def test_steps_with_bf16_moments(place: Place, types: Types, resident: bool) -> None:
    """Rounded stochastically: by step, seed, shard and index only, so the same in both places."""
    check_steps(place, Setting(types, moments="bf16", resident=resident))


@MODES
@by_types
@places
def test_steps_with_8_bit_moments(place: Place, types: Types, l2: bool) -> None:
    """On the device, in pieces: what the reference makes of codes and scales."""
    setting = Setting(types, l2, moments="q8", resident=True)
    for one in battery.stepped_by_pipeline(place, setting):
        names = ("master", "exp_avg", "exp_avg_sq", "parameter")
        for name, got, wanted in zip(names, one.results, one.reference(setting), strict=True):
            assert got.tobytes() == wanted.tobytes(), f"{name}: {one.case}"


@PLACEMENTS
@pytest.mark.parametrize("form", cases.FORMATS)
@places
def test_packed_gradients_and_norms(place: Place, form: str, resident: bool) -> None:
    """NaN keep their bits and make their block's sum infinite; denormals and negative zeros stay."""
    here = battery.packed_by_pipeline(battery.this_processor(), form, resident=False)
    there = battery.packed_by_pipeline(place, form, resident=resident)
    for number, (one, other) in enumerate(zip(there, here, strict=True)):
        for name, got, wanted in zip(("packed gradient", "block sums"), one, other, strict=True):
            assert_bits(name, got, wanted, f"gradient {number}")
    assert digest(there) == recorded()[f"pack {form}"]


@pytest.mark.parametrize("form", cases.FORMATS)
@places
def test_sums_of_bits(place: Place, form: str) -> None:
    """What edits are noticed by: as a reference in plain integers has them, and another for any bit that changes."""
    for raw, sums, changed in battery.summed_by_link(place, form):
        assert sums == bit_sums(raw)
        assert changed == bool(raw)
    packed = battery.sums_packed_by_link(place, form)
    assert packed and all(sums == bit_sums(raw) for raw, sums in packed)


def test_every_kernel_is_launched_by_the_battery(fake: Any) -> None:
    from tests.support import emulated_kernels  # here: what a GPU runs does without it

    place, longest = battery.stand_in(fake), lambda *types: span_cases(*types)[-40:]
    with mock.patch.object(battery, "span_cases", longest):
        for types in battery.step_types():
            battery.stepped_by_pipeline(place, Setting(types))
            for moments in ("fp32", "bf16", "q8"):
                battery.stepped_by_pipeline(place, Setting(types, moments=moments, resident=True))
    battery.summed_by_link(place, "fp32")
    assert [name for name in emulated_kernels.kernel_names() if not fake.calls(name)] == []
