"""The kernels against the reference, bit for bit, on every instruction set that this machine has."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from superoffload import kernels
from tests.support import kernel_battery as battery
from tests.support import kernel_inputs as cases
from tests.support.guarded_arrays import GuardedSpan, assert_bits, each_isa
from tests.support.kernel_inputs import State
from tests.support.reference import adam, convert
from tests.support.reference.adam import Hyper

ISAS = kernels.available_isas()

each_mode = pytest.mark.parametrize("mode", ["adamw", "l2"])
NEEDED = {"avx2": {"avx2", "fma", "f16c"}}  # flags of an x86 processor, by Linux's names
NEEDED["avx512"] = NEEDED["avx2"] | {"avx512f", "avx512bw", "avx512vl", "avx512dq"}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="needs an x86-64 processor, whose flags Linux lists")
def test_every_set_that_the_processor_has_is_found() -> None:
    found = re.search(r"(?m)^flags\s*: (.*)$", Path("/proc/cpuinfo").read_text())
    flags = set(found[1].split()) if found else set()
    assert ["scalar", *(isa for isa, needed in NEEDED.items() if needed <= flags)] == ISAS


@each_isa
@pytest.mark.parametrize("published_format", cases.FORMATS)
def test_published_rounding_of_every_upper_half_and_ties(isa: str, published_format: str) -> None:
    """lr = 0 and no decay publish the master itself: every sign, exponent and upper significand, near each tie."""
    upper = np.arange(65536, dtype=np.uint32) << np.uint32(16)
    hyper = Hyper(lr=0.0, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, step=2)
    with kernels.using_isa(isa):
        for lower in (0x0000, 0x0001, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xEFFF, 0xF000, 0xFFFF):
            master = (upper | np.uint32(lower)).view(np.float32)
            zeros = np.zeros(65536, dtype=np.float32)
            guarded = GuardedSpan(State(master, zeros, zeros), zeros, published_format)
            guarded.span.publish(hyper)
            # -0 * 0 / eps is subtracted from the master: only the sign of a zero master could change, and does not.
            assert_bits("shadow", guarded.shadow, convert.narrow(master, published_format), f"lower half {lower:#06x}")


@each_isa
def test_stored_halves_of_split_masters_are_those_of_the_definition(isa: str) -> None:
    """lr = 0 and no decay store the masters themselves: every upper half near each tie."""
    hyper = Hyper(lr=0.0, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, step=2)
    every = np.arange(65536, dtype=np.uint32)
    zeros = np.zeros(65536, np.float32)
    with kernels.using_isa(isa):
        for lower in (0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF):  # 0x8000 is a tie
            master = (every << np.uint32(16) | np.uint32(lower)).view(np.float32)
            guarded = GuardedSpan(State(master, zeros, zeros), zeros, "split")
            guarded.span.step(hyper)
            halves = convert.split(master)
            whole = GuardedSpan(State(master, zeros, zeros), zeros, "bf16")
            whole.span.step(hyper)
            # To even, a tie goes to the even upper half: away from zero, to the other one.
            tie = (whole.state.master.view(np.uint32) & np.uint32(0x1FFFF)) == 0x8000
            assert np.array_equal(guarded.shadow != whole.shadow, tie), "parameters differ at ties only"
            assert_bits("upper halves", guarded.shadow, halves.upper, f"lower half {lower:#06x}")
            assert_bits("remainders", guarded.remainders, halves.remainder, f"lower half {lower:#06x}")


@each_isa
@pytest.mark.parametrize("gradient_format", ["bf16", "fp16"])
def test_every_16_bit_gradient(isa: str, gradient_format: str) -> None:
    words = np.arange(65536, dtype=np.uint16)
    gradient = words if gradient_format == "bf16" else words.view(np.float16)
    zeros = np.zeros(65536, dtype=np.float32)
    hyper = Hyper(lr=1e-3, beta1=0.0, beta2=0.999, eps=1e-8, weight_decay=0.0, step=1)
    expected = adam.step(zeros, zeros, zeros, gradient, "fp32", hyper)
    assert_bits("exp_avg", expected.exp_avg + np.float32(0), convert.canonical(convert.widen(gradient)) + np.float32(0))
    with kernels.using_isa(isa):
        guarded = GuardedSpan(State(zeros, zeros, zeros), gradient, "fp32")
        guarded.span.step(hyper)
        guarded.expect(expected, gradient_format)


@each_isa
@each_mode
def test_scalars_are_rounded_from_fp64_by_the_definition(isa: str, mode: str) -> None:
    """Many hyper-parameters, one lane of which shows each scalar: a contracted or reordered product would be seen."""
    words = cases.hash_words(600, 240)
    unit = [float(word) for word in (words >> np.uint64(11)).astype(np.float64) * 2.0**-53]
    old = cases.state("training", 24, 241)
    gradient = cases.gradient("training", "fp32", 24, 244)
    with kernels.using_isa(isa):
        for i in range(0, 600, 6):
            lr, beta1, beta2, eps, weight_decay, step = unit[i : i + 6]
            betas = 1 - beta1**4, 1 - beta2**8
            factor = unit[i] * unit[i + 1]
            hyper = Hyper(lr, *betas, eps * 1e-6, weight_decay * 3, 1 + int(step**6 * 1e6), factor, l2=mode == "l2")
            guarded = GuardedSpan(old, gradient, "fp32")
            guarded.span.step(hyper)
            guarded.expect(adam.step(*old, gradient, "fp32", hyper), f"{hyper}")


RECORDED: dict[str, str] = json.loads(battery.RECORDED.read_text())


def test_the_recorded_digests_are_the_references() -> None:
    assert battery.digests(battery.Reference()) == RECORDED


@each_isa
def test_the_battery_gives_the_recorded_digests(isa: str) -> None:
    """Every operation, type, mode, short length and hyper-parameter edge; training-like and hostile values."""
    with kernels.using_isa(isa):
        got = battery.digests(battery.Kernel())
    assert [name for name in RECORDED if got.get(name) != RECORDED[name]] == []
    assert got == RECORDED


# ---- choosing an instruction set ----


def test_an_unknown_or_unsupported_isa_is_refused_and_nothing_changes() -> None:
    before = kernels.current_isa()
    assert before in ISAS and "scalar" in ISAS
    for name in ("AVX2", "avx2" if "neon" in ISAS else "neon"):
        with pytest.raises(ValueError, match=name) as caught:
            kernels.set_isa(name)
        assert all(available in str(caught.value) for available in ISAS)
        assert kernels.current_isa() == before


def test_the_environment_variable_chooses_the_isa() -> None:
    """In a process that has no torch; an unknown one is an error that lists what there is."""
    code = "import sys; sys.modules['torch'] = None; import superoffload.kernels as k; print(k.current_isa())"
    for isa in (*ISAS, "mmx"):
        environment = {**os.environ, "SUPEROFFLOAD_ISA": isa}
        command = [sys.executable, "-c", code]
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        if isa in ISAS:
            assert ran.stdout.strip() == isa, ran.stderr
        else:
            assert ran.returncode and all(name in ran.stderr for name in (*ISAS, "mmx", "SUPEROFFLOAD_ISA"))
