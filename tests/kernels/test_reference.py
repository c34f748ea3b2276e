"""The reference itself, proven against rational arithmetic, and against torch within a stated tolerance."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from tests.support import kernel_inputs as cases
from tests.support.reference import adam, convert, exact
from tests.support.reference.fma import fma
from tests.support.reference.trainer import Group, Parameter, Trainer


def words_of(values: np.ndarray) -> list[int]:
    return [int(word) for word in convert.bits(convert.canonical(values))]


def floats(*words: int) -> np.ndarray:
    return np.array(words, dtype=np.uint32).view(np.float32)


def expect_fma(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> None:
    got = words_of(fma(x, y, z))
    for i, word in enumerate(got):
        a, b, c = float(x[i]), float(y[i]), float(z[i])
        expected = exact.fma32(a, b, c)
        assert word == expected, f"fma({a.hex()}, {b.hex()}, {c.hex()}): {word:#010x}, expected {expected:#010x}"


def test_fma_is_rounded_once() -> None:
    """Hostile patterns, special values with one another, ties that rounding twice would get wrong, cancellation,
    results that are denormal or overflow, signed zeros and invalid operations."""
    expect_fma(*(cases.hostile_fp32(6000, seed) for seed in (1, 2, 3)))
    special = (*cases.SPECIAL_FP32[::3], 0x7F800000, 0x3F800000)
    signed = floats(*(word | sign for word in special for sign in (0, 0x80000000)))
    expect_fma(*(grid.ravel() for grid in np.meshgrid(signed, signed, signed[::3])))
    # (1 + 2**-12)**2 = 1 + 2**-11 + 2**-24: a tie, decided by an addend far below fp64's last bit.
    near_one = np.array([1 + 2**-12] * 3, dtype=np.float32)
    tiny = floats(0x00000001, 0x80000001, 0x00000000)
    assert words_of(fma(near_one, near_one, tiny)) == [0x3F801001, 0x3F801000, 0x3F801000]
    x, y = cases.ranged(3000, 4, -3, 3), cases.ranged(3000, 5, -3, 3)
    expect_fma(x, y, -(x * y))
    expect_fma(cases.ranged(3000, 9, -75, -60), cases.ranged(3000, 10, -75, -60), cases.ranged(3000, 11, -126, -120))
    expect_fma(cases.ranged(1000, 12, 60, 66), cases.ranged(1000, 13, 60, 64), cases.ranged(1000, 14, 120, 127))


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_narrowing_is_the_nearest_number_ties_to_even(name: str) -> None:
    form = exact.BF16 if name == "bf16" else exact.FP16
    values = np.concatenate(
        [cases.hostile_fp32(6000, 20), cases.ranged(2000, 21, -27, 17), floats(*cases.SPECIAL_FP32)]
    )
    got = convert.bits(convert.narrow(values, name))
    for value, word in zip(values, got, strict=True):
        number = float(value)
        if math.isnan(number):
            expected = convert.CANONICAL_NAN[name]
        elif math.isinf(number):
            expected = form.infinity | (0x8000 if number < 0 else 0)
        else:
            expected = exact.round_to(Fraction(number), form, negative_zero=math.copysign(1.0, number) < 0)
        assert int(word) == expected, f"{number.hex()}: {int(word):#06x}, expected {expected:#06x}"


def test_beta1_and_its_rest_are_each_rounded_once() -> None:
    for beta1 in (0.0, 0.5, 0.9, 0.95, 1 - 2**-30, 1 - 2**-53, 2**-60, 5e-324):
        k = adam.scalars(adam.Hyper(lr=1e-3, beta1=beta1, beta2=0.999, eps=1e-8, weight_decay=1e-2, step=3))
        rest = Fraction(beta1) - Fraction(float(k.beta1))
        assert fp32_word(float(k.beta1)) == exact.round_to(Fraction(beta1), exact.FP32)
        assert fp32_word(float(k.beta1_rest)) == exact.round_to(rest, exact.FP32)
        assert fp32_word(float(k.one_minus_beta1)) == exact.round_to(Fraction(1.0 - beta1), exact.FP32)


@pytest.mark.parametrize("l2", [False, True])
@pytest.mark.parametrize("number", range(len(cases.HYPERS)))
def test_step_is_the_chain_of_exactly_rounded_operations(number: int, l2: bool) -> None:
    """Element by element, in the order of the definition, for as long as an element's numbers stay finite."""
    plain = cases.HYPERS[number]
    hyper = adam.Hyper(**{**vars(plain), "l2": l2})
    checked = 0
    for kind in cases.KINDS:
        old = cases.state(kind, 60, 40)
        gradient = cases.gradient(kind, "fp32", 60, 43)
        stepped = adam.step(*old, gradient, "fp32", hyper)
        for i in range(60):
            inputs = (float(old.master[i]), float(old.exp_avg[i]), float(old.exp_avg_sq[i]), float(gradient[i]))
            expected = one_element(*inputs, hyper)
            if expected is None:
                continue
            got = tuple(int(convert.bits(array)[i]) for array in stepped[:3])
            assert got == expected, f"{kind} element {i} of {hyper}: {got}, expected {expected}"
            checked += 1
    assert checked > 30


def one_element(p: float, m: float, v: float, gradient: float, hyper: adam.Hyper) -> tuple[int, int, int] | None:
    """One element's words after a step by rational arithmetic; None where something stops being a finite number."""
    k = [float(value) for value in adam.scalars(hyper)]
    factor, b1, rest, a1, _, b2, a2, _, eps, step_size, correction, weight_decay, decay, _ = k
    if not all(math.isfinite(value) for value in (p, m, v, gradient, factor, step_size, correction, decay)):
        return None

    def chain() -> tuple[int, int, int]:
        g = finite_value(exact.mul32(gradient, factor))
        if hyper.l2:
            g = finite_value(exact.fma32(weight_decay, p, g))
        from_rest = finite_value(exact.mul32(rest, m))
        new_m = finite_value(exact.fma32(b1, m, finite_value(exact.fma32(a1, g, from_rest))))
        new_v = finite_value(exact.fma32(b2, v, finite_value(exact.mul32(a2, finite_value(exact.mul32(g, g))))))
        if new_v < 0:
            raise OverflowError
        denominator = finite_value(exact.fma32(finite_value(exact.sqrt32(new_v)), correction, eps))
        if denominator == 0:
            raise OverflowError
        update = finite_value(exact.div32(new_m, denominator))
        decayed = p if hyper.l2 else finite_value(exact.mul32(p, decay))
        new_p = exact.fma32(-step_size, update, decayed)
        return new_p, fp32_word(new_m), fp32_word(new_v)

    try:
        return chain()
    except OverflowError:
        return None


def finite_value(word: int) -> float:
    """A word's value; leaves the chain where it is not finite."""
    value = exact.float32_of(word)
    if not math.isfinite(value):
        raise OverflowError
    return value


def fp32_word(value: float) -> int:
    return int(np.float32(value).view(np.uint32))


def test_norm_blocks_against_plain_loops() -> None:
    for form in cases.FORMATS:
        gradient = cases.finite(cases.gradient("hostile", form, 2600, 50), form)
        got = adam.sum_of_squares(gradient)
        wide = convert.widen(gradient)
        assert got.shape == (3,)
        for block in range(3):
            accumulators = [0.0] * 16
            for i, value in enumerate(wide[block * 1024 : (block + 1) * 1024]):
                accumulators[i % 16] += float(value) * float(value)
            eight = [accumulators[i] + accumulators[i + 8] for i in range(8)]
            four = [eight[i] + eight[i + 4] for i in range(4)]
            assert got[block] == (four[0] + four[2]) + (four[1] + four[3])
    for count in (0, 1, 7, 8, 9, 100):  # and their fold
        blocks = cases.block_sums(count, 52)
        accumulators = [0.0] * 8
        for j, value in enumerate(blocks):
            accumulators[j % 8] += float(value)
        four = [accumulators[i] + accumulators[i + 4] for i in range(4)]
        assert adam.fold_sums(blocks) == (four[0] + four[2]) + (four[1] + four[3])


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_trainer_follows_torch_for_60_steps(weight_decay: float) -> None:
    torch = pytest.importorskip("torch", reason="needs torch: pip install torch")
    shapes = (700, 1500, 33)
    initial = [cases.ranged(n, 80 + i, -8, -2) for i, n in enumerate(shapes)]
    theirs = [torch.nn.Parameter(torch.from_numpy(values.copy())) for values in initial]
    optimizer = torch.optim.AdamW(theirs, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=weight_decay)
    ours = [Parameter(values) for values in initial]
    group = Group(ours, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=weight_decay)
    trainer = Trainer([group], max_grad_norm=1.0)
    accumulated_lr = 0.0
    clipped = 0
    for step in range(60):
        lr = 1e-3 * (step + 1) / 20 if step < 20 else 1e-3 * (1 - step / 75)
        group.lr = optimizer.param_groups[0]["lr"] = lr
        accumulated_lr += lr
        scale = np.float32(1.0 if step % 3 else 0.01)
        gradients = [cases.ranged(n, 1000 + 10 * step + i, -8, -2) * scale for i, n in enumerate(shapes)]
        for parameter, gradient in zip(theirs, gradients, strict=True):
            parameter.grad = torch.from_numpy(gradient.copy())
        torch.nn.utils.clip_grad_norm_(theirs, 1.0)
        optimizer.step()
        clipped += trainer.step(gradients).clip_coefficient < 1.0
        for mine, parameter in zip(ours, theirs, strict=True):
            expected = parameter.detach().numpy().astype(np.float64)
            allowed = 1e-6 * np.maximum(np.abs(expected), accumulated_lr)
            assert np.all(np.abs(mine.master - expected) <= allowed), f"step {step}"
    assert 0 < clipped < 60
