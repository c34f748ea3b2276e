"""One AdamW or Adam step, the gradient norm and the verdict, as the documentation defines them; NumPy arrays only."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tests.support.reference.convert import canonical, narrow, widen
from tests.support.reference.fma import fma
from tests.support.reference.stochastic import RandomWords, stochastic, upper_halves

Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]

NORM_BLOCK = 1024


@dataclass(frozen=True)
class Hyper:
    """What a step is frozen with; the kernels take it too."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    gradient_factor: float = 1.0
    l2: bool = False


class Scalars(NamedTuple):
    """The fp32 constants of one step, each rounded once from fp64."""

    factor: np.float32
    beta1: np.float32
    beta1_rest: np.float32
    one_minus_beta1: np.float32
    inverse_beta1: np.float32
    beta2: np.float32
    one_minus_beta2: np.float32
    inverse_beta2: np.float32
    eps: np.float32
    step_size: np.float32
    inverse_sqrt_correction2: np.float32
    weight_decay: np.float32
    decay: np.float32
    inverse_decay: np.float32


class Stepped(NamedTuple):
    """What one step leaves behind; the inputs are not changed."""

    master: Float32Array
    exp_avg: npt.NDArray[Any]
    exp_avg_sq: npt.NDArray[Any]
    shadow: npt.NDArray[Any]


def power(base: float, exponent: int) -> float:
    """base ** exponent by repeated squaring in fp64. One order of products, so that every machine has the same bits."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result = result * base
        base = base * base
        exponent >>= 1
    return result


def scalars(hyper: Hyper) -> Scalars:
    """Every constant computed in fp64, then rounded once; 1/0 is infinity."""
    correction1 = 1.0 - power(hyper.beta1, hyper.step)
    correction2 = 1.0 - power(hyper.beta2, hyper.step)
    decay = 1.0 if hyper.l2 else 1.0 - hyper.lr * hyper.weight_decay
    return Scalars(
        factor=_fp32(hyper.gradient_factor),
        beta1=_fp32(hyper.beta1),
        beta1_rest=_fp32(hyper.beta1 - float(_fp32(hyper.beta1))),
        one_minus_beta1=_fp32(1.0 - hyper.beta1),
        inverse_beta1=_fp32(_divide(1.0, hyper.beta1)),
        beta2=_fp32(hyper.beta2),
        one_minus_beta2=_fp32(1.0 - hyper.beta2),
        inverse_beta2=_fp32(_divide(1.0, hyper.beta2)),
        eps=_fp32(hyper.eps),
        step_size=_fp32(_divide(hyper.lr, correction1)),
        inverse_sqrt_correction2=_fp32(_divide(1.0, math.sqrt(correction2))),
        weight_decay=_fp32(hyper.weight_decay),
        decay=_fp32(decay),
        inverse_decay=_fp32(_divide(1.0, decay)),
    )


def step(
    master: Float32Array,
    exp_avg: npt.NDArray[Any],
    exp_avg_sq: npt.NDArray[Any],
    gradient: npt.NDArray[Any],
    published: str,
    hyper: Hyper,
    noise: RandomWords | None = None,
) -> Stepped:
    """One step of AdamW (or, with `hyper.l2`, Adam) on fresh arrays; `published` names the shadow's format.

    With `noise` the moments are bf16; its lower half rounds exp_avg, its upper half exp_avg_sq.
    """
    k = scalars(hyper)
    with np.errstate(all="ignore"):
        g = effective_gradient(master, gradient, hyper)
        old_exp_avg, old_exp_avg_sq = widen(exp_avg), widen(exp_avg_sq)
        new_exp_avg = fma(k.beta1, old_exp_avg, fma(k.one_minus_beta1, g, k.beta1_rest * old_exp_avg))
        new_exp_avg_sq = fma(k.beta2, old_exp_avg_sq, k.one_minus_beta2 * (g * g))
        if noise is not None:
            new_exp_avg = stochastic(new_exp_avg, noise & np.uint32(0xFFFF))
            new_exp_avg_sq = stochastic(new_exp_avg_sq, noise >> np.uint32(16))
        denominator = fma(np.sqrt(new_exp_avg_sq), k.inverse_sqrt_correction2, k.eps)
        update = new_exp_avg / denominator
        decayed = master if hyper.l2 else master * k.decay
        new_master = canonical(fma(-k.step_size, update, decayed))
    store = canonical if noise is None else upper_halves
    return Stepped(new_master, store(new_exp_avg), store(new_exp_avg_sq), narrow(new_master, published))


def effective_gradient(master: Float32Array, gradient: npt.NDArray[Any], hyper: Hyper) -> Float32Array:
    """The gradient that enters the moments: converted, scaled once and, for Adam, with the L2 term."""
    k = scalars(hyper)
    with np.errstate(all="ignore"):
        g = widen(gradient) * k.factor
        return fma(k.weight_decay, master, g) if hyper.l2 else g


def sum_of_squares(gradient: npt.NDArray[Any]) -> Float64Array:
    """fp64 sums over 1024-element blocks, each by 16 accumulators and a fixed tree; not finite becomes +inf."""
    blocks = -(-gradient.size // NORM_BLOCK)
    padded = np.zeros(blocks * NORM_BLOCK, dtype=np.float64)
    with np.errstate(all="ignore"):
        padded[: gradient.size] = widen(gradient)
        rows = padded.reshape(blocks, NORM_BLOCK // 16, 16)
        accumulators = np.zeros((blocks, 16), dtype=np.float64)
        for row in range(rows.shape[1]):
            accumulators = accumulators + rows[:, row] * rows[:, row]
        sums = _tree(accumulators)
    return np.where(np.isfinite(sums), sums, np.inf)


def fold_sums(blocks: Float64Array) -> float:
    """One shard's sum from its block sums: 8 accumulators taken in turn, then a tree."""
    padded = np.zeros(-(-blocks.size // 8) * 8, dtype=np.float64)
    padded[: blocks.size] = blocks
    accumulators = np.zeros(8, dtype=np.float64)
    for row in padded.reshape(-1, 8):
        accumulators = accumulators + row
    return float(_tree(accumulators))


class Verdict(NamedTuple):
    """What a whole step is decided by."""

    grad_norm: float
    clip_coefficient: float
    found_inf: bool
    gradient_factor: float


def verdict(shard_blocks: Iterable[Float64Array], max_grad_norm: float | None, unscale: float = 1.0) -> Verdict:
    """The verdict over all shards, in registration order. With found_inf only that field means anything to a step."""
    total = 0.0
    found_inf = False
    for blocks in shard_blocks:
        found_inf = found_inf or not bool(np.isfinite(blocks).all())
        total = total + fold_sums(blocks)
    norm = math.sqrt(total) * abs(unscale)
    clip = 1.0 if max_grad_norm is None else min(1.0, max_grad_norm / (norm + 1e-6))
    return Verdict(norm, clip, found_inf or not math.isfinite(norm), float(_fp32(unscale * clip)))


def _tree(accumulators: Float64Array) -> Float64Array:
    """Fold the last axis by halves: lane i takes lane i + half, until one is left."""
    half = accumulators.shape[-1] // 2
    while half:
        accumulators = accumulators[..., :half] + accumulators[..., half : 2 * half]
        half //= 2
    return np.asarray(accumulators[..., 0])


def _fp32(value: float) -> np.float32:
    with np.errstate(all="ignore"):
        rounded: np.float32 = np.float32(value)
        return rounded


def _divide(numerator: float, denominator: float) -> float:
    """fp64 division with IEEE's answers where Python raises."""
    with np.errstate(all="ignore"):
        return float(np.float64(numerator) / np.float64(denominator))
