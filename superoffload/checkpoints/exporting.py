"""The model alone, as others read it: one safetensors file under the names of its state_dict."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from superoffload.adamw import AdamW
from superoffload.checkpoints.contents import name_everything
from superoffload.checkpoints.safetensors import Entry, TensorFile, flat_runs
from superoffload.errors import ArgumentError
from superoffload.ranks.layout import is_dtensor

WEIGHTS = "model.safetensors"


@torch.no_grad()
def export_weights(
    folder: str | os.PathLike[str], model: nn.Module, optimizer: AdamW | None = None, *, masters: bool = False
) -> Path:
    """Writes ``model.safetensors``, and ``config.json`` for a model of transformers; ``from_pretrained`` loads it.

    ``masters``: the optimizer's fp32 masters instead of the published parameters. Sharded parameters are gathered, one
    after the other: then all ranks call this, and the first one writes.
    """
    if masters and not isinstance(optimizer, AdamW):
        raise ArgumentError("masters=True needs optimizer, a superoffload.AdamW")
    named = name_everything(model, optimizer)
    if isinstance(optimizer, AdamW):
        optimizer.synchronize()
        optimizer.refresh_written()
    path = Path(folder) / WEIGHTS
    values = {name: _value(tensor, optimizer if masters else None) for name, tensor in named.tensors.items()}
    file, part = None, path.with_name(f".{WEIGHTS}.part")
    try:
        if named.is_first:
            path.parent.mkdir(parents=True, exist_ok=True)
            part.unlink(missing_ok=True)
            entries = [Entry(name, value.dtype, tuple(value.shape)) for name, value in values.items()]
            file = TensorFile(part, entries, {"format": "pt"})
        for name, value in values.items():
            whole = value.full_tensor() if is_dtensor(value) else value
            if file is not None:
                file.write(name, flat_runs(whole))
        if file is not None:
            file.finish()
    except BaseException:
        if file is not None:
            file.close()
        if named.is_first:
            part.unlink(missing_ok=True)
        raise
    if file is not None:
        os.replace(part, path)
        config: Any = getattr(model, "config", None)
        if hasattr(config, "to_json_string"):
            (path.parent / "config.json").write_text(config.to_json_string())
    return path


def _value(tensor: Tensor, optimizer: AdamW | None) -> Any:
    if optimizer is not None and tensor in optimizer.state:
        return optimizer.state[tensor]["master"]
    return tensor.detach()
