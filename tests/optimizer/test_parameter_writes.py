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
from tests.support.adamw_training import Optimizer, batch, check_scenario, model_of, train, weights
from tests.support.compatibility import compat


def write_an_element(model: nn.Module) -> None:
    with torch.no_grad():
        next(model.parameters()).view(-1)[7] = 0.5


def load_weights(model: nn.Module) -> None:
    other = model_of(next(model.parameters()).dtype, seed=5)
    model.load_state_dict(other.state_dict())


def new_storage(model: nn.Module) -> None:
    for param in model.parameters():
        param.data = param.detach() * 0.5


def scale_all_at_once(model: nn.Module) -> None:
    with torch.no_grad():
        torch._foreach_mul_(list(model.parameters()), 0.5)


@compat("parameters written by the user (load_state_dict, clamp, re-initialization)", "single", "stand_in")
@pytest.mark.parametrize("in_flight", [False, True], ids=["between steps", "between backward and step"])
@pytest.mark.parametrize("write", [scale_all_at_once, write_an_element, load_weights, new_storage])
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


@pytest.mark.filterwarnings("ignore:superoffload. .* changed without autograd's version counters")
@pytest.mark.parametrize("seen", [True, False])
def test_a_write_in_the_middle_of_backward(seen: bool) -> None:
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
                (params[4] if seen else params[4].data).mul_(0.5)

        handle = params[1].register_post_accumulate_grad_hook(write)
        batch(model, 8).backward()
        handle.remove()
        assert speculated in ([], [0], [2 * 2 + 1])
        optimizer.step()
        train(model, optimizer, range(2))

    assert check_scenario(scenario, bucket_numel=1024)["buckets_undone"] == 1


@pytest.mark.parametrize(("dtype", "in_flight"), [(torch.bfloat16, True), (torch.float16, False)])
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


def test_the_other_zero_and_a_nan_are_what_the_user_wrote() -> None:
    param = nn.Parameter(torch.zeros(3))
    with AdamW([param], lr=0.0) as optimizer:
        with torch.no_grad():
            param.neg_()[1] = math.nan
        param.grad = torch.zeros(3)
        optimizer.step()
        assert param.isnan().tolist() == [False, True, False]
        assert torch.signbit(param)[::2].all()


def test_refresh_masters_tells_at_once_of_writes_that_leave_no_trace() -> None:
    """Through .data, a version counter of its own; then nothing is left to be noticed, and to be warned of."""

    def scenario(model: nn.Module, optimizer: Optimizer) -> None:
        train(model, optimizer, range(2))
        optimizer.zero_grad()
        batch(model, 3).backward()
        for param in model.parameters():
            param.data.mul_(0.9)
        optimizer.refresh_masters()
        if isinstance(optimizer, AdamW):
            assert all(torch.equal(optimizer.state[param]["master"], param) for param in model.parameters())
        optimizer.step()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert check_scenario(scenario)["buckets_undone"] == 1


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
    with AdamW(model.parameters(), threads=1) as optimizer:
        with pytest.raises(ValueError, match="with/without names"):
            optimizer.add_param_group({"params": list(more.named_parameters())})
        train(model, optimizer, range(2))
        assert optimizer.stats()["steps"] == 2 and len(optimizer.param_groups) == 1
