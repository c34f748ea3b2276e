"""Compares formats of 8-bit moments with fp32: how right the updates are, where gradients differ by decades in a block.

    python -m benchmarks.moment_formats --out benchmarks/results/moment_formats.json

It steps Adam's moments in NumPy, in fp64 and in each format: blocks of 256 elements whose gradients have a standard
deviation each, spread evenly over some decades. The rows are ours; ours with the block's largest magnitude as the
scale instead of a power of two; exp_avg_sq rounded to 0 too, or with 6 exponent and 2 fraction bits, or its square root
with 4 and 4; and dynamic tree codes (T. Dettmers and others, "8-bit Optimizers via Block-wise Quantization", 2022),
rounded to nearest as published, and stochastically.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.results_file import write_rows

BLOCK = 256
BETA1, BETA2, EPS = 0.9, 0.999, 1e-12  # eps so small that it hides nothing

Values = NDArray[np.float64]
Rounding = Callable[[Values, Values], Values]  # of values [blocks, BLOCK], by uniform random numbers


def floats(exponent_bits: int, fraction_bits: int) -> Values:
    """Returns the magnitudes of small floating-point numbers, with denormal ones; the topmost binade is that of 1."""
    steps = 2**fraction_bits
    denormal = np.arange(steps) / steps * 2.0 ** (2 - 2**exponent_bits)
    normal = [(1 + np.arange(steps) / steps) * 2.0 ** (e + 1 - 2**exponent_bits) for e in range(1, 2**exponent_bits)]
    return np.concatenate([denormal, *normal])


def dynamic_tree(bits: int) -> Values:
    """Returns the magnitudes of dynamic tree codes: leading zeros are a power of ten, bits behind them a fraction."""
    found = [0.0, 1.0]
    for zeros in range(bits):
        bins = np.linspace(0.1, 1, 2 ** (bits - 1 - zeros) + 1)
        found.extend((bins[:-1] + bins[1:]) / 2 * 10.0**-zeros)
    return np.unique(found)


def rounding(codes: Values, *, power_of_two: bool = True, stochastic: bool = True, zero: bool = True) -> Rounding:
    """Returns the rounding of each block's magnitudes to ``codes`` under the block's scale.

    Without ``zero``, what is above 0 does not become 0.
    """

    def rounded(values: Values, random: Values) -> Values:
        magnitudes = np.abs(values)
        largest = magnitudes.max(axis=1, keepdims=True) / codes[-1]
        scale = np.exp2(np.ceil(np.log2(np.maximum(largest, 1e-300)))) if power_of_two else largest
        x = magnitudes / np.where(scale == 0, 1, scale)
        low = np.clip(np.searchsorted(codes, x, side="right") - 1, 0, len(codes) - 2)
        share = (x - codes[low]) / (codes[low + 1] - codes[low])
        up = share > random if stochastic else share >= 0.5
        found = np.where(up, codes[low + 1], codes[low])
        if not zero:
            found = np.where(magnitudes > 0, np.maximum(found, codes[1]), found)
        return np.asarray(np.sign(values) * found * scale)

    return rounded


def of_root(of_value: Rounding) -> Rounding:
    """Rounds the square root instead."""
    return lambda values, random: of_value(np.sqrt(values), random) ** 2


def formats() -> dict[str, tuple[Rounding, Rounding]]:
    """Returns the roundings of exp_avg and exp_avg_sq by name."""
    exp_avg, codes = rounding(floats(4, 3)), floats(5, 3)
    tree, larger_tree = dynamic_tree(7), dynamic_tree(8)
    return {
        "ours": (exp_avg, rounding(codes, zero=False)),
        "ours, largest as scale": (
            rounding(floats(4, 3), power_of_two=False),
            rounding(codes, power_of_two=False, zero=False),
        ),
        "ours, exp_avg_sq may be 0": (exp_avg, rounding(codes)),
        "exp_avg_sq of 6 + 2 bits": (exp_avg, rounding(floats(6, 2), zero=False)),
        "root of exp_avg_sq, 4 + 4 bits": (exp_avg, of_root(rounding(floats(4, 4), zero=False))),
        "dynamic tree, to nearest": (
            rounding(tree, power_of_two=False, stochastic=False),
            rounding(larger_tree, power_of_two=False, stochastic=False),
        ),
        "dynamic tree, stochastic": (rounding(tree, power_of_two=False), rounding(larger_tree, power_of_two=False)),
    }


def run(name: str, decades: float, steps: int, blocks: int) -> dict[str, Any]:
    """Steps both moments ``steps`` times; returns what the updates of the second half come to."""
    round_m, round_v = formats()[name]
    random = np.random.default_rng(1)
    size = 10.0 ** random.uniform(-decades, 0, (blocks, BLOCK))
    exact_m, exact_v, m, v = (np.zeros((blocks, BLOCK)) for _ in range(4))
    exact: list[Values] = []
    found: list[Values] = []
    for step in range(1, steps + 1):
        g = size * random.standard_normal((blocks, BLOCK))
        exact_m, exact_v = BETA1 * exact_m + (1 - BETA1) * g, BETA2 * exact_v + (1 - BETA2) * g * g
        m = round_m(BETA1 * m + (1 - BETA1) * g, random.random(g.shape))
        v = round_v(BETA2 * v + (1 - BETA2) * g * g, random.random(g.shape))
        if step > steps // 2:
            exact.append(_update(exact_m, exact_v, step))
            found.append(_update(m, v, step))
    right, ours = np.array(exact), np.array(found)
    return {
        "name": name,
        "decades": decades,
        "correlation": float(np.corrcoef(right.ravel(), ours.ravel())[0, 1]),
        "size": float((right * ours).sum() / (right * right).sum()),
        "largest": float(np.abs(ours).max()),
        "largest_exact": float(np.abs(right).max()),
        "zeros_of_exp_avg_sq": float((v == 0).mean()),
    }


def _update(m: Values, v: Values, step: int) -> Values:
    return np.asarray(m / (1 - BETA1**step) / (np.sqrt(v / (1 - BETA2**step)) + EPS))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs every format at every spread, prints a table and writes the JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.moment_formats", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--blocks", type=int, default=64)
    parser.add_argument("--decades", type=float, nargs="+", default=[1.0, 3.0, 5.0, 7.0])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    rows = [run(name, decades, args.steps, args.blocks) for name in formats() for decades in args.decades]
    print(f"{'format':32} {'decades':>7} {'correlation':>11} {'size':>6} {'largest':>9} {'zeros':>7}")
    for row in rows:
        print(
            f"{row['name']:32} {row['decades']:7g} {row['correlation']:11.4f} {row['size']:6.3f} "
            f"{row['largest']:9.3g} {row['zeros_of_exp_avg_sq']:7.4f}"
        )
    settings = {"steps": args.steps, "blocks": args.blocks, "beta1": BETA1, "beta2": BETA2, "eps": EPS}
    write_rows(args.out, rows, settings=settings)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
