"""What the kernel tests share: arrays between guard zones, spans over them, and comparisons of bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from superoffload import kernels
from tests.support import numpy_kernels
from tests.support.kernel_inputs import State
from tests.support.reference.adam import Hyper, Stepped
from tests.support.reference.convert import FORMATS, Halves, bits, join

GUARD_BYTES = 128
GUARD_VALUE = 0xA5

each_isa = pytest.mark.parametrize("isa", kernels.available_isas())


def scalars_of(hyper: Hyper) -> dict[str, Any]:
    """The hyper-parameters that every call to a kernel takes by name."""
    return {name: value for name, value in vars(hyper).items() if name not in ("step", "l2")}


def halves_of(master: npt.NDArray[np.float32]) -> Halves:
    """The only halves that join to these bits, of any NaN too; the reference's split() makes all NaNs one."""
    words = master.view(np.uint32)
    remainder = (words & np.uint32(0xFFFF)).astype(np.uint16).view(np.int16)
    return Halves(((words.astype(np.int64) - remainder) >> 16).astype(np.uint16), remainder)


class Guarded:
    """A copy of an array that starts `start` elements behind a 64-byte boundary, with a guard zone on either side."""

    def __init__(self, values: npt.NDArray[Any], start: int) -> None:
        self._raw = np.full(values.nbytes + 2 * GUARD_BYTES + 64 + 16 * values.itemsize, GUARD_VALUE, dtype=np.uint8)
        address = self._raw.__array_interface__["data"][0]
        self._begin = GUARD_BYTES - (address + GUARD_BYTES) % 64 + 64 + start * values.itemsize
        self._end = self._begin + values.nbytes
        self.array = self._raw[self._begin : self._end].view(values.dtype)
        self.array[...] = values

    def intact(self) -> bool:
        """Whether nothing outside the array was written."""
        outside = np.concatenate([self._raw[: self._begin], self._raw[self._end :]])
        return bool((outside == GUARD_VALUE).all())


class GuardedSpan:
    """A kernel span over guarded arrays, each misaligned in its own way; with split masters if published as "split"."""

    def __init__(
        self, old: State, gradient: npt.NDArray[Any], published: str, start: int = 0, arena_bytes: int | None = None,
        **placed: Any,
    ) -> None:  # fmt: skip
        """``placed``: the noise stream of bf16 moments and the index of the first element, as the span takes them."""
        length = gradient.size
        self.split = published == "split"
        form = np.dtype(FORMATS[published])
        filler = np.full(length * form.itemsize, 0x5A, dtype=np.uint8).view(form)
        shadow, master = halves_of(old.master) if self.split else (filler, old.master)
        self._given_gradient = gradient.copy()
        self._parts = {
            "master": Guarded(master, start),
            "exp_avg": Guarded(old.exp_avg, (start + 1) % 16 if start else 0),
            "exp_avg_sq": Guarded(old.exp_avg_sq, (start + 6) % 16 if start else 0),
            "gradient": Guarded(gradient, (2 * start + 1) % 16 if start else 0),
            "shadow": Guarded(shadow, (3 * start) % 16),
        }
        arrays: dict[str, Any] = {name: part.array for name, part in self._parts.items()}
        arena_bytes = 32 * length + 256 * (length // 1024 + 1) if arena_bytes is None else arena_bytes
        past_cache = length % 2 == 0  # half of all tests
        self.span = numpy_kernels.Span(**arrays, **placed, arena_bytes=arena_bytes, past_cache=past_cache)

    @property
    def state(self) -> State:
        """The masters and moments as they are now. They are not copies, except for the masters that two halves make."""
        master, exp_avg, exp_avg_sq = (self._parts[name].array for name in State._fields)
        return State(join(self.shadow, master) if self.split else master, exp_avg, exp_avg_sq)

    @property
    def remainders(self) -> npt.NDArray[np.int16]:
        """The remainders of split masters as they are now (not a copy)."""
        return self._parts["master"].array

    @property
    def shadow(self) -> npt.NDArray[Any]:
        """The shadow as it is now (not a copy)."""
        return self._parts["shadow"].array

    def set_gradient(self, gradient: npt.NDArray[Any]) -> None:
        """Another packed gradient, as the next step brings it."""
        self._given_gradient = gradient.copy()
        self._parts["gradient"].array[...] = gradient

    def check(self, context: str = "") -> None:
        """Nothing was written outside the arrays, and the packed gradient is what it was."""
        for name, part in self._parts.items():
            assert part.intact(), f"written outside of {name}; {context}"
        assert_bits("gradient", self._parts["gradient"].array, self._given_gradient, context)

    def expect(self, expected: Stepped, context: str = "") -> None:
        """Beside that, the state and the shadow are what a step has left."""
        assert_state(self.state, State(*expected[:3]), context)
        assert_bits("shadow", self.shadow, expected.shadow, context)
        self.check(context)


def assert_bits(name: str, got: npt.NDArray[Any], expected: npt.NDArray[Any], context: str = "") -> None:
    """Two arrays have the same bits; the message names the first lane that differs."""
    got_words, expected_words = bits(got), bits(expected)
    assert got_words.shape == expected_words.shape, f"{name}: {got.shape}, expected {expected.shape}; {context}"
    if got_words.tobytes() == expected_words.tobytes():
        return
    differing = np.flatnonzero(got_words != expected_words)
    lane = int(differing[0])
    raise AssertionError(
        f"{name}: {differing.size} of {got.size} lanes differ, first lane {lane}: "
        f"{int(got_words[lane]):#x}, expected {int(expected_words[lane]):#x}; {context}"
    )


def assert_state(got: State, expected: State, context: str = "") -> None:
    """Two states have the same bits."""
    for name in State._fields:
        assert_bits(name, getattr(got, name), getattr(expected, name), context)
