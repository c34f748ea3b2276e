"""The caller's floating-point settings change nothing in a kernel's result, and are the caller's again afterwards.

They are changed through the C library (glibc's layout of the saved environment), so without torch.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

import numpy as np
import pytest

from superoffload import kernels
from tests.support import kernel_inputs as cases
from tests.support import numpy_kernels
from tests.support.guarded_arrays import GuardedSpan, assert_bits, assert_state, each_isa
from tests.support.reference import adam
from tests.support.reference.adam import Hyper

MACHINE = {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())
# The control word's place in the saved environment (in 32-bit words), its sticky exception flags, and the settings.
CONTROL_WORD = {"x86_64": 7, "aarch64": 0}.get(MACHINE, 0)
STICKY = {"x86_64": 0x3F, "aarch64": 0}.get(MACHINE, 0)
SETTINGS = {
    "x86_64": {"flush": 0x8040, "round up": 0x4000, "round down": 0x2000, "flush and truncate": 0xE040},
    "aarch64": {"flush": 0x01080000, "round up": 0x00400000, "round down": 0x00800000, "flush and truncate": 0x3C80000},
}.get(MACHINE, {})

LIBC = platform.libc_ver()[0]
UNKNOWN = not SETTINGS or LIBC != "glibc"
known_machine = pytest.mark.skipif(UNKNOWN, reason=f"needs glibc on x86-64 or ARM64, not {LIBC or '?'} on {MACHINE}")
each_setting = pytest.mark.parametrize("setting", SETTINGS)

T = TypeVar("T")
LENGTH = 1100
HYPERS = [Hyper(1e-3, 0.9, 0.999, 1e-8, 0.01, 4, 0.7, l2) for l2 in (False, True)]


def load_environment() -> ctypes.Array[ctypes.c_uint32]:
    saved = (ctypes.c_uint32 * 16)()
    assert ctypes.CDLL("libm.so.6").fegetenv(ctypes.byref(saved)) == 0
    return saved


def control() -> int:
    """The calling thread's rounding and flushing, without the sticky flags."""
    return int(load_environment()[CONTROL_WORD]) & ~STICKY


@contextmanager
def changed_control(bits: int) -> Iterator[int]:
    """Set bits of the calling thread's control word; yields the word as it is inside."""
    original = load_environment()
    altered = load_environment()
    altered[CONTROL_WORD] |= bits
    libm = ctypes.CDLL("libm.so.6")
    try:
        assert libm.fesetenv(ctypes.byref(altered)) == 0
        yield control()
    finally:
        libm.fesetenv(ctypes.byref(original))


def under(bits: int, action: Callable[..., T], *arguments: object) -> T:
    """The action's result with the bits set while it runs; they must still be set when it is done."""
    with changed_control(bits) as before:
        result = action(*arguments)
        after = control()
    assert after == before, "the caller's floating-point settings were not restored"
    return result


def spans() -> list[tuple[cases.State, GuardedSpan, Hyper, adam.Stepped]]:
    """Spans full of denormals and of everything else, with the reference's answers."""
    old = cases.state("hostile", LENGTH, 300)
    # Moments and gradients whose products are denormal, on top of what is hostile anyway.
    old.exp_avg[::2] = cases.ranged(LENGTH // 2, 303, -126, -120)
    old.exp_avg_sq[::2] = np.abs(cases.ranged(LENGTH // 2, 304, -126, -120))
    gradient = cases.gradient("hostile", "bf16", LENGTH, 305)
    gradient[::2] &= np.uint16(0x9FFF)
    return [
        (old, GuardedSpan(old, gradient, "fp16"), hyper, adam.step(*old, gradient, "fp16", hyper)) for hyper in HYPERS
    ]


@known_machine
@each_isa
@each_setting
def test_same_bits_under_any_setting_which_then_still_holds(isa: str, setting: str) -> None:
    """Also where settings change between a step and its undo or replay."""
    bits = SETTINGS[setting]
    with kernels.using_isa(isa):
        for old, guarded, hyper, expected in spans():
            span = guarded.span
            under(bits, span.publish, hyper)
            guarded.expect(adam.Stepped(*old, expected.shadow), f"publish {hyper}")
            for width, stepping, undoing in ((1, bits, 0), (2, 0, bits), (1, bits, bits), (2, bits, bits)):
                assert under(stepping, span.step_journaled, hyper, width)
                guarded.expect(expected, f"journaled step {hyper}")
                under(undoing, span.undo)
                assert_state(guarded.state, old, f"undo {hyper}")
                under(stepping, span.step_journaled, replace(hyper, step=9), width)
                under(undoing, span.replay, hyper)
                guarded.expect(expected, f"replay {hyper}")
                for now, then in zip(guarded.state, old, strict=True):
                    now[...] = then
            under(bits, span.step, hyper)
            guarded.expect(expected, f"step {hyper}")
        blocks = cases.block_sums(1000, 310)
        assert under(bits, numpy_kernels.fold_sums, blocks) == adam.fold_sums(blocks)
        tiny = cases.ranged(3000, 312, -126, -120) * np.float32(2.0**-10)
        assert under(bits, numpy_kernels.sum_of_squares, tiny).tobytes() == adam.sum_of_squares(tiny).tobytes()
        for form in cases.FORMATS:
            gradient = cases.finite(cases.gradient("hostile", form, 3000, 311), form)
            out = np.zeros_like(gradient)
            assert (
                under(bits, numpy_kernels.sum_of_squares, gradient, out).tobytes()
                == adam.sum_of_squares(gradient).tobytes()
            )
            assert_bits("packed gradient", out, gradient)
