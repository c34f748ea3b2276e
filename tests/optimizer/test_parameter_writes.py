"""Users write to parameters: between steps, between backward and step(), in place, by new storage. It is kept."""

from __future__ import annotations

import copy
import io
import math
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from superoffload import AdamW
from superoffload.errors import StateError
from tests.support.adamw_training import DTYPES, Optimizer, batch, check_scenario, model_of, train, weights
from tests.support.compatibility import compat


def copy_values(model: nn.Module) -> None:
    first, *_ = model.parameters()
    with torch.no_grad():
        first.copy_(torch.linspace(-1, 1, first.numel()).view(first.shape))


def clamp_values(model: nn.Module) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.clamp_(-0.05, 0.05)


def write_an_element(model: nn.Module) -> None:
    with torch.no_grad():
        next(model.parameters()).view(-1)[7] = 0.5


def load_weights(model: nn.Module) -> None:
    other = model_of(next(model.parameters()).dtype, seed=5)
    model.load_state_dict(other.state_dict())


def new_storage(model: nn.Module) -> None:
    for param in model.parameters():
        param.data = param.detach() * 0.5


def initialize_again(model: nn.Module) -> None:
    torch.manual_seed(77)
    for param in model.parameters():
        if param.dim() > 1:
            nn.init.normal_(param, std=0.1)


def scale_all_at_once(model: nn.Module) -> None:
    with torch.no_grad():
        torch._foreach_mul_(list(model.parameters()), 0.5)


WRITES = [scale_all_at_once, copy_values, clamp_values, write_an_element, load_weights, new_storage, initialize_again]


@compat("parameters written by the user (load_state_dict, clamp, re-initialization)", "single", "stand_in")
@pytest.mark.parametrize("in_flight", [False, True], ids=["between steps", "between backward and step"])
@pytest.mark.parametrize("write", WRITES)
def test_writes_are_kept(write: Callable[[nn.Module], None], in_flight: bool) -> None:
    def scenario(model: nn.Module, optimizer: Optimizer) -> None:
        train(model, optimizer, range(3))
        optimizer.zero_grad()
        if not in_flight:
            write(model)
        batch(model, 8).backward()
        if in_flight:
            write(model)
        optimizer.step()
        train(model, optimizer, range(2))

    stats = check_scenario(scenario, bucket_numel=1024)
    assert (stats["buckets_undone"] > 0) == in_flight


def test_a_write_in_the_middle_of_backward() -> None:
    """From a hook, when one bucket has been speculated and the other has not; to what backward has passed already."""

    def scenario(model: nn.Module, optimizer: Optimizer) -> None:
        train(model, optimizer, range(2))
        optimizer.zero_grad()
        params = list(model.parameters())
        speculated = []

        def write(_: Tensor) -> None:
            if isinstance(optimizer, AdamW):
                speculated.append(optimizer.stats()["buckets_speculated"])
            with torch.no_grad():
                params[4].mul_(0.5)

        handle = params[1].register_post_accumulate_grad_hook(write)
        batch(model, 8).backward()
        handle.remove()
        assert speculated in ([], [0], [2 * 2 + 1])
        optimizer.step()
        train(model, optimizer, range(2))

    assert check_scenario(scenario, bucket_numel=1024)["buckets_undone"] == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("in_flight", [False, True])
def test_the_masters_of_elements_that_were_not_written_are_kept(dtype: torch.dtype, in_flight: bool) -> None:
    model = model_of(dtype)
    with AdamW(model.parameters(), speculation="always", lr=1e-2) as optimizer:
        train(model, optimizer, range(4))
        param, *_ = model.parameters()
        masters = optimizer.state[param]["master"].clone()
        assert not torch.equal(masters, param.float()), "more precise than what is published"
        optimizer.param_groups[0].update(lr=0.0)  # a step that leaves masters as they are
        if in_flight:
            batch(model, 5).backward()
        written = torch.zeros(param.shape, dtype=torch.bool)
        written[::2] = True
        with torch.no_grad():
            param[::2] = -param[::2] + 1
        expected = torch.where(written, param.float(), masters)
        if not in_flight:
            batch(model, 5).backward()
        optimizer.step()
        assert torch.equal(optimizer.state[param]["master"], expected)
        assert torch.equal(param, expected.to(dtype))


def test_a_zero_whose_sign_was_written() -> None:
    param = nn.Parameter(torch.zeros(4))
    with AdamW([param], lr=0.0) as optimizer:
        with torch.no_grad():
            param.neg_()
        param.grad = torch.ones(4)
        optimizer.step()
        assert torch.signbit(param).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_refresh_masters_tells_at_once_of_writes_that_leave_no_trace(dtype: torch.dtype) -> None:
    """Through .data, a version counter of its own; then nothing is left to be noticed, and to be warned of."""
    param = nn.Parameter(torch.ones(3, dtype=dtype))
    with warnings.catch_warnings(), AdamW([param], lr=0.0, speculation="always") as optimizer:
        warnings.simplefilter("error")
        param.sum().backward()
        param.data.mul_(2)
        optimizer.refresh_masters()
        assert torch.equal(optimizer.state[param]["master"], torch.full((3,), 2.0))
        optimizer.step()
        assert torch.equal(param, torch.full((3,), 2.0, dtype=dtype))


def test_refresh_masters_takes_back_speculation_and_keeps_gradients() -> None:
    def scenario(model: nn.Module, optimizer: Optimizer) -> None:
        train(model, optimizer, range(2))
        optimizer.zero_grad()
        batch(model, 3).backward()
        for param in model.parameters():
            param.data.mul_(0.9)
        optimizer.refresh_masters()
        optimizer.step()

    assert check_scenario(scenario)["buckets_undone"] == 1


def test_an_averaged_copy_swapped_in_and_out() -> None:
    def scenario(model: nn.Module, optimizer: Optimizer) -> None:
        train(model, optimizer, range(3))
        backup = [p.detach().clone() for p in model.parameters()]
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(0.5)
        batch(model, 1)
        with torch.no_grad():
            for param, value in zip(model.parameters(), backup, strict=True):
                param.copy_(value)
        train(model, optimizer, range(3))

    check_scenario(scenario)


def test_masters_survive_a_swap_in_low_precision() -> None:
    models = [model_of(torch.bfloat16) for _ in range(2)]
    digests = []
    for model, swaps in zip(models, (True, False), strict=True):
        with AdamW(model.parameters(), speculation="always", lr=1e-2) as optimizer:
            train(model, optimizer, range(3))
            if swaps:
                backup = [p.detach().clone() for p in model.parameters()]
                with torch.no_grad():
                    for param in model.parameters():
                        param.zero_()
                    for param, value in zip(model.parameters(), backup, strict=True):
                        param.copy_(value)
            train(model, optimizer, range(3))
            digests.append(optimizer.state_digests())
    assert digests[0] == digests[1]


def converted(model: nn.Module) -> None:
    model.to(torch.bfloat16)


def resized(model: nn.Module) -> None:
    for param in model.parameters():
        param.data = torch.zeros(5)


@pytest.mark.parametrize("change", [converted, resized])
def test_a_converted_or_resized_parameter_is_refused(change: Callable[[nn.Module], None]) -> None:
    model = model_of()
    with AdamW(model.parameters(), speculation="always") as optimizer:
        train(model, optimizer, range(2))
        before = [optimizer.state[p]["master"].clone() for p in model.parameters()]
        change(model)
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
        with pytest.raises(StateError, match="make a new optimizer after converting or resizing"):
            optimizer.step()
        for param, master in zip(model.parameters(), before, strict=True):
            assert torch.equal(optimizer.state[param]["master"], master)


def test_a_parameter_written_with_nan_is_what_the_user_wrote() -> None:
    param = nn.Parameter(torch.ones(3))
    with AdamW([param]) as optimizer:
        with torch.no_grad():
            param[1] = math.nan
        param.grad = torch.zeros(3)
        optimizer.step()
        assert param.isnan().tolist() == [False, True, False]


def test_models_with_an_optimizer_can_be_copied_and_saved() -> None:
    model = model_of()
    with AdamW(model.parameters(), speculation="always") as optimizer:
        batch(model, 0).backward()
        copied = copy.deepcopy(model)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        optimizer.step()
        for other in (copied, loaded):
            before = weights(other)
            batch(other, 1).backward()  # an unrelated model
            assert torch.equal(weights(other), before)
        assert optimizer.stats()["buckets_speculated"] == 1


def test_a_group_that_torch_refuses_leaves_the_optimizer_usable() -> None:
    model, more = model_of(), nn.Linear(3, 2)
    optimizer = AdamW(model.parameters(), threads=1)
    with pytest.raises(ValueError, match="with/without names"):
        optimizer.add_param_group({"params": list(more.named_parameters())})
    train(model, optimizer, range(2))
    assert optimizer.stats()["steps"] == 2 and len(optimizer.param_groups) == 1
    optimizer.close()
