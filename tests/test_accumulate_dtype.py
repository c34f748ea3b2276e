"""accumulate_dtype="fp32": micro-batches of bf16 and fp16 parameters add up in fp32, whatever adds them where."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from superoffload import AdamW, CPUAdamW
from superoffload.errors import ArgumentError, StateError, UnknownArgument
from superoffload.optimizer.fp32_sums import check_fp32_sums
from superoffload.schedule import MODES
from tests.adamw_tools import batch, check_counters, model_of
from tests.compatibility import compat
from tests.fp32_gradients import (
    by_hooks,
    declared,
    needs_grad_dtype,
    of_any_dtype,
    parameters_of,
    steps,
    trained,
    with_main_grad,
)
from tests.over_stand_in import SOMETIMES_SLOWER

HALVES = (torch.bfloat16, torch.float16)
WINDOWS = (3, 1, 5, 2)  # micro-batches of each step
ROW = "gradient accumulation in fp32 of bfloat16 and float16 parameters (accumulate_dtype)"
Window = Callable[[AdamW, Iterable[Tensor]], None]


def _nothing(_: nn.Module) -> None:
    """The model as it is."""


def losses_of(model: nn.Module, window: int, count: int) -> Iterator[Tensor]:
    """One after the other, each when it is asked for."""
    for micro in range(count):
        yield batch(model, 10 * window + micro)


def loop(optimizer: AdamW, losses: Iterable[Tensor]) -> None:
    for loss in losses:
        loss.backward()


def told(optimizer: AdamW, losses: Iterable[Tensor]) -> None:
    *first, last = losses
    with optimizer.accumulate():
        for loss in first:
            loss.backward()
    last.backward()


def in_own_dtype(loss: Tensor, params: Sequence[Any], **options: Any) -> list[Tensor]:
    """Gradients as autograd makes them where nothing is said of their dtype."""
    for param in params:
        param.grad, param.grad_dtype = None, param.dtype
    found = list(torch.autograd.grad(loss, params, **options))
    for param, grad in zip(params, found, strict=True):
        assert grad.dtype is param.dtype
        param.grad_dtype = torch.float32
    return found


def summed(optimizer: AdamW, losses: Iterable[Tensor]) -> None:
    """The reference: torch adds such gradients in fp32."""
    params = [param for group in optimizer.param_groups for param in group["params"] if param.requires_grad]
    sums = [torch.zeros_like(param, dtype=torch.float32) for param in params]
    for loss in losses:
        for total, grad in zip(sums, in_own_dtype(loss, params), strict=True):
            total.add_(grad.float())
    for param, total in zip(params, sums, strict=True):
        param.grad = total


def train_windows(window: Window, model: nn.Module, optimizer: Any) -> None:
    """With steps that clip, change the learning rate, or are skipped."""
    for number, count in enumerate((*WINDOWS, *WINDOWS)):
        optimizer.zero_grad()
        optimizer.max_grad_norm = 0.05 if number == 3 else 100.0
        optimizer.param_groups[0]["lr"] = 1e-2 / (1 + number)
        window(optimizer, losses_of(model, number, count))
        if number == 5:
            assert model[0].bias.grad is not None  # type: ignore[index]
            model[0].bias.grad[0] = torch.inf  # type: ignore[index]
        optimizer.step()


def expected_digests(dtype: torch.dtype, train: Callable[..., None] = train_windows) -> dict[str, str]:
    return trained(declared, partial(train, summed), dtype, speculation="never").state_digests()


@needs_grad_dtype
@pytest.mark.parametrize("window", [loop, told])
@pytest.mark.parametrize("dtype", HALVES)
def test_the_bits_of_sums_that_torch_makes_in_fp32(dtype: torch.dtype, window: Window) -> None:
    expected = expected_digests(dtype)
    for mode in MODES:
        found = trained(_nothing, partial(train_windows, window), dtype, speculation=mode, accumulate_dtype="fp32")
        check_counters(found)
        assert found.state_digests() == expected, mode
        assert found.stats()["skipped_steps"] == 1 and found.stats()["clipped_steps"] == 1
        assert bool(found.stats()["buckets_speculated"]) or mode != "always"
    rounded = trained(_nothing, partial(train_windows, window), dtype).state_digests()
    assert rounded["master"] != expected["master"], "these sums are none that the parameters' dtype could hold"


@needs_grad_dtype
def test_the_same_graph_twice_and_undone() -> None:
    def twice(adding: Any, model: nn.Module, optimizer: Any) -> None:
        for seed in range(4):
            optimizer.zero_grad()
            loss = batch(model, seed)
            if adding is summed:
                params = list(model.parameters())
                first = in_own_dtype(loss, params, retain_graph=True)
                second = in_own_dtype(0.3 * loss, params)
                for param, one, other in zip(params, first, second, strict=True):
                    param.grad = one.float() + other.float()
            else:
                loss.backward(retain_graph=True)
                (0.3 * loss).backward()
            optimizer.step()

    expected = expected_digests(torch.bfloat16, twice)
    for mode in MODES:
        found = trained(_nothing, partial(twice, loop), torch.bfloat16, speculation=mode, accumulate_dtype="fp32")
        assert found.state_digests() == expected
        assert bool(found.stats()["buckets_undone"]) or mode != "always"


@needs_grad_dtype
def test_uses_of_a_parameter_within_one_backward() -> None:
    """docs/edits.md says that autograd widens each before it adds them."""
    torch.manual_seed(0)
    param = nn.Parameter(torch.randn(512).bfloat16())
    factors = [torch.randn(512).bfloat16() for _ in range(6)]
    with AdamW([param], accumulate_dtype="fp32", threads=1):
        sum((param * factor).sum() for factor in factors).backward()  # type: ignore[union-attr]
        exact = torch.stack([factor.double() for factor in factors]).sum(0)
        assert param.grad is not None and (param.grad.double() - exact).abs().max() < 1e-5


@compat(ROW, "single")
@compat(ROW, "stand_in", note=SOMETIMES_SLOWER)
@needs_grad_dtype
@pytest.mark.parametrize("window", [loop, told])
@pytest.mark.parametrize("clip", [False, True])
def test_gradients_are_in_fp32_and_can_be_clipped(window: Window, clip: bool) -> None:
    """By hand too, and by a GradScaler, which refuses fp16 gradients."""

    def train(window: Window, model: nn.Module, optimizer: Any) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        for number in range(4):
            optimizer.zero_grad()
            window(optimizer, (scaler.scale(loss) for loss in losses_of(model, number, 3)))
            if clip:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            for param in model.parameters():
                assert param.grad is not None and param.grad.dtype is torch.float32
            scaler.step(optimizer)
            scaler.update()

    expected = trained(declared, partial(train, summed), torch.float16, speculation="never")
    assert expected.stats()["steps"] == 4
    for mode in MODES:
        found = trained(
            _nothing, partial(train, window), torch.float16, speculation=mode, accumulate_dtype=torch.float32
        )
        assert found.state_digests() == expected.state_digests()


def test_fp32_parameters_are_left_as_they_are() -> None:
    found = [
        trained(_nothing, partial(train_windows, loop), torch.float32, accumulate_dtype=dtype)
        for dtype in (None, "fp32")
    ]
    assert found[0].state_digests() == found[1].state_digests()


@needs_grad_dtype
def test_checkpoints_are_the_same() -> None:
    """Saved with it, loaded without, and the other way."""
    for before, after in (("fp32", None), (None, "fp32")):
        model, other = model_of(torch.bfloat16), model_of(torch.bfloat16, seed=1)
        with AdamW(model.parameters(), lr=1e-2, threads=2, accumulate_dtype=before) as optimizer:
            steps(model, optimizer)
            digests, file = optimizer.state_digests(), io.BytesIO()
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        saved = torch.load(io.BytesIO(file.getvalue()))
        with AdamW(other.parameters(), lr=1e-2, threads=2, accumulate_dtype=after) as optimizer:
            other.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            assert optimizer.state_digests() == digests
            steps(other, optimizer, range(4, 6))
            assert optimizer.stats()["steps"] == 2


# ---- loops of others ------------------------------------------------------------------------------------------------


@compat(ROW, "single")
@needs_grad_dtype
@pytest.mark.parametrize("mode", MODES)
def test_windows_of_accelerate(mode: str) -> None:
    accelerate = pytest.importorskip("accelerate", reason="needs accelerate: pip install 'superoffload[transformers]'")

    def theirs(model: nn.Module, optimizer: Any) -> None:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerate.state.GradientState._reset_state()
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=4)
        prepared, wrapped = accelerator.prepare(model, optimizer)
        for seed in range(12):
            with accelerator.accumulate(prepared):
                accelerator.backward(batch(model, seed))
                wrapped.step()
                wrapped.zero_grad()

    def by_hand(model: nn.Module, optimizer: Any) -> None:
        for number in range(3):
            summed(optimizer, (batch(model, 4 * number + micro) / 4 for micro in range(4)))
            optimizer.step()

    expected = trained(declared, by_hand, torch.bfloat16, speculation="never").state_digests()
    found = trained(_nothing, theirs, torch.bfloat16, speculation=mode, accumulate_dtype="fp32")
    assert found.state_digests() == expected and found.stats()["buckets_undone"] == 0
    assert trained(_nothing, theirs, torch.bfloat16).state_digests() != expected


@needs_grad_dtype
def test_trainer(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs transformers: pip install 'superoffload[transformers]'")
    from superoffload.integrations.transformers import offload
    from tests import test_transformers

    def run(source: Callable[[nn.Module], None], mode: str, **options: Any) -> dict[str, str]:
        model = test_transformers.model_of(dtype=torch.bfloat16)
        source(model)
        trainer = test_transformers.trainer_of(tmp_path, model, None, max_steps=3, gradient_accumulation_steps=4)
        offload(trainer, speculation=mode, threads=1, **options)
        trainer.train()
        return test_transformers.end(trainer)

    expected = run(declared, "never")
    assert [run(_nothing, mode, accumulate_dtype="fp32") for mode in MODES] == [expected] * len(MODES)
    assert run(_nothing, "never") != expected


# ---- which parameters, and for how long -----------------------------------------------------------------------------


def _dtypes(params: Any) -> list[Any]:
    return [param.grad_dtype for param in params]


@needs_grad_dtype
def test_what_is_set_is_set_back() -> None:
    """A gradient that is there is widened first, and rounded in the end: it stays the one of its parameter."""
    model = model_of(torch.bfloat16)
    params = parameters_of(model)
    params[1].grad_dtype = None
    declared(nn.ParameterList([params[2]]))
    before = _dtypes(params)
    batch(model, 0).backward()
    first = [param.grad.clone() for param in params]
    with AdamW(params, threads=1, accumulate_dtype="fp32"):
        assert _dtypes(params) == [torch.float32] * 6
        assert all(torch.equal(p.grad, grad.float()) for p, grad in zip(params, first, strict=True))
        batch(model, 1).backward()
        both = [param.grad.clone() for param in params]
    assert _dtypes(params) == before
    for index, (param, grad) in enumerate(zip(params, both, strict=True)):
        assert torch.equal(param.grad, grad if index == 2 else grad.bfloat16())
        param.grad = None
    batch(model, 1).backward()
    assert [param.grad.dtype for param in params] == [grad.dtype for grad in first]


@needs_grad_dtype
def test_one_that_could_not_be_made_leaves_nothing_behind() -> None:
    model = model_of(torch.bfloat16)
    with pytest.raises(ArgumentError, match="trace"):
        AdamW(model.parameters(), accumulate_dtype="fp32", trace="/nowhere/at/all.json")
    assert _dtypes(model.parameters()) == [torch.bfloat16] * 6


@needs_grad_dtype
def test_parameters_that_come_later() -> None:
    """A frozen one has its first window in fp32, too, and so has a group that is added."""

    def train(window: Window, model: Any, optimizer: Any) -> None:
        optimizer.add_param_group({"params": list(model[3].parameters())})
        for number, count in enumerate(WINDOWS):
            optimizer.zero_grad()
            model[0].weight.requires_grad_(number > 1)
            window(optimizer, losses_of(model, number, count))
            optimizer.step()

    def run(window: Window, source: Callable[[nn.Module], None], **options: Any) -> dict[str, str]:
        model: Any = model_of(torch.bfloat16)
        source(model)
        model[0].weight.requires_grad_(False)
        with AdamW(list(model[:3].parameters()), lr=1e-2, threads=2, **options) as optimizer:
            train(window, model, optimizer)
            return optimizer.state_digests()

    expected = run(summed, declared, speculation="never")
    for mode in MODES:
        for window in (loop, told):
            assert run(window, _nothing, speculation=mode, accumulate_dtype="fp32") == expected


@needs_grad_dtype
def test_main_grad_in_fp32_is_left_as_it_is() -> None:
    def train(model: nn.Module, optimizer: Any) -> None:
        for number, count in enumerate(WINDOWS):
            optimizer.zero_grad()
            loop(optimizer, losses_of(model, number, count))
            optimizer.step()

    expected = trained(by_hooks, train, torch.bfloat16).state_digests()
    assert trained(by_hooks, train, torch.bfloat16, accumulate_dtype="fp32").state_digests() == expected
    model = model_of(torch.bfloat16)
    for param in model.parameters():
        with_main_grad(param)
    with AdamW(model.parameters(), threads=1, accumulate_dtype="fp32"):
        assert _dtypes(model.parameters()) == [torch.bfloat16] * 6


@needs_grad_dtype
def test_a_dtype_that_is_changed_meanwhile_is_an_error_and_not_a_rounded_sum() -> None:
    model = model_of(torch.bfloat16)
    with AdamW(model.parameters(), threads=2, accumulate_dtype="fp32") as optimizer:
        steps(model, optimizer, range(2))
        before = optimizer.state_digests()
        optimizer.zero_grad()
        of_any_dtype(model)
        with pytest.raises(StateError, match=r"gradient is torch.bfloat16, so it was not added up in fp32"):
            batch(model, 3).backward()
        optimizer.zero_grad()
        assert optimizer.state_digests() == before
        declared(model)
        steps(model, optimizer, range(2))
        assert optimizer.stats()["steps"] == 4


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["bf16", "float32", torch.bfloat16, torch.float64, True, 32])
def test_what_it_cannot_be(value: Any) -> None:
    with pytest.raises(ArgumentError, match=r"accumulate_dtype=.*expected 'fp32', or None"):
        AdamW(model_of(torch.bfloat16).parameters(), accumulate_dtype=value)


def test_main_grad_that_rounds_is_refused() -> None:
    model = model_of(torch.bfloat16)
    last = parameters_of(model)[-1]
    last.main_grad = torch.zeros_like(last)
    with pytest.raises(ArgumentError, match=r"parameter 5 of param_groups\[0\]: p.main_grad is torch.bfloat16"):
        AdamW(model.parameters(), accumulate_dtype="fp32")


@needs_grad_dtype
def test_a_group_that_is_refused_changes_nothing() -> None:
    model, more = model_of(torch.bfloat16), model_of(torch.bfloat16)
    parameters_of(more)[-1].main_grad = torch.zeros_like(parameters_of(more)[-1])
    with AdamW(model.parameters(), threads=1, accumulate_dtype="fp32") as optimizer:
        with pytest.raises(ArgumentError, match="main_grad"):
            optimizer.add_param_group({"params": list(more.parameters())})
        assert len(optimizer.param_groups) == 1 and _dtypes(more.parameters()) == [torch.bfloat16] * 6


def test_a_torch_that_cannot_do_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before 2.10, where parameters have no grad_dtype."""
    monkeypatch.setattr(torch, "__version__", "2.9.1")
    monkeypatch.setattr("superoffload.optimizer.fp32_sums.Tensor", object)
    param = SimpleNamespace(dtype=torch.bfloat16)
    with pytest.raises(ArgumentError, match=r"w needs p.grad_dtype, which torch 2.9.1 does not have.*torch 2.10"):
        check_fp32_sums([("w", param)], None)
    param.main_grad = torch.zeros(2)
    check_fp32_sums([("w", param), ("b", SimpleNamespace(dtype=torch.float32))], None)


def test_the_kernel_alone_says_how_to_do_it() -> None:
    with pytest.raises(UnknownArgument, match=r"accumulate_dtype='fp32': .*p.grad_dtype = torch.float32"):
        CPUAdamW(model_of(torch.bfloat16).parameters(), accumulate_dtype="fp32")  # type: ignore[call-arg]
    for name in ("grad_accum_dtype", "grad_dtype"):
        with pytest.raises(UnknownArgument, match="did you mean accumulate_dtype"):
            AdamW(model_of().parameters(), **{name: "fp32"})  # type: ignore[arg-type]
