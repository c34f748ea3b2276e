"""``delivery="on_demand"`` and code that was compiled, exported, traced or scripted before or after the optimizer."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp import fully_shard

from superoffload import AdamW
from superoffload.errors import ArgumentError
from tests.support.rank_processes import flat_mesh, on_ranks, optimizer_of

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


def itself(model: nn.Module) -> Any:
    return compiled(model)


def a_function(model: nn.Module) -> Any:
    return compiled(lambda x: model(x))


def by_method(model: nn.Module) -> Any:
    model.compile(backend="eager")
    return model


def another(model: nn.Module) -> Any:
    """A teacher of the same class, whose code torch.compile would use again."""
    compiled(model_of())(INPUT)
    return compiled(model)


@pytest.mark.parametrize(
    ("way", "when"), [(itself, "before"), (a_function, "after"), (by_method, "before"), (another, "after")]
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


@pytest.mark.parametrize("way", [whole_of_wrapped_blocks, a_part_of_a_compiled_one])
def test_a_part_of_compiled_code_is_called_otherwise(way: Callable[[nn.Module], Any]) -> None:
    """Then the module has not waited that waits for all of that code."""
    model, plain = model_of(), model_of()
    run = way(model)
    with offloaded(model) as optimizer, AdamW(plain.parameters(), lr=1e-1, threads=1) as eager:
        for _ in range(4):
            step(run, optimizer)
            step(plain, eager)
            with torch.no_grad():
                assert torch.equal(run(INPUT), plain(INPUT))


def test_a_later_optimizer_compiles_nothing_anew() -> None:
    """Guards on hooks are there by then."""
    model = model_of()
    with offloaded(model):
        run = compiled(lambda x: x + 1)
        run(INPUT)
        with offloaded(model_of()):
            run(INPUT)
            assert counters["frames"]["ok"] == 1


@pytest.mark.parametrize("how", ["method", "function"])
def test_blocks_that_were_compiled_before_share_one_whole_graph(how: str) -> None:
    """Hooks differ from block to block, and the compiler's guards must not tell the blocks apart by them."""
    model = model_of(12)
    for i, block in enumerate(model):
        if how == "method":
            block.compile(backend="eager", fullgraph=True)
        else:
            model[i] = compiled(block, fullgraph=True)
    with offloaded(model) as optimizer:
        step(model, optimizer)
        step(model, optimizer)
        assert counters["stats"]["unique_graphs"] <= 2, "the first block's input needs no gradient"
        assert not counters["graph_break"]


def sharded_and_compiled(delivery: str) -> dict[str, str]:
    """In a rank: the blocks are compiled as torchtitan does it, then sharded."""
    model = model_of()
    for block in model:
        block.compile(backend="eager", fullgraph=True)
        fully_shard(block, mesh=flat_mesh())
    fully_shard(model, mesh=flat_mesh())
    with optimizer_of(model, delivery=delivery, module=model) as optimizer:
        for _ in range(3):
            step(model, optimizer)
        return optimizer.state_digests()


def test_sharded_blocks_that_were_compiled_whole() -> None:
    eager, on_demand = (on_ranks(2, sharded_and_compiled, delivery) for delivery in ("eager", "on_demand"))
    assert eager == on_demand


def whole_graph(model: nn.Module) -> None:
    compiled(model, fullgraph=True)(INPUT)


def strict_export(model: nn.Module) -> None:
    torch.export.export(model, (INPUT,), strict=True)


def script(model: nn.Module) -> None:
    torch.jit.script(model)


def script_a_copy(model: nn.Module) -> None:
    torch.jit.script(copy.deepcopy(model))


def script_a_pickled_copy(model: nn.Module) -> None:
    torch.jit.script(pickle.loads(pickle.dumps(model)))


@pytest.mark.parametrize("way", [whole_graph, strict_export, script, script_a_copy, script_a_pickled_copy])
def test_whole_graphs_and_scripts_that_are_made_later_are_refused_with_the_reason(
    way: Callable[[nn.Module], None],
) -> None:
    model = model_of()
    with offloaded(model) as optimizer:
        step(model, optimizer)
        with pytest.raises(Exception, match=r"compile the module before|Script the module before you make"):
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
