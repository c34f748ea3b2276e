"""Dense parameters that are not contiguous (channels_last, transposed) get the bits of contiguous ones everywhere."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from superoffload import AdamW, CPUAdamW
from superoffload.engine.schedule import MODES
from superoffload.errors import ArgumentError, RankError, StateError
from tests.support.rank_processes import on_ranks

LAST = torch.channels_last


def reorder(model: Any) -> None:
    """``Any``: torch's annotations know ``memory_format`` of tensors alone."""
    model.to(memory_format=LAST)


class ConvNet(nn.Module):
    """Convolutions, of which one has a single position; a transposed weight."""

    def __init__(self, last: bool, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 6, 1)
        self.norm = nn.BatchNorm2d(3)
        self.mixed = nn.Parameter(torch.randn(6, 5))
        self.to(dtype)
        if last:
            reorder(self)
            self.mixed = nn.Parameter(self.mixed.detach().t().contiguous().t())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(torch.tanh(self.first(self.norm(x)))).square().mean((2, 3)) @ self.mixed
        return out


def images(step: int) -> Tensor:
    return torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(step))


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(images(step)).square().mean().backward()
        optimizer.step()


def values(model: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def set_gradients(params: Sequence[Tensor], step: int, *, strides: str = "own") -> None:
    """The same values in the order of memory of the parameter, or of a contiguous one, or another one."""
    generator = torch.Generator().manual_seed(100 + step)
    for param in params:
        grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        if strides == "own":
            grad = torch.empty_like(param.detach()).copy_(grad)
        elif strides == "another":
            grad = grad.permute(*reversed(range(grad.dim()))).contiguous().permute(*reversed(range(grad.dim())))
        param.grad = grad


def same(ones: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return all(map(torch.equal, ones, others))


def test_others_are_refused() -> None:
    expanded, with_gaps = torch.zeros(3, 1).expand(3, 4), torch.zeros(4, 6)[:, ::2]
    overlapping = torch.zeros(8).as_strided((3, 3), (1, 2))
    a_part = torch.zeros(2, 8, 3, 3).to(memory_format=LAST)[:, :4]
    for tensor in (expanded, with_gaps, overlapping, a_part):
        for made in (AdamW, CPUAdamW):
            with pytest.raises(ArgumentError, match=r"expected elements that fill a run of memory.*\.contiguous\(\)"):
                made([nn.Parameter(tensor)])


@pytest.mark.over_stand_in
@pytest.mark.parametrize(
    ("strides", "dtype", "state_dtype"),
    [("own", torch.float32, "bf16"), ("contiguous", torch.bfloat16, "fp32"), ("another", torch.float16, "bf16")],
)
def test_the_bits_of_contiguous_ones(strides: str, dtype: torch.dtype, state_dtype: str) -> None:
    """Without clipping: the norm's blocks are runs of memory, so its last bits may differ."""
    expected: list[Any] = []
    for mode in MODES:
        for last in (False, True):
            model = ConvNet(last, dtype)
            options: dict[str, Any] = {"state_dtype": state_dtype, "threads": 2, "bucket_numel": 1024}
            with AdamW(model.parameters(), speculation=mode, **options) as optimizer:
                for step in range(4):
                    optimizer.zero_grad()
                    set_gradients(list(model.parameters()), step, strides=strides)
                    optimizer.step()
                state = [optimizer.state[param][name] for param in model.parameters() for name in STATE]
                everything = [*values(model), *(tensor.clone() for tensor in state)]
                shown = optimizer.state[model.mixed]["master"]
                assert shown.stride() == model.mixed.stride() and shown.shape == model.mixed.shape
                expected = expected or everything
                assert same(everything, expected)


STATE = ("exp_avg", "exp_avg_sq", "master")


@pytest.mark.parametrize("first", [True, False])
def test_state_goes_both_ways(first: bool) -> None:
    """By state_dict, also into torch's own. By checkpoints: tests/checkpoints/test_saving_split_master.py."""
    model, other, stock_model = ConvNet(first), ConvNet(not first), ConvNet(not first)
    stock: Any = torch.optim.AdamW(stock_model.parameters())
    with AdamW(model.parameters()) as optimizer, AdamW(other.parameters()) as resumed:
        for step in range(3):
            set_gradients(list(model.parameters()), step)
            optimizer.step()
        which: Any
        for which, its in ((other, resumed), (stock_model, stock)):
            which.load_state_dict(model.state_dict())
            its.load_state_dict(optimizer.state_dict())
        for which, its in ((model, optimizer), (other, resumed), (stock_model, stock)):
            set_gradients(list(which.parameters()), 9)
            its.step()
        assert same(values(model), values(other))
        masters = ([its.state[param]["master"] for param in its.state] for its in (optimizer, resumed))
        assert same(*masters)
    torch.testing.assert_close(values(stock_model), values(model), rtol=1e-6, atol=1e-7)


def test_a_model_that_changes_its_order_is_refused() -> None:
    model = ConvNet(False)
    with AdamW(model.parameters(), speculation="always") as optimizer:
        train(model, optimizer, range(2))
        before = optimizer.state[model.first.weight]["master"].clone()
        reorder(model)
        optimizer.zero_grad()
        with pytest.raises(StateError, match=r"in another order in memory now.*before the optimizer is made"):
            train(model, optimizer, range(1))
        assert torch.equal(optimizer.state[model.first.weight]["master"], before)


def test_the_kernels_alone() -> None:
    """Also where the order changes between steps, in a copy, and with state that was loaded."""
    dtype, state_dtype = torch.bfloat16, "bf16"
    seen = []
    for last in (False, True):
        model = ConvNet(last, dtype)
        optimizer = CPUAdamW(model.parameters(), threads=2, state_dtype=state_dtype)
        for step in range(6):
            set_gradients(list(model.parameters()), step, strides=("own", "contiguous", "another")[step % 3])
            optimizer.step()
            if step == 2 and not last:
                reorder(model)
            if step == 3:
                saved = copy.deepcopy(optimizer.state_dict())
                optimizer.close()
                model = copy.deepcopy(model)
                optimizer = CPUAdamW(model.parameters(), threads=2, state_dtype=state_dtype)
                optimizer.load_state_dict(saved)
        state = [tensor for p in model.parameters() for tensor in optimizer.state[p].values()]
        seen.append([*values(model), *state])
        optimizer.close()
    assert same(*seen)


def ddp_run(told: bool, view: bool) -> dict[str, str]:
    """``told``: gradients are taken from DDP's buckets, in the order in which it has them there."""
    inner = ConvNet(True)
    model = DistributedDataParallel(inner, bucket_cap_mb=0.001, gradient_as_bucket_view=view)
    params = list(model.parameters())
    with AdamW(params, model=model if told else None, threads=1, bucket_numel=1024, rank_timeout=20.0) as optimizer:
        train(model, optimizer, range(4))
        return optimizer.state_digests()


def refused(replicated: str, last: bool) -> str:
    try:
        AdamW(ConvNet(last).parameters(), replicated=replicated, threads=1, rank_timeout=20.0).close()
    except (ArgumentError, RankError) as error:
        return str(error)
    return ""


def over_ranks() -> list[Any]:
    told = [ddp_run(told, view) for told, view in ((False, False), (True, False), (True, True))]
    rank = torch.distributed.get_rank()
    return [told[0] == told[1] == told[2], refused("shard", True), refused("replicate", rank == 0)]


def test_over_ranks() -> None:
    for agree, spread, different in on_ranks(2, over_ranks):
        assert agree
        assert "replicated='shard' cuts parameters in the order of their dimensions" in spread
        assert "were made differently" in different and "dimensions in memory" in different
