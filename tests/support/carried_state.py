"""Ways from one optimizer and its model to another of each."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from superoffload import AdamW, checkpoints

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
