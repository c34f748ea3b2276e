"""The kernels against the reference, bit for bit, on every instruction set that this machine has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from superoffload import kernels
from superoffload._native import CHUNK
from tests.support import kernel_battery as battery
from tests.support import kernel_inputs as cases
from tests.support import numpy_kernels
from tests.support.guarded_arrays import GuardedSpan, assert_bits, assert_state, kernel_hyper
from tests.support.kernel_inputs import State
from tests.support.reference import adam, convert
from tests.support.reference.adam import Hyper, Stepped

ISAS = kernels.available_isas()
TYPES = [(gradient, published) for gradient in cases.FORMATS for published in cases.FORMATS]
MODES = ("adamw", "l2")
LONG = 4096 + 16

each_isa = pytest.mark.parametrize("isa", ISAS)
each_mode = pytest.mark.parametrize("mode", MODES)


def expect(guarded: GuardedSpan, expected: Stepped, context: str) -> None:
    assert_state(guarded.state, State(*expected[:3]), context)
    assert_bits("shadow", guarded.shadow, expected.shadow, context)
    guarded.check(context)


@cache
def long_case(kind: str, gradient_format: str, published_format: str, hyper: Hyper) -> tuple[State, Any, Stepped]:
    """A long input and its reference step. A step is element by element, so any slice of it is a shorter case."""
    old = cases.state(kind, LONG, 200)
    gradient = cases.gradient(kind, gradient_format, LONG, 210)
    return old, gradient, adam.step(*old, gradient, published_format, hyper)


@each_isa
def test_step_at_every_length_up_to_4096(isa: str) -> None:
    """Types, mode, hyper-parameters and starts take turns from length to length."""
    choices = [(types, mode) for types in TYPES for mode in MODES]
    with kernels.using_isa(isa):
        for length in range(4097):
            (gradient_format, published_format), mode = choices[length % len(choices)]
            hyper = replace(cases.HYPERS[length % 5], l2=mode == "l2")
            old, gradient, expected = long_case("hostile", gradient_format, published_format, hyper)
            start = length % 16
            part = slice(start, start + length)
            guarded = GuardedSpan(State(*(values[part] for values in old)), gradient[part], published_format, start)
            guarded.span.step(kernel_hyper(hyper))
            expect(guarded, Stepped(*(values[part] for values in expected)), f"length {length} from {start}")


@each_isa
@each_mode
def test_a_span_longer_than_a_worker_threads_chunk(isa: str, mode: str) -> None:
    """Long spans are cut into chunks; nothing may depend on where."""
    length = 2 * CHUNK + 1500
    hyper = replace(cases.HYPERS[2], l2=mode == "l2")
    old, gradient = cases.state("hostile", length, 215), cases.gradient("hostile", "bf16", length, 218)
    expected = adam.step(*old, gradient, "bf16", hyper)
    frozen = kernel_hyper(hyper)
    with kernels.using_isa(isa):
        guarded = GuardedSpan(old, gradient, "bf16", start=3)
        guarded.span.publish(frozen)
        expect(guarded, Stepped(*old, expected.shadow), "publish")
        assert guarded.span.step_journaled(frozen)
        expect(guarded, expected, "journaled step")
        guarded.span.undo()
        expect(guarded, Stepped(*old, expected.shadow), "undo")
        guarded.span.step_journaled(kernel_hyper(hyper, gradient_factor=0.3), width=2)
        guarded.span.replay(frozen)
        expect(guarded, expected, "replay")
        assert numpy_kernels.sum_of_squares(gradient).tobytes() == adam.sum_of_squares(gradient).tobytes()


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
            guarded.span.publish(kernel_hyper(hyper))
            # -0 * 0 / eps is subtracted from the master: only the sign of a zero master could change, and does not.
            assert_bits("shadow", guarded.shadow, convert.narrow(master, published_format), f"lower half {lower:#06x}")


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
        guarded.span.step(kernel_hyper(hyper))
        expect(guarded, expected, gradient_format)


@each_isa
@pytest.mark.parametrize("form", cases.FORMATS)
def test_one_non_finite_element_makes_its_block_infinite(isa: str, form: str) -> None:
    patterns = {"fp32": (0x7F800000, 0xFF800000, 0x7FC00000, 0xFF800001), "bf16": (0x7F80, 0xFF80, 0x7FC0, 0xFF81)}
    patterns["fp16"] = (0x7C00, 0xFC00, 0x7E00, 0xFC01)
    clean = cases.gradient("training", form, 3000, 230)
    with kernels.using_isa(isa):
        expected = numpy_kernels.sum_of_squares(clean)
        for pattern in patterns[form]:
            for position in (0, 15, 16, 1007, 1023, 1024, 1500, 2047, 2048, 2987, 2999):
                gradient = clean.copy()
                convert.bits(gradient)[position] = pattern
                got = numpy_kernels.sum_of_squares(gradient)
                wanted = expected.copy()
                wanted[position // 1024] = np.inf
                assert got.tobytes() == wanted.tobytes(), f"{pattern:#x} at {position}"


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
            guarded.span.step(kernel_hyper(hyper))
            expect(guarded, adam.step(*old, gradient, "fp32", hyper), f"{hyper}")


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


def run_with_isa(isa: str) -> subprocess.CompletedProcess[str]:
    """Names the instruction set in use, in a process that has no torch."""
    code = "import sys; sys.modules['torch'] = None; import superoffload.kernels as k; print(k.current_isa())"
    environment = {**os.environ, "SUPEROFFLOAD_ISA": isa}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)


@each_isa
def test_the_environment_variable_chooses_the_isa(isa: str) -> None:
    ran = run_with_isa(isa)
    assert ran.stdout.strip() == isa, ran.stderr


def test_an_unknown_isa_in_the_environment_is_an_error_that_lists_what_there_is() -> None:
    ran = run_with_isa("mmx")
    assert ran.returncode != 0
    assert all(name in ran.stderr for name in (*ISAS, "mmx", "SUPEROFFLOAD_ISA"))


# ---- arrays that a span cannot use ----

NAMES = ("master", "exp_avg", "exp_avg_sq", "gradient", "shadow")


def refuse(match: str, **changed: Any) -> None:
    arrays = {name: np.zeros(20, dtype=np.float32) for name in NAMES}
    with pytest.raises(ValueError, match=match):
        numpy_kernels.Span(**{**arrays, **changed})


@pytest.mark.parametrize("name", NAMES)
def test_a_span_refuses_arrays_it_cannot_use(name: str) -> None:
    refuse(name, **{name: np.zeros(20, dtype=np.float64)})
    refuse("master|exp_avg" if name == "master" else name, **{name: np.zeros(21, dtype=np.float32)})
    refuse(name, **{name: np.zeros(40, dtype=np.float32)[::2]})
    refuse(name, **{name: np.zeros((4, 5), dtype=np.float32)})
    refuse(name, **{name: np.zeros(20, dtype=">f4")})
    refuse(name, **{name: np.zeros(81, dtype=np.uint8)[1:].view(np.float32)})
    refuse(name, **{name: [0.0] * 20})
    read_only = np.zeros(20, dtype=np.float32)
    read_only.flags.writeable = False
    if name != "gradient":
        refuse(name, **{name: read_only})


def test_a_span_refuses_overlapping_arrays_and_a_step_zero() -> None:
    memory = np.zeros(39, dtype=np.float32)
    for first, second in (("master", "exp_avg"), ("gradient", "shadow"), ("exp_avg_sq", "gradient")):
        refuse("overlap", **{first: memory[:20], second: memory[19:]})
    guarded = GuardedSpan(cases.state("training", 5, 250), cases.gradient("training", "bf16", 5, 253), "bf16")
    with pytest.raises(ValueError, match="step"):
        guarded.span.step(kernel_hyper(cases.HYPERS[0], step=0))
