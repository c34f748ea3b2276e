"""``delivery="on_demand"`` and code that was compiled, exported, traced or scripted before or after the optimizer."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.utils import counters

from superoffload import AdamW
from superoffload.errors import ArgumentError

INPUT = torch.linspace(-1, 1, 4 * 8).view(4, 8)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.down = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down(torch.tanh(self.up(x)))
        return x + down


def model_of(blocks: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(blocks)))


def offloaded(model: nn.Module) -> AdamW:
    return AdamW(model.parameters(), lr=1e-1, delivery="on_demand", module=model, threads=1)


def compiled(module: Any, **options: Any) -> Any:
    return torch.compile(module, backend="eager", **options)


def step(model: Any, optimizer: AdamW) -> None:
    optimizer.zero_grad()
    model(INPUT).square().sum().backward()
    optimizer.step()


@pytest.fixture(autouse=True)
def _own_compiler() -> Iterator[None]:
    """What was compiled and how stays in the test."""
    torch._dynamo.reset()
    counters.clear()
    with torch._dynamo.config.patch(skip_nnmodule_hook_guards=True):
        yield
    torch._dynamo.reset()


def another(model: nn.Module) -> Any:
    """A teacher of the same class, whose code torch.compile would use again."""
    compiled(model_of())(INPUT)
    return compiled(model)


def whole_of_wrapped_blocks(model: Any) -> Any:
    """Dynamo calls what is in the wrappers, not them."""
    for i, block in enumerate(model):
        model[i] = compiled(block)
    return compiled(model)


def a_part_of_a_compiled_one(model: Any) -> Any:
    """Calls the block, which waits for its parts, in the first half, and its parts in the second."""
    model.compile(backend="eager")
    model[0].compile(backend="eager")
    model[1].compile(backend="eager")
    second = compiled(lambda x: x + model[1].down(torch.tanh(model[1].up(x))))
    return lambda x: second(model[0](x))


@pytest.mark.parametrize(
    ("way", "when"),
    [
        (compiled, "before"),
        (another, "after"),
        (whole_of_wrapped_blocks, "before"),
        (a_part_of_a_compiled_one, "before"),
    ],
)
def test_compiled_code_reads_what_has_arrived(way: Callable[[nn.Module], Any], when: str) -> None:
    model, plain = model_of(), model_of()
    if when == "before":
        run = way(model)
        with torch.no_grad():
            run(INPUT)
    with offloaded(model) as optimizer, AdamW(plain.parameters(), lr=1e-1, threads=1) as eager:
        if when == "after":
            run = way(model)
        for _ in range(4):
            step(run, optimizer)
            step(plain, eager)
            with torch.no_grad():
                assert torch.equal(run(INPUT), plain(INPUT))


REASON = "compile the module before|Script the module before you make"
if "reason" not in inspect.signature(torch.compiler.disable).parameters:  # as in torch 2.6
    REASON += "|_BeforeForward.wait"


@pytest.mark.parametrize(
    "way",
    [
        lambda model: compiled(model, fullgraph=True)(INPUT),
        lambda model: torch.export.export(model, (INPUT,), strict=True),
        torch.jit.script,
        lambda model: torch.jit.script(pickle.loads(pickle.dumps(model))),
    ],
)
def test_whole_graphs_and_scripts_that_are_made_later_are_refused_with_the_reason(
    way: Callable[[nn.Module], object],
) -> None:
    model = model_of()
    with offloaded(model) as optimizer:
        step(model, optimizer)
        with pytest.raises(Exception, match=REASON):
            way(model)
        step(model, optimizer)
    torch.jit.script(model)


@pytest.mark.parametrize("way", ["trace", "export"])
def test_tracing_delivers_and_warns_of_later_calls(way: str) -> None:
    model = model_of()
    with offloaded(model) as optimizer:
        step(model, optimizer)
        with pytest.warns(RuntimeWarning, match=r"does not wait for parameters.* call optimizer\.synchronize\(\)"):
            if way == "trace":
                traced = torch.jit.trace(model, INPUT)
            else:
                traced = torch.export.export(model, (INPUT,), strict=False).module()
        assert torch.equal(traced(INPUT), model(INPUT))


def test_modules_that_run_no_hooks_are_refused() -> None:
    whole: Any = torch.jit.script(model_of())
    part: Any = model_of()
    part[1] = torch.jit.trace(part[1], INPUT)
    for model, name in ((whole, r"\S*"), (part, r"Sequential\.1\S*")):
        with pytest.raises(ArgumentError, match=rf"module: {name} was made by torch\.jit, .*pass delivery='eager'"):
            offloaded(model)
        with AdamW(model.parameters(), threads=1) as optimizer:
            step(model, optimizer)


def test_scripted_modules_that_do_not_train_may_be_parts() -> None:
    model = nn.Sequential(nn.Linear(8, 8), torch.jit.script(nn.ReLU()), torch.jit.trace(nn.Linear(8, 8), INPUT))
    own = list(model[0].parameters())
    with AdamW(own, delivery="on_demand", module=model, threads=1) as optimizer:
        step(model, optimizer)
        model(INPUT)
        model.state_dict()
        assert all(torch.equal(param, optimizer.state[param]["master"]) for param in own)
