"""Gradients that were packed and freed, and are needed again: every loop leaves the bits that it leaves on the host."""

from __future__ import annotations

import copy
import io
import pickle
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from superoffload import AdamW
from superoffload.bucket import Shard
from superoffload.core import Core
from superoffload.packed_gradient import PackedGradient, packed_in
from tests.adamw_tools import batch, model_of, train
from tests.fake_cuda import Fake, on_fake_device, on_host
from tests.test_cuda_link import LATE

Program = Callable[[Any, AdamW], Any]

OPTIONS: dict[str, Any] = {"speculation": "always", "threads": 2, "bucket_numel": 1024}
NEEDED_AGAIN = "packed and freed during backward, and then needed again"


def seen(value: Any) -> Any:
    """As it is now, to be compared with ==."""
    if isinstance(value, Tensor):
        value = value.detach().clone()
        return value.dtype, tuple(value.shape), value.flatten().view(torch.uint8).tolist()
    return [seen(one) for one in value] if isinstance(value, (list, tuple)) else value


def on_the_host(program: Program, dtype: torch.dtype, **options: Any) -> tuple[Any, dict[str, str]]:
    model = model_of(dtype)
    with on_host(), AdamW(model.parameters(), **{**OPTIONS, **options}) as optimizer:
        return seen(program(model, optimizer)), optimizer.state_digests()


def on_the_device(
    fake: Fake, program: Program, dtype: torch.dtype, **options: Any
) -> tuple[tuple[Any, dict[str, str]], list[str], int]:
    """Likewise, what it warned of, and how many gradients are freed at the end."""
    model = model_of(dtype)
    model.register_forward_pre_hook(lambda *_: fake.synchronize())
    with on_fake_device(fake), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with AdamW(model.parameters(), **{**OPTIONS, **options}) as optimizer:
            found = seen(program(model, optimizer))
            freed = sum(_is_freed(parameter.grad) for parameter in model.parameters())
            fake.synchronize()
            return (found, optimizer.state_digests()), [str(one.message) for one in caught], freed


def _is_freed(grad: Tensor | None) -> bool:
    packed = packed_in(grad)
    return packed is not None and packed.inner is None


def check(
    fake: Fake, program: Program, dtype: torch.dtype = torch.bfloat16, *, told: bool = True, **options: Any
) -> None:
    """``told``: whether the user learns, once, that gradients were brought back."""
    expected = on_the_host(program, dtype)
    for seed, placement in enumerate((None, {"gpu_fraction": 0.5})):
        fake.delays(seed, LATE)
        found, messages, _ = on_the_device(fake, program, dtype, placement=placement, **options)
        assert found == expected, placement
        assert sum(NEEDED_AGAIN in message for message in messages) == told
    assert fake.mismatches == 0


@contextmanager
def taken_back() -> Iterator[list[str]]:
    """The shards of which a gradient was taken back inside."""
    names: list[str] = []
    retract = Core.retract

    def counted(core: Core, shard: Shard) -> None:
        names.append(shard.name)
        retract(core, shard)

    with mock.patch.object(Core, "retract", counted):
        yield names


def grads_of(model: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def steps(model: nn.Module, optimizer: AdamW, between: Callable[[], Any] = lambda: None, count: int = 3) -> list[Any]:
    """``between``: after backward and before ``step()``."""
    results = []
    for seed in range(count):
        optimizer.zero_grad()
        batch(model, seed).backward()
        results.append(seen(between()))
        optimizer.step()
    return results


# ---- what autograd adds ---------------------------------------------------------------------------------------------


def windows(model: nn.Module, optimizer: AdamW) -> None:
    for window in range(3):
        optimizer.zero_grad()
        for micro in range(3):
            batch(model, 10 * window + micro).backward()
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_windows_without_accumulate(fake: Fake, dtype: torch.dtype) -> None:
    check(fake, windows, dtype)


@pytest.mark.parametrize("options", [{"speculation": "never"}, {"speculation": "adaptive"}, {"bucket_numel": 100}])
def test_windows_in_every_mode(fake: Fake, options: dict[str, Any]) -> None:
    check(fake, windows, **options)


def test_a_window_that_is_told_brings_nothing_back(fake: Fake) -> None:
    def told(model: nn.Module, optimizer: AdamW) -> None:
        for window in range(3):
            optimizer.zero_grad()
            with optimizer.accumulate():
                batch(model, 10 * window).backward()
            batch(model, 10 * window + 1).backward()
            optimizer.step()

    with taken_back() as taken:
        check(fake, told, told=False)
    assert not taken


def test_the_same_graph_twice(fake: Fake) -> None:
    def twice(model: nn.Module, optimizer: AdamW) -> None:
        for seed in range(3):
            optimizer.zero_grad()
            loss = batch(model, seed)
            loss.backward(retain_graph=True)
            (0.5 * loss).backward()
            optimizer.step()

    check(fake, twice)


def test_windows_of_several_lengths_with_a_learning_rate_that_changes(fake: Fake) -> None:
    def uneven(model: nn.Module, optimizer: AdamW) -> None:
        for window, length in enumerate((2, 1, 3, 1)):
            optimizer.zero_grad()
            for micro in range(length):
                batch(model, 10 * window + micro).backward()
                optimizer.param_groups[0]["lr"] *= 0.5
            optimizer.step()

    check(fake, uneven)


def test_a_backward_without_zero_grad_adds_to_the_step_before(fake: Fake) -> None:
    def kept(model: nn.Module, optimizer: AdamW) -> None:
        for seed in range(4):
            batch(model, seed).backward()
            optimizer.step()

    check(fake, kept)


def test_a_parameter_without_a_new_gradient_is_stepped_with_the_old_one(fake: Fake) -> None:
    def partly(model: nn.Sequential, optimizer: AdamW) -> None:
        for seed in range(4):
            if seed % 2:
                fake.synchronize()
                model[3](torch.ones(2, 48, dtype=model[3].weight.dtype)).square().sum().backward()
            else:
                batch(model, seed).backward()
            optimizer.step()

    check(fake, partly)


def test_steps_one_after_the_other(fake: Fake) -> None:
    def several(model: nn.Module, optimizer: AdamW) -> None:
        for seed in range(2):
            optimizer.zero_grad()
            batch(model, seed).backward()
            for _ in range(3):
                optimizer.step()

    check(fake, several)


def test_a_backward_that_records_a_graph(fake: Fake) -> None:
    def recorded(model: nn.Module, optimizer: AdamW) -> None:
        for window in range(2):
            optimizer.zero_grad()
            for micro in range(2):
                batch(model, 10 * window + micro).backward(create_graph=True)
            optimizer.step()
        optimizer.zero_grad()

    check(fake, recorded)


def test_backwards_in_threads(fake: Fake) -> None:
    def threads(model: nn.Module, optimizer: AdamW) -> None:
        for seed in range(3):
            optimizer.zero_grad()
            losses = [batch(model, 10 * seed + i) for i in range(2)]
            for loss in losses:
                thread = threading.Thread(target=loss.backward)
                thread.start()
                for grad in grads_of(model):
                    grad.shape  # noqa: B018 - while the other thread packs, frees and adds
                thread.join()
            optimizer.step()

    check(fake, threads)


# ---- set to zero ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("whose", ["optimizer", "model"])
def test_gradients_that_are_set_to_zero(fake: Fake, whose: str) -> None:
    def zeroed(model: nn.Sequential, optimizer: AdamW) -> list[Tensor]:
        found = []
        for seed in range(4):
            (optimizer if whose == "optimizer" else model).zero_grad(set_to_none=False)
            if seed == 3:
                found = [grad.clone() for grad in grads_of(model)]
            fake.synchronize()
            if seed % 2:  # the others are stepped with a gradient of zeros
                model[3](torch.ones(2, 48, dtype=model[3].weight.dtype)).square().sum().backward()
            else:
                batch(model, seed).backward()
            optimizer.step()
        return found

    check(fake, zeroed, told=False)


def test_a_gradient_set_to_zero_needs_no_memory(fake: Fake) -> None:
    def zeroed(model: nn.Module, optimizer: AdamW) -> None:
        train(model, optimizer, range(2))
        optimizer.zero_grad(set_to_none=False)

    *_, freed = on_the_device(fake, zeroed, torch.bfloat16)
    assert freed == 6


def test_gradients_set_to_zero_between_backward_and_step(fake: Fake) -> None:
    def zeroed(model: nn.Module, optimizer: AdamW) -> None:
        train(model, optimizer, range(2))
        optimizer.zero_grad()
        batch(model, 3).backward()
        grads_of(model)[0].zero_()
        torch.zero_(grads_of(model)[2])
        torch._foreach_zero_(grads_of(model)[3:5])
        optimizer.step()

    check(fake, zeroed)


# ---- clipped, scaled, edited by hand --------------------------------------------------------------------------------


def clipped(model: nn.Module) -> Tensor:
    return nn.utils.clip_grad_norm_(model.parameters(), 0.1)


CLIPS: dict[str, Callable[[Any], Any]] = {
    "norm": clipped,
    "norm, one by one": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=False),
    "value": lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.01),
    "total norm": lambda model: nn.utils.get_total_norm(grads_of(model)),
}


@pytest.mark.parametrize("clip", CLIPS)
def test_clipping_by_hand(fake: Fake, clip: str) -> None:
    check(fake, lambda model, optimizer: steps(model, optimizer, lambda: CLIPS[clip](model)))


def test_a_clip_that_changes_nothing_undoes_nothing(fake: Fake) -> None:
    def clip(model: nn.Module, optimizer: AdamW) -> Any:
        return steps(model, optimizer, lambda: nn.utils.clip_grad_norm_(model.parameters(), 1e9))

    expected = on_the_host(clip, torch.bfloat16)
    with taken_back() as taken:
        found, *_ = on_the_device(fake, clip, torch.bfloat16)
    assert found == expected
    assert not taken


def edit(model: nn.Module, how: str) -> None:
    for parameter in model.parameters():
        grad = parameter.grad
        assert grad is not None
        if how == "*=":
            parameter.grad *= 2
        elif how == "mul_":
            grad.mul_(2)
        elif how == "data":
            grad.data.mul_(2)
        elif how == "view":
            grad.view(-1)[:].mul_(2)
        elif how == "replaced":
            parameter.grad = grad * 2
        elif how == "copy_":
            grad.copy_(grad.clone() * 2)
        elif how == "numpy":
            grad.numpy()[...] *= 2
    if how == "foreach":
        torch._foreach_mul_(grads_of(model), 2)


HOWS = ["*=", "mul_", "view", "replaced", "copy_", "foreach"]


@pytest.mark.parametrize("how", HOWS)
def test_edits(fake: Fake, how: str) -> None:
    check(fake, lambda model, optimizer: steps(model, optimizer, lambda: edit(model, how)))


@pytest.mark.parametrize("how", ["data", "numpy"])
def test_edits_that_leave_no_trace(fake: Fake, how: str) -> None:
    """On the host they are not noticed; a gradient that was brought back is compared."""
    expected = on_the_host(lambda model, optimizer: steps(model, optimizer, lambda: edit(model, "*=")), torch.float32)
    found, *_ = on_the_device(
        fake, lambda model, optimizer: steps(model, optimizer, lambda: edit(model, how)), torch.float32
    )
    assert found == expected


def test_gradients_that_are_taken_away_or_replaced(fake: Fake) -> None:
    def replaced(model: nn.Module, optimizer: AdamW) -> None:
        parameters = list(model.parameters())
        for seed in range(3):
            optimizer.zero_grad()
            batch(model, seed).backward()
            parameters[0].grad = None
            parameters[1].grad = torch.ones_like(parameters[1])
            optimizer.step()

    check(fake, replaced, told=False)


# ---- GradScaler -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_hand", [False, True], ids=["step", "unscale_"])
@pytest.mark.parametrize("clip", [False, True], ids=["", "clip"])
def test_scaler(fake: Fake, by_hand: bool, clip: bool) -> None:
    if clip and not by_hand:
        pytest.skip("to clip, gradients are unscaled before")

    def scaled(model: nn.Module, optimizer: AdamW) -> list[float]:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        scales = []
        for seed in range(6):
            optimizer.zero_grad()
            for micro in range(1 + (seed == 4)):
                loss = batch(model, 10 * seed + micro, scale=float("inf") if seed == 2 else 1.0)
                scaler.scale(loss).backward()
            if by_hand:
                scaler.unscale_(optimizer)
            if clip:
                clipped(model)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return scales

    check(fake, scaled, torch.float32)


# ---- looked at ------------------------------------------------------------------------------------------------------


def _saved(grad: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(grad, file)
    file.seek(0)
    loaded: Tensor = torch.load(file)
    return loaded


def _with_inference(grad: Tensor) -> Tensor:
    with torch.inference_mode():
        return grad.norm().clone()


LOOKS: dict[str, Callable[[Tensor], Any]] = {
    "norm": Tensor.norm,
    "list": Tensor.tolist,
    "numpy": lambda grad: torch.from_numpy(grad.numpy().copy()),
    "item": lambda grad: grad.sum().item(),
    "data": lambda grad: grad.data.clone(),
    "detach": lambda grad: grad.detach().abs().max(),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda grad: pickle.loads(pickle.dumps(grad)),
    "save": _saved,
    "storage": lambda grad: grad.untyped_storage().nbytes(),
    "address": lambda grad: grad.data_ptr() == grad.data_ptr() != 0,
    "dlpack": lambda grad: torch.from_dlpack(grad).clone(),
    "format": lambda grad: f"{grad.flatten()[0]:.4f}",
    "index": lambda grad: grad.flatten()[1:3],
    "compare": lambda grad: bool((grad == grad).all()),
    "out": lambda grad: torch.mul(grad, 2, out=torch.empty_like(grad)),
    "like": lambda grad: torch.zeros_like(grad),
    "to": lambda grad: grad.to(torch.float64),
    "cpu": lambda grad: grad.cpu().clone(),
    "inference": _with_inference,
    "list of": lambda grad: torch.stack([grad, grad]),
    "iterate": lambda grad: [row.sum() for row in grad],
    "contiguous": lambda grad: grad.contiguous().clone(),
}


@pytest.mark.parametrize("look", LOOKS)
def test_reading_before_and_after_step(fake: Fake, look: str) -> None:
    def read(model: nn.Module, optimizer: AdamW) -> Any:
        found = []
        for seed in range(3):
            optimizer.zero_grad()
            batch(model, seed).backward()
            if seed:
                found.append(seen([LOOKS[look](grad) for grad in grads_of(model)]))
            optimizer.step()
            if seed != 1:
                found.append(seen([LOOKS[look](grad) for grad in grads_of(model)]))
        optimizer.zero_grad()
        optimizer.step()
        return found

    with taken_back() as taken:
        check(fake, read, torch.float32)
    assert not taken


def test_what_needs_no_elements(fake: Fake) -> None:
    """Nothing is brought back, and nothing is told."""

    def form(model: nn.Module, optimizer: AdamW) -> list[Any]:
        found = []
        for seed in range(3):
            optimizer.zero_grad()
            batch(model, seed).backward()
            for grad in grads_of(model):
                found.append([grad.shape, grad.dtype, grad.device, grad.stride(), grad.numel(), grad.is_sparse])
                found.append([grad.requires_grad, grad.grad_fn, grad.size(0), grad.dim(), grad.is_contiguous()])
                found.append([grad.layout, grad.element_size(), len(grad), grad.nbytes, grad.is_floating_point()])
                grad.requires_grad_(False)
            optimizer.step()
        return found

    check(fake, form, told=False)
    *_, freed = on_the_device(fake, form, torch.bfloat16)
    assert freed == 6


def test_its_words(fake: Fake) -> None:
    def words(model: nn.Module, optimizer: AdamW) -> None:
        batch(model, 0).backward()
        parameter = next(model.parameters())
        assert isinstance(parameter.grad, PackedGradient)
        assert "packed and freed" in repr(parameter.grad)
        assert "tensor([[" in f"{parameter.grad}"
        assert "tensor([[" in repr(parameter.grad)
        optimizer.step()

    on_the_device(fake, words, torch.float32)


# ---- between steps --------------------------------------------------------------------------------------------------


def test_a_step_that_is_given_up(fake: Fake) -> None:
    def given_up(model: nn.Module, optimizer: AdamW) -> None:
        for seed in range(4):
            optimizer.zero_grad()
            batch(model, seed).backward()
            clipped(model)
            if seed % 2:
                batch(model, 10 + seed).backward()
                optimizer.step()

    check(fake, given_up)


def test_state_saved_and_loaded_between_backward_and_step(fake: Fake) -> None:
    def saved(model: nn.Module, optimizer: AdamW) -> None:
        train(model, optimizer, range(2))
        fake.synchronize()
        state = copy.deepcopy(optimizer.state_dict())
        for seed in (2, 3):
            optimizer.zero_grad()
            batch(model, seed).backward()
            if seed == 2:
                optimizer.state_dict()
            else:
                fake.synchronize()
                optimizer.load_state_dict(state)
            optimizer.step()
            batch(model, 20 + seed).backward()
            optimizer.step()

    check(fake, saved)


def test_a_group_that_is_added(fake: Fake) -> None:
    """Its buckets are attached beside those whose gradients are still shown."""

    def grown(model: nn.Sequential, optimizer: AdamW) -> None:
        more = nn.Linear(4, 4, bias=False).to(torch.bfloat16)
        with torch.no_grad():
            more.weight.fill_(0.5)
        batch(model, 0).backward()
        optimizer.step()
        optimizer.add_param_group({"params": [more.weight]})
        for _ in range(2):
            fake.synchronize()
            more(model(torch.ones(2, 16, dtype=torch.bfloat16))).square().sum().backward()
            optimizer.step()

    check(fake, grown)
