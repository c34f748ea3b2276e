"""Split masters follow the parameters that users write; what was not written keeps the bits of its remainder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from superoffload import AdamW
from superoffload.engine import layout
from superoffload.engine.speculation_schedule import Schedule
from superoffload.errors import ArgumentError, HostMemoryError
from tests.support.adamw_training import batch, model_of, train
from tests.support.host_link import over_host_link
from tests.support.split_masters import (
    SPLIT,
    TIES,
    assert_split,
    away,
    bits_of,
    masters_of,
    same_bits,
    same_states,
    shard_of,
    state_of,
    tied,
)

pytestmark = pytest.mark.filterwarnings("ignore:superoffload. .* changed without autograd's version counters")


def assign(param: Tensor, values: Tensor) -> None:
    with torch.no_grad():
        param.copy_(values)


def through_data(param: Tensor, values: Tensor) -> None:
    param.data.copy_(values)


def new_storage(param: Tensor, values: Tensor) -> None:
    param.data = values.to(param.dtype)


def load(param: Tensor, values: Tensor) -> None:
    holder = nn.ParameterList([param])
    holder.load_state_dict({"0": values})


Write = Callable[[Tensor, Tensor], None]


@contextmanager
def settled_late() -> Iterator[None]:
    with over_host_link(), mock.patch.object(Schedule, "share_to_publish", lambda *_: 1.0):
        yield


@pytest.mark.parametrize(
    ("write", "when"),
    [
        (assign, "between steps"),
        (through_data, "between backward and step"),
        (new_storage, "between steps"),
        (new_storage, "between backward and step"),
        (load, "between backward and step"),
        (assign, "behind a publish"),
        (through_data, "behind a publish"),
    ],
)
def test_what_was_not_written_keeps_its_master(write: Write, when: str) -> None:
    model = model_of(torch.bfloat16)
    mode, late = ("never", settled_late()) if when == "behind a publish" else ("always", nullcontext())
    with late, AdamW(model.parameters(), speculation=mode, lr=1e-2, **SPLIT) as optimizer:
        train(model, optimizer, range(4))
        assert (optimizer.stats()["buckets_two_phase"] > 0) == (mode == "never")
        param, *_ = model.parameters()
        value = param.detach().clone()
        if when != "behind a publish":  # else nothing has settled when it is written
            masters = optimizer.state[param]["master"]
            assert shard_of(optimizer, param).master.any()
        optimizer.zero_grad()
        optimizer.param_groups[0].update(lr=0.0)  # steps that leave masters as they are
        if when == "between backward and step":
            batch(model, 5).backward()
        written = torch.zeros(param.shape, dtype=torch.bool)
        written[::2] = True
        write(param, torch.where(written, 1 - 2 * value, value))
        if when == "behind a publish":
            optimizer.refresh_masters()
            found = optimizer.state[param]["master"]
            assert same_bits(found[written], param.detach()[written].float())
            assert not same_bits(found, param.detach().float()) and same_bits(param.detach(), away(found))
            return
        expected = torch.where(written, param.detach().float(), masters)
        if when == "between steps":
            batch(model, 5).backward()
        optimizer.step()
        assert same_bits(optimizer.state[param]["master"], expected)
        assert_split(optimizer)


@pytest.mark.parametrize("refreshed", [False, True])
def test_zeros_and_what_is_no_number(refreshed: bool) -> None:
    """The other zero is what its user wrote. NaN of any pattern becomes that of the kernels."""
    param = nn.Parameter(torch.zeros(6).bfloat16())
    with AdamW([param], lr=0.0, **SPLIT) as optimizer:
        words = torch.tensor([0x0000, -0x8000, 0x7FC0, 0x7FC1, -0x0040, 0x7F80], dtype=torch.int16)
        through_data(param, words.view(torch.bfloat16))
        expected = [0x0000, 0x8000, 0x7FC0, 0x7FC0, 0x7FC0, 0x7F80]
        if refreshed:
            optimizer.refresh_masters()
            assert bits_of(optimizer.state[param]["master"]).tolist() == [word << 16 for word in expected]
        param.grad = torch.zeros(6).bfloat16()
        optimizer.step()
        assert bits_of(param).tolist() == expected
        assert bits_of(optimizer.state[param]["master"]).tolist() == [word << 16 for word in expected]


# ---- ties -----------------------------------------------------------------------------------------------------------


def neighbours(masters: Tensor) -> tuple[Tensor, Tensor]:
    """Those of ties, to which they are rounded: to even, and away from zero."""
    return masters.bfloat16(), away(masters)


@pytest.mark.parametrize("master_dtype", ["split", "fp32"])
@pytest.mark.parametrize("refreshed", [False, True])
def test_at_a_tie_both_neighbours_keep_the_master(refreshed: bool, master_dtype: str) -> None:
    """A checkpoint of whole masters has the even one, one of split masters the one away from zero."""
    masters = masters_of(TIES, 64)
    param = nn.Parameter(masters.bfloat16())
    with AdamW([param], lr=0.0, master_dtype=master_dtype) as optimizer:
        optimizer.load_masters([masters])
        even, other = neighbours(masters)
        assert (bits_of(even) != bits_of(other)).sum() == 32
        for published in (other, even):
            assign(param, published)
            if refreshed:
                optimizer.refresh_masters()
                assert same_bits(param.detach(), published)
            else:
                param.grad = torch.zeros_like(param)
                optimizer.step()
                assert same_bits(param.detach(), other if master_dtype == "split" else even)
            assert same_bits(optimizer.state[param]["master"], masters)
        farther = (bits_of(other) + 1).to(torch.int32).to(torch.int16).view(torch.bfloat16)
        assign(param, farther)
        optimizer.refresh_masters()
        assert same_bits(optimizer.state[param]["master"], farther.float())


def test_masters_that_are_loaded_keep_their_bits() -> None:
    """Also those that lie between two parameters; the first step publishes what they are rounded to."""
    model = model_of(torch.bfloat16)
    with AdamW(model.parameters(), model=model, lr=0.0, **SPLIT) as optimizer:
        masters = tied(optimizer, model)
        before = optimizer.state_digests()
        for off in (2.0**-7, -(2.0**-7)):
            wrong = [masters[0].clone(), *masters[1:]]
            wrong[0].view(-1)[5] += off
            with pytest.raises(ArgumentError, match=r"is not their rounding in 1 of \d+ elements"):
                optimizer.load_masters(wrong)
        assert optimizer.state_digests() == before
        for param, master in zip(model.parameters(), masters, strict=True):
            assert same_bits(optimizer.state[param]["master"], master)
            assert same_bits(param.detach(), master.bfloat16()), "only a step changes it"
            param.grad = torch.zeros_like(param)
        optimizer.step()
        for param, master in zip(model.parameters(), masters, strict=True):
            assert same_bits(optimizer.state[param]["master"], master)
        assert_split(optimizer)


# ---- refused memory -------------------------------------------------------------------------------------------------


def test_a_load_while_there_are_no_buckets_writes_no_parameter() -> None:
    """The halves of a new group are read in its parameters until there is memory for a shadow."""
    found = []
    for refused in (False, True):
        model = model_of(torch.bfloat16)
        first, *rest = model.parameters()
        with AdamW([first], threads=1, lr=1e-2, speculation="always", **SPLIT) as optimizer:
            room = mock.Mock(return_value=1 << 60 if refused else 1 << 16)
            with mock.patch.object(layout, "reserved_bytes", room):
                with pytest.raises(HostMemoryError) if refused else nullcontext():
                    optimizer.add_param_group({"params": rest})
                state = optimizer.state_dict()
                for values in state["state"].values():
                    values["master"] += 1.0
                before = [p.detach().clone() for p in model.parameters()]
                optimizer.load_state_dict(state)
                assert all(map(torch.equal, before, model.parameters()))
                loaded = state_of(optimizer)
                assert all(
                    same_bits(now["master"], values["master"])
                    for now, values in zip(loaded, state["state"].values(), strict=True)
                )
                with torch.no_grad():
                    for param in model.parameters():
                        param.add_(1.0)
            train(model, optimizer, range(2))
            assert_split(optimizer)
            found.append(state_of(optimizer))
    assert same_states(*found)
