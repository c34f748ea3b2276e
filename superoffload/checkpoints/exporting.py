"""Exports the model alone for other programs: one safetensors file under the names of its state_dict."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from superoffload.adamw import AdamW
from superoffload.checkpoints import folder as folders
from superoffload.checkpoints.contents import name_everything
from superoffload.checkpoints.tensor_files import Entry, TensorFile, flat_runs
from superoffload.errors import ArgumentError
from superoffload.host.tensors import is_dtensor

WEIGHTS = "model.safetensors"


@torch.no_grad()
def export_weights(
    folder: str | os.PathLike[str], model: nn.Module, optimizer: AdamW | None = None, *, masters: bool = False
) -> Path:
    """Writes ``model.safetensors``, and ``config.json`` for a transformers model; ``from_pretrained`` loads it.

    ``masters``: writes the optimizer's fp32 masters instead of the published parameters. With sharded parameters all
    ranks call this; they gather one parameter after the other, and the first rank writes.
    """
    if masters and not isinstance(optimizer, AdamW):
        raise ArgumentError("masters=True needs optimizer, a superoffload.AdamW")
    named = name_everything(model, optimizer)
    if named.has_parts:
        raise ArgumentError(
            "model: each rank has a part of it, such as a pipeline stage, expected the whole model on all ranks, else "
            "the file would lack the others' parts; save() on all ranks, load() it into the whole model in one "
            "process, and call export_weights() there"
        )
    if isinstance(optimizer, AdamW):
        optimizer.synchronize()
        optimizer.parts.refresh_written()
    path = folders.path_of(folder) / WEIGHTS
    values = {name: _value(tensor, optimizer if masters else None) for name, tensor in named.tensors.items()}
    entries = [Entry(name, value.dtype, tuple(value.shape)) for name, value in values.items()]
    with folders.naming(path, sum(entry.nbytes for entry in entries)):
        with _weights(path, entries) if named.is_first else nullcontext() as file:
            for name, value in values.items():
                whole = value.full_tensor() if is_dtensor(value) else value
                if file is not None:
                    file.write(name, flat_runs(whole))
        config: Any = getattr(model, "config", None)
        if named.is_first and hasattr(config, "to_json_string"):
            with _replacing(path.with_name("config.json")) as part:
                folders.write_durably(part, config.to_json_string().encode())
    return path


@contextmanager
def _weights(path: Path, entries: Sequence[Entry]) -> Iterator[TensorFile]:
    folders.make_parents(path)
    with _replacing(path) as part, closing(TensorFile(part, entries, {"format": "pt"})) as file:
        yield file
        file.finish()


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Yields the path of a temporary file, which gets its name once it is whole and on the disk."""
    part = folders.hidden(path, "writing")
    try:
        yield part
        os.replace(part, path)
        folders.sync_folder(path.parent)
    finally:
        folders.give_up(part)


def _value(tensor: Tensor, optimizer: AdamW | None) -> Any:
    if optimizer is not None and tensor in optimizer.state:
        return optimizer.state[tensor]["master"]
    return tensor.detach()
