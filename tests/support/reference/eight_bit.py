"""8-bit moments: what codes mean under a scale, the choice of scales, and how new moments round to codes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tests.support.reference.adam import Float32Array, Hyper, effective_gradient, scalars
from tests.support.reference.convert import canonical, narrow
from tests.support.reference.fma import fma
from tests.support.reference.stochastic import RandomWords

BLOCK = 256
NAN_SCALE = 255
Bytes = npt.NDArray[np.uint8]


class Format(NamedTuple):
    """A small floating-point format: bits of its exponent and fraction, and whether it has a sign."""

    exponent: int
    fraction: int
    signed: bool

    @property
    def top(self) -> int:
        """The largest code of a magnitude."""
        return int(2 ** (self.exponent + self.fraction) - 1)

    @property
    def lowest_scale(self) -> int:
        return int(2**self.exponent)


EXP_AVG = Format(4, 3, True)
EXP_AVG_SQ = Format(5, 3, False)


def stored_size(numel: int) -> int:
    """Bytes of a moment of ``numel`` elements: their codes, then the scales of their blocks."""
    return numel + -(-numel // BLOCK)


def of_elements(scales: Bytes, numel: int) -> npt.NDArray[np.int64]:
    """The scale of each element."""
    return np.repeat(scales.astype(np.int64), BLOCK)[:numel]


def read(stored: Bytes, numel: int, form: Format) -> Float32Array:
    """The numbers that codes and scales stand for."""
    codes, scale = stored[:numel].astype(np.int64), of_elements(stored[numel:], numel)
    magnitude = codes % (form.top + 1)
    exponent, fraction = magnitude >> form.fraction, magnitude % 2**form.fraction
    # Code 0 of the exponent is denormal: it has the exponent of code 1 and no leading 1.
    significand = fraction / 2.0**form.fraction + (exponent > 0)
    top_binade = np.maximum(scale, form.lowest_scale) - 127
    value = significand * 2.0 ** (np.maximum(exponent, 1) - (2**form.exponent - 1) + top_binade)
    value = np.where(codes > form.top, -value, value)
    return np.where(scale == NAN_SCALE, np.nan, value).astype(np.float32)


def scales_of(values: Float32Array, form: Format) -> Bytes:
    """For each block the smallest scale whose topmost code is not below the largest magnitude."""
    found = []
    for at in range(0, len(values), BLOCK):
        largest = np.max(np.abs(values[at : at + BLOCK].astype(np.float64)))  # NaN, if there is one
        if np.isnan(largest) or (form.signed and np.isinf(largest)):
            found.append(NAN_SCALE)
            continue
        scale = form.lowest_scale
        while scale < NAN_SCALE - 1 and largest > (2 - 2.0**-form.fraction) * 2.0 ** (scale - 127):
            scale += 1
        found.append(scale)
    return np.array(found, np.uint8)


def codes_of(values: Float32Array, scales: Bytes, noise: npt.NDArray[np.int64], form: Format) -> Bytes:
    """The codes of ``values`` under ``scales``; ``noise``, in 2**(23 - fraction) parts of a code, comes first."""
    scale = of_elements(scales, len(values))
    x = np.abs(values.astype(np.float64))
    lowest = 2.0 ** (np.maximum(scale, form.lowest_scale) - 127 - (2**form.exponent - 1))  # of code 0's binade
    with np.errstate(all="ignore"):
        denormal = np.rint(x / (2 * lowest) * 2.0**23)  # in parts of a code; np.rint rounds ties to even
        significand, exponent = np.frexp(np.where(np.isfinite(x) & (x > 0), x, 1.0))
        binades = exponent - 1 - np.round(np.log2(lowest))
        normal = binades * 2.0**23 + (2 * significand - 1) * 2.0**23
        position = np.where(x >= 2 * lowest, np.where(np.isinf(x), 2.0**40, normal), denormal)
    parts = np.where(np.isnan(position), 0, position).astype(np.int64) + noise
    code = np.minimum(parts >> (23 - form.fraction), form.top)
    smallest = 0 if form.signed else 1  # of what is above 0
    code = np.where(x > 0, np.maximum(code, smallest), code)
    code = code + (np.signbit(values) if form.signed else 0) * (form.top + 1)
    return np.where(scale == NAN_SCALE, 0, code).astype(np.uint8)


def rounded(values: Float32Array, random16: RandomWords, form: Format) -> Bytes:
    """Codes and scales of new moments, rounded stochastically by sixteen random bits per element."""
    spare = 23 - form.fraction - 16  # parts of a code below the random bits; half of them are added
    scales = scales_of(values, form)
    noise = (random16.astype(np.int64) << spare) + (1 << (spare - 1))
    return np.concatenate([codes_of(values, scales, noise, form), scales])


def written(values: Float32Array, form: Format) -> Bytes:
    """Codes and scales of loaded moments, rounded to nearest, halves away from zero."""
    scales = scales_of(values, form)
    half = np.full(len(values), 1 << (22 - form.fraction), np.int64)
    return np.concatenate([codes_of(values, scales, half, form), scales])


class Stepped(NamedTuple):
    """What one step leaves behind: moments as codes and scales."""

    master: Float32Array
    exp_avg: Bytes
    exp_avg_sq: Bytes
    shadow: npt.NDArray[np.generic]


def step(
    master: Float32Array,
    exp_avg: Bytes,
    exp_avg_sq: Bytes,
    gradient: npt.NDArray[np.generic],
    published: str,
    hyper: Hyper,
    noise: RandomWords,
) -> Stepped:
    """One step of AdamW (or Adam); the lower half of ``noise`` rounds exp_avg, the upper one exp_avg_sq."""
    k, n = scalars(hyper), len(master)
    with np.errstate(all="ignore"):
        g = effective_gradient(master, gradient, hyper)
        m, v = read(exp_avg, n, EXP_AVG), read(exp_avg_sq, n, EXP_AVG_SQ)
        m = fma(k.beta1, m, fma(k.one_minus_beta1, g, k.beta1_rest * m))
        v = fma(k.beta2, v, k.one_minus_beta2 * (g * g))
        new_m = rounded(m, noise & np.uint32(0xFFFF), EXP_AVG)
        new_v = rounded(v, noise >> np.uint32(16), EXP_AVG_SQ)
        m, v = read(new_m, n, EXP_AVG), read(new_v, n, EXP_AVG_SQ)
        update = m / fma(np.sqrt(v), k.inverse_sqrt_correction2, k.eps)
        decayed = master if hyper.l2 else master * k.decay
        new_master = canonical(fma(-k.step_size, update, decayed))
    return Stepped(new_master, new_m, new_v, narrow(new_master, published))
