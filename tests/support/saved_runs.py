"""What tests of checkpoints share: an odd model with optimizer and scheduler, and a checkpoint of it."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from superoffload import AdamW, checkpoints

TENSORS = "rank-00000.safetensors"


class Tied(nn.Module):
    """Tied ends, a buffer that forward changes, a frozen layer, a scalar, something empty, extra state, dropout."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(11, 8)
        self.norm = nn.BatchNorm1d(8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.calls = 0

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        x = self.scale * self.norm(self.embedding(tokens)) + self.frozen.weight.sum() + self.empty.sum()
        loss: Tensor = nn.functional.cross_entropy(self.head(nn.functional.dropout(x, 0.2)), (tokens + 1) % 11)
        return loss


class Run:
    """A model, its optimizer and scheduler, and a loop over both that can stop anywhere."""

    def __init__(self, seed: int, dtype: torch.dtype, mode: str = "always", **options: Any) -> None:
        self.model = Tied(seed).to(dtype)
        decayed = [p for p in self.model.parameters() if p.dim() > 1]
        rest = [p for p in self.model.parameters() if p.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0, "tag": "rest"}]
        self.optimizer = AdamW(groups, lr=1e-2, max_grad_norm=3.0, speculation=mode, threads=1, **options)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 20)
        torch.manual_seed(seed)

    def backward(self, step: int) -> Tensor:
        tokens = torch.randint(0, 11, (16,), generator=torch.Generator().manual_seed(step))
        loss: Tensor = self.model(tokens)
        loss.backward()
        return loss.detach()

    def steps(self, steps: range) -> list[float]:
        losses = []
        for step in steps:
            self.optimizer.zero_grad()
            losses.append(self.backward(step).item())
            losses[-1] += self.backward(100 + step).item()  # accumulates
            self.optimizer.step()
            self.scheduler.step()
        return losses

    def extra(self) -> dict[str, Any]:
        return {"scheduler": self.scheduler.state_dict(), "rng": torch.get_rng_state()}

    def resume(self, folder: Path) -> None:
        extra = checkpoints.load(folder, self.model, self.optimizer)
        self.scheduler.load_state_dict(extra["scheduler"])
        torch.set_rng_state(extra["rng"])

    def everything(self) -> tuple[dict[str, str], list[Tensor], Any]:
        buffers = [buffer.clone() for buffer in self.model.buffers()]
        return self.optimizer.state_digests(), buffers, (self.model.calls, self.scheduler.get_last_lr())


def assert_same(ours: Any, theirs: Any) -> None:
    assert ours[0] == theirs[0] and ours[2] == theirs[2]
    assert all(torch.equal(a, b) for a, b in zip(ours[1], theirs[1], strict=True))


def save_two_steps(folder: Path) -> Path:
    """The folder below ``folder`` in which the checkpoint is."""
    run = Run(0, torch.bfloat16)
    run.steps(range(2))
    checkpoints.save(folder / "step-2", run.model, run.optimizer, extra=run.extra())
    run.optimizer.close()
    return folder / "step-2"


# ---- ways from one optimizer and its model to another of each -------------------------------------------------------

Carry = Callable[[nn.Module, AdamW, nn.Module, AdamW, Path], None]


def as_dict(model: nn.Module, optimizer: AdamW, other: nn.Module, loads: AdamW, _: Path) -> None:
    other.load_state_dict(model.state_dict())
    loads.load_state_dict(optimizer.state_dict())


def through_a_file(model: nn.Module, optimizer: AdamW, other: nn.Module, loads: AdamW, _: Path) -> None:
    """The optimizer's state first, whose masters are followed by those of the model that comes behind it."""
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    loads.load_state_dict(state["optimizer"])
    other.load_state_dict(state["model"])


def in_a_folder(model: nn.Module, optimizer: AdamW, other: nn.Module, loads: AdamW, folder: Path) -> None:
    checkpoints.save(folder / "a", model, optimizer)
    checkpoints.load(folder / "a", other, loads)


def in_the_background(model: nn.Module, optimizer: AdamW, other: nn.Module, loads: AdamW, folder: Path) -> None:
    checkpoints.save_in_background(folder / "a", model, optimizer).wait(60)
    checkpoints.load(folder / "a", other, loads)
