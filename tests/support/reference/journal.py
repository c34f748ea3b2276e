"""Which lanes of a speculated step an undo journal cannot hold in a short code and must keep as raw words."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tests.support.reference.adam import Float32Array, Hyper, Stepped, effective_gradient, scalars
from tests.support.reference.fma import fma

# Component: bias of its code, by code width in bytes. A code is the distance in units in the last place plus the bias.
# A code of b bits has the bias 2**(b - 1), so a distance fits from -bias up to, not including, bias.
BIASES: dict[int, dict[str, int]] = {
    1: {"exp_avg": 8, "exp_avg_sq": 2, "master": 2},
    2: {"exp_avg": 64, "exp_avg_sq": 64, "master": 2},
}


class Estimates(NamedTuple):
    """What inverse arithmetic makes of the new state and the gradient: nearly the old state."""

    exp_avg: Float32Array
    exp_avg_sq: Float32Array
    master: Float32Array


def estimates(old_master: Float32Array, gradient: npt.NDArray[np.generic], new: Stepped, hyper: Hyper) -> Estimates:
    """The estimates of the old state. Undo in L2 mode restores the master first, so the true gradient is known here."""
    k = scalars(hyper)
    with np.errstate(all="ignore"):
        g = effective_gradient(old_master, gradient, hyper)
        # Before the first step the moments were +0. Adding +0 makes that of the -0 that multiplying with 0 can give.
        first, zero = hyper.step == 1, np.float32(0)
        exp_avg = (new.exp_avg - k.one_minus_beta1 * g) * (zero if first else k.inverse_beta1) + zero
        exp_avg_sq = (new.exp_avg_sq - k.one_minus_beta2 * (g * g)) * (zero if first else k.inverse_beta2) + zero
        denominator = fma(np.sqrt(new.exp_avg_sq), k.inverse_sqrt_correction2, k.eps)
        master = fma(k.step_size, np.divide(new.exp_avg, denominator, dtype=np.float32), new.master)
        if not hyper.l2:
            master = master * k.inverse_decay
    return Estimates(exp_avg, exp_avg_sq, master)


def distance(old: Float32Array, estimate: Float32Array) -> npt.NDArray[np.int64]:
    """bits(old) - bits(estimate), modulo 2**32, as a signed number."""
    difference = old.view(np.uint32) - estimate.view(np.uint32)
    return difference.view(np.int32).astype(np.int64)


def escapes(
    old: tuple[Float32Array, Float32Array, Float32Array],
    gradient: npt.NDArray[np.generic],
    new: Stepped,
    hyper: Hyper,
    width: int,
) -> dict[str, npt.NDArray[np.bool_]]:
    """For each component the lanes that escape; `old` is master, exp_avg, exp_avg_sq before the step.

    A component's lane escapes if its code does not fit or its estimate is NaN, whose bits are not defined. "any" holds
    the lanes of which some estimate is not finite: an implementation may let those escape too, all components together.
    """
    master, exp_avg, exp_avg_sq = old
    estimated = estimates(master, gradient, new, hyper)
    before = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "master": master}
    odd = ~np.logical_and.reduce([np.isfinite(estimate) for estimate in estimated])
    lanes = {"any": odd}
    for name, bias in BIASES[width].items():
        estimate = getattr(estimated, name)
        away = distance(before[name], estimate)
        lanes[name] = (away < -bias) | (away >= bias) | np.isnan(estimate)
    return lanes
