"""``torch.compile(mode="reduce-overhead")``: gradients in a pool that the next graph's replay writes again."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from superoffload import AdamW

NUMEL = 1 << 18
PAIRS, STEPS = 3, 8  # a graph is warmed up in the first step and recorded in the second
CYCLES = 20_000_000  # some 10 ms, which the pack stream is behind backward
CLIPS = 12.0  # every norm is a little larger, and shows it with the last bucket only: those before are replayed
DTYPES = (torch.float32, torch.bfloat16)

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton: torch compiles for GPUs with it")
needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("c++") is None,
    reason="needs a C++ compiler (apt-get install g++): torch.compile builds with it",
)


@pytest.fixture
def without_graphs() -> Iterator[None]:
    """None of another test, and none for the next: their manager makes every link wait."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


class Pair(nn.Module):
    """Two parameters, each of whose gradients is the weight that it is given."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.first, self.second = (nn.Parameter(0.1 * torch.randn(NUMEL, generator=generator)) for _ in range(2))

    def forward(self, total: Tensor, first: Tensor, second: Tensor) -> Tensor:
        return total + (self.first.float() * first.float()).sum() + (self.second.float() * second.float()).sum()


class Chain(nn.Module):
    """Three graphs in forward, three in backward, in one pool. Without a loop: a break in a loop compiles nothing."""

    def __init__(self, dtype: torch.dtype, device: str) -> None:
        super().__init__()
        self.first, self.second, self.last = (Pair(seed) for seed in range(PAIRS))
        self.to(device=device, dtype=dtype)

    def forward(self, gradients: list[Tensor]) -> Tensor:
        total: Tensor = self.first(torch.zeros((), device=gradients[0].device), gradients[0], gradients[1])
        torch._dynamo.graph_break()
        total = self.second(total, gradients[2], gradients[3])
        torch._dynamo.graph_break()
        total = self.last(total, gradients[4], gradients[5])
        return total


def gradients_of(step: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    return [(0.01 * torch.randn(NUMEL, generator=generator)).to(device, dtype) for _ in range(2 * PAIRS)]


def delay_packing(link: Any) -> None:
    sleep: Any = torch.cuda._sleep
    with torch.cuda.stream(torch.cuda.ExternalStream(link._pack_stream)):
        sleep(CYCLES)


def train(
    device: str, dtype: torch.dtype, mode: str | None, speculation: str
) -> tuple[list[dict[str, str]], list[float]]:
    """State after every step and norms. ``mode``: how the model is compiled; None: it is not."""
    model = Chain(dtype, device)
    if mode is not None:
        model.compile(mode=mode)
    digests, norms = [], []
    options: dict[str, Any] = {"lr": 1e-2, "bucket_numel": NUMEL, "threads": 2, "speculation": speculation}
    with AdamW(model.parameters(), **options) as optimizer:
        for step in range(STEPS):
            optimizer.max_grad_norm = CLIPS if step % 2 else 1e6
            gradients = gradients_of(step, dtype, device)
            loss = model(gradients)
            if device == "cuda":
                delay_packing(optimizer._engine.link)
            loss.backward()
            optimizer.step()
            norms.append(optimizer.grad_norm)
            optimizer.zero_grad()
            if device == "cuda":
                torch.cuda.synchronize()
            digests.append(optimizer.state_digests())
    return digests, norms


@pytest.mark.gpu
@needs_triton
@needs_compiler
@pytest.mark.usefixtures("without_graphs")
@pytest.mark.parametrize("speculation", ["always", "never"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_replays_change_no_bit(dtype: torch.dtype, speculation: str) -> None:
    """Without the wait of backward's stream, the replay of one graph writes over gradients of the graph before it."""
    found = train("cuda", dtype, "reduce-overhead", speculation)
    assert_graphs_were_replayed()
    assert found == train("cpu", dtype, None, "never")


def assert_graphs_were_replayed() -> None:
    from torch._inductor import cudagraph_trees

    trees: Any = cudagraph_trees
    manager = trees.get_manager(torch.cuda.current_device(), create_if_none_exists=False)
    assert manager is not None and counters["inductor"]["cudagraph_skips"] == 0
    assert manager.new_graph_id().id >= 2 * PAIRS, "a forward and a backward for every part"
