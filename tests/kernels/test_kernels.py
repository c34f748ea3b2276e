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
each_types = pytest.mark.parametrize("gradient_format,published_format", TYPES)


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
@each_mode
@each_types
def test_step_at_every_short_length_and_around_blocks(
    isa: str, mode: str, gradient_format: str, published_format: str
) -> None:
    with kernels.using_isa(isa):
        for case in battery.span_cases(gradient_format, published_format, mode == "l2"):
            guarded = GuardedSpan(case.old, case.gradient, published_format, case.start)
            guarded.span.step(kernel_hyper(case.hyper))
            expect(guarded, case.stepped, f"{case}")


@each_isa
@each_mode
@each_types
def test_step_with_every_hyper_parameter_edge(isa: str, mode: str, gradient_format: str, published_format: str) -> None:
    with kernels.using_isa(isa):
        for plain in cases.HYPERS:
            hyper = replace(plain, l2=mode == "l2")
            for kind in cases.KINDS:
                old, gradient, expected = long_case(kind, gradient_format, published_format, hyper)
                guarded = GuardedSpan(old, gradient, published_format)
                guarded.span.step(kernel_hyper(hyper))
                expect(guarded, expected, f"{kind} {hyper}")


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
def test_step_from_every_start_within_a_cache_line(isa: str, mode: str) -> None:
    hyper = replace(cases.HYPERS[2], l2=mode == "l2")
    with kernels.using_isa(isa):
        for start in range(17):
            for length in (1, 16, 33, 70, 1030):
                old, gradient, expected = long_case("hostile", "bf16", "bf16", hyper)
                part = slice(start, start + length)
                guarded = GuardedSpan(State(*(values[part] for values in old)), gradient[part], "bf16", start)
                guarded.span.step(kernel_hyper(hyper))
                expect(guarded, Stepped(*(values[part] for values in expected)), f"length {length} from {start}")


@each_isa
@each_mode
@each_types
def test_publish_writes_the_shadow_of_the_step_and_nothing_else(
    isa: str, mode: str, gradient_format: str, published_format: str
) -> None:
    with kernels.using_isa(isa):
        for case in battery.span_cases(gradient_format, published_format, mode == "l2"):
            guarded = GuardedSpan(case.old, case.gradient, published_format, case.start)
            guarded.span.publish(kernel_hyper(case.hyper))
            expect(guarded, Stepped(*case.old, case.stepped.shadow), f"{case}")


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
        assert kernels.sum_of_squares(gradient).tobytes() == adam.sum_of_squares(gradient).tobytes()


@each_isa
def test_many_steps_in_place(isa: str) -> None:
    """200 steps over the same arrays; an error of one bit anywhere would not heal."""
    length = 1500
    state = State(cases.ranged(length, 220, -8, -2), np.zeros(length, np.float32), np.zeros(length, np.float32))
    gradient = cases.gradient("training", "bf16", length, 221)
    guarded = GuardedSpan(state, gradient, "bf16", start=3)
    with kernels.using_isa(isa):
        for step in range(1, 201):
            hyper = Hyper(
                lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=step, gradient_factor=1 / step
            )
            guarded.span.step(kernel_hyper(hyper))
            stepped = adam.step(*state, gradient, "bf16", hyper)
            expect(guarded, stepped, f"step {step}")
            state = State(*stepped[:3])


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
@pytest.mark.parametrize("published_format,word", [("fp32", 0x7FC00000), ("bf16", 0x7FC0), ("fp16", 0x7E00)])
def test_nan_is_stored_as_one_pattern(isa: str, published_format: str, word: int) -> None:
    """Whichever input is NaN, with whatever sign and payload, at every lane of a vector and in a tail."""
    patterns = np.array([0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFF800001, 0xFFC00000, 0xFFFFFFFF], dtype=np.uint32)
    length = 23
    hyper = kernel_hyper(cases.HYPERS[1])
    with kernels.using_isa(isa):
        for part in ("master", "exp_avg", "exp_avg_sq", "gradient"):
            inputs = {name: np.ones(length, dtype=np.float32) for name in (*State._fields, "gradient")}
            inputs[part].view(np.uint32)[...] = np.resize(patterns, length)
            gradient = inputs.pop("gradient")
            guarded = GuardedSpan(State(**inputs), gradient, published_format)
            guarded.span.step(hyper)
            assert set(convert.bits(guarded.shadow).tolist()) == {word}, part
            assert set(convert.bits(guarded.state.master).tolist()) == {0x7FC00000}, part
            if part in ("exp_avg", "gradient"):
                assert set(convert.bits(guarded.state.exp_avg).tolist()) == {0x7FC00000}, part
            if part in ("exp_avg_sq", "gradient"):
                assert set(convert.bits(guarded.state.exp_avg_sq).tolist()) == {0x7FC00000}, part


@each_isa
@pytest.mark.parametrize("form", cases.FORMATS)
def test_sum_of_squares_and_pack(isa: str, form: str) -> None:
    with kernels.using_isa(isa):
        for gradient in battery.norm_inputs(form):
            expected = adam.sum_of_squares(gradient)
            context = f"length {gradient.size}"
            got = kernels.sum_of_squares(gradient)
            assert got.dtype == np.float64 and got.shape == expected.shape, context
            assert got.tobytes() == expected.tobytes(), f"{context}: {got}, expected {expected}"
            out = np.zeros_like(gradient)
            packed = kernels.pack(gradient, out)
            assert packed.tobytes() == expected.tobytes(), f"{context}: {packed}, expected {expected}"
            assert_bits("packed gradient", out, gradient, context)


@each_isa
@pytest.mark.parametrize("form", cases.FORMATS)
def test_one_non_finite_element_makes_its_block_infinite(isa: str, form: str) -> None:
    patterns = {"fp32": (0x7F800000, 0xFF800000, 0x7FC00000, 0xFF800001), "bf16": (0x7F80, 0xFF80, 0x7FC0, 0xFF81)}
    patterns["fp16"] = (0x7C00, 0xFC00, 0x7E00, 0xFC01)
    clean = cases.gradient("training", form, 3000, 230)
    with kernels.using_isa(isa):
        expected = kernels.sum_of_squares(clean)
        for pattern in patterns[form]:
            for position in (0, 15, 16, 1007, 1023, 1024, 1500, 2047, 2048, 2987, 2999):
                gradient = clean.copy()
                convert.bits(gradient)[position] = pattern
                got = kernels.sum_of_squares(gradient)
                wanted = expected.copy()
                wanted[position // 1024] = np.inf
                assert got.tobytes() == wanted.tobytes(), f"{pattern:#x} at {position}"


@each_isa
def test_fold_sums(isa: str) -> None:
    with kernels.using_isa(isa):
        for blocks in battery.fold_inputs():
            assert kernels.fold_sums(blocks) == adam.fold_sums(blocks), f"{blocks.size} blocks"


@each_isa
def test_scalars_are_rounded_from_fp64_by_the_definition(isa: str) -> None:
    """Many hyper-parameters, one lane of which shows each scalar: a contracted or reordered product would be seen."""
    words = cases.hash_words(600, 240)
    unit = (words >> np.uint64(11)).astype(np.float64) * 2.0**-53
    old = cases.state("training", 24, 241)
    gradient = cases.gradient("training", "fp32", 24, 244)
    with kernels.using_isa(isa):
        for i in range(0, 600, 6):
            lr, beta1, beta2, eps, weight_decay, step = unit[i : i + 6]
            for l2 in (False, True):
                hyper = Hyper(
                    lr=float(lr),
                    beta1=float(1 - beta1**4),
                    beta2=float(1 - beta2**8),
                    eps=float(eps * 1e-6),
                    weight_decay=float(weight_decay * 3),
                    step=1 + int(step**6 * 1e6),
                    gradient_factor=float(unit[i] * unit[i + 1]),
                    l2=l2,
                )
                guarded = GuardedSpan(old, gradient, "fp32")
                guarded.span.step(kernel_hyper(hyper))
                expect(guarded, adam.step(*old, gradient, "fp32", hyper), f"{hyper}")


@pytest.fixture(scope="module")
def recorded() -> dict[str, str]:
    digests: dict[str, str] = json.loads(battery.RECORDED.read_text())
    return digests


def test_the_recorded_digests_are_the_references(recorded: dict[str, str]) -> None:
    assert battery.digests(battery.Reference()) == recorded


@each_isa
def test_the_battery_gives_the_recorded_digests(isa: str, recorded: dict[str, str]) -> None:
    with kernels.using_isa(isa):
        got = battery.digests(battery.Kernel())
    assert [name for name in recorded if got.get(name) != recorded[name]] == []
    assert got == recorded


def test_scalar_is_always_there_and_first_choice_is_available() -> None:
    assert "scalar" in ISAS
    assert set(ISAS) <= {"scalar", "avx2", "avx512", "neon", "sve"}
    assert kernels.current_isa() in ISAS


@pytest.mark.parametrize("name", ["mmx", "AVX2", "avx2" if "neon" in ISAS else "neon"])
def test_an_unknown_or_unsupported_isa_is_refused_and_nothing_changes(name: str) -> None:
    before = kernels.current_isa()
    with pytest.raises(ValueError, match=name) as caught:
        kernels.set_isa(name)
    assert all(available in str(caught.value) for available in ISAS)
    assert kernels.current_isa() == before


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, timeout=120
    )


@each_isa
def test_the_environment_variable_chooses_the_isa(isa: str) -> None:
    ran = python("from superoffload import kernels; print(kernels.current_isa())", SUPEROFFLOAD_ISA=isa)
    assert ran.stdout.strip() == isa, ran.stderr


def test_an_unknown_isa_in_the_environment_is_an_error_that_lists_what_there_is() -> None:
    ran = python("from superoffload import kernels; print(kernels.current_isa())", SUPEROFFLOAD_ISA="mmx")
    assert ran.returncode != 0
    assert "SUPEROFFLOAD_ISA" in ran.stderr
    assert all(name in ran.stderr for name in (*ISAS, "mmx"))


def test_kernels_need_no_torch() -> None:
    ran = python("import sys; sys.modules['torch'] = None; import superoffload.kernels as k; print(k.current_isa())")
    assert ran.stdout.strip() in ISAS, ran.stderr


def test_step_zero_is_refused() -> None:
    """The step number counts from 1: there is no bias correction for 0."""
    guarded = GuardedSpan(cases.state("training", 5, 250), cases.gradient("training", "bf16", 5, 253), "bf16")
    with pytest.raises(ValueError, match="step"):
        guarded.span.step(kernel_hyper(cases.HYPERS[0], step=0))


def arrays(length: int = 20) -> dict[str, Any]:
    names = ("master", "exp_avg", "exp_avg_sq", "gradient", "shadow")
    return {name: np.zeros(length, dtype=np.float32) for name in names}


@pytest.mark.parametrize("name", ["master", "exp_avg", "exp_avg_sq", "gradient", "shadow"])
def test_a_span_refuses_arrays_it_cannot_use(name: str) -> None:
    good = arrays()
    kernels.Span(**good)
    wrong: dict[str, Any] = {
        "dtype": np.zeros(20, dtype=np.float64),
        "length": np.zeros(21, dtype=np.float32),
        "contiguity": np.zeros(40, dtype=np.float32)[::2],
        "dimensions": np.zeros((4, 5), dtype=np.float32),
        "byte order": np.zeros(20, dtype=">f4"),
        "alignment": np.zeros(81, dtype=np.uint8)[1:].view(np.float32),
        "not an array": [0.0] * 20,
    }
    for what, value in wrong.items():
        # A master of another length is found with the first array that is compared with it.
        named = "master|exp_avg" if (name, what) == ("master", "length") else name
        with pytest.raises(ValueError, match=named):
            kernels.Span(**{**good, name: value})


@pytest.mark.parametrize("name", ["master", "exp_avg", "exp_avg_sq", "shadow"])
def test_a_span_refuses_read_only_arrays_that_it_would_write(name: str) -> None:
    good = arrays()
    good[name].flags.writeable = False
    with pytest.raises(ValueError, match=name):
        kernels.Span(**good)


def test_a_span_refuses_overlapping_arrays() -> None:
    for first, second in (("master", "exp_avg"), ("gradient", "shadow"), ("exp_avg_sq", "gradient")):
        good = arrays()
        memory = np.zeros(39, dtype=np.float32)
        good[first], good[second] = memory[:20], memory[19:]
        with pytest.raises(ValueError, match="overlap"):
            kernels.Span(**good)
