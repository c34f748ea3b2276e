"""Times one contestant at one setting: whole steps in blocks, the device waited for at the end of each block only."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_suite.contestants import CONTESTANTS, Contestant
from benchmarks.gpu_suite.devices import Device, open_device
from benchmarks.gpu_suite.settings import TrainRow
from superoffload.training.batches import BatchSource
from superoffload.training.config import ModelConfig
from superoffload.training.corpus import load_corpus
from superoffload.training.model import Transformer


def measure(row: TrainRow) -> dict[str, Any]:
    """The row's result; ``missing`` or ``out_of_memory`` where it cannot be had."""
    entry = CONTESTANTS[row.contestant]
    missing = entry.import_error()
    if missing is not None:
        return {"missing": missing}
    device = open_device(row.device)
    if row.capped_gib is not None:
        device.cap(row.capped_gib)
    try:
        model = build(row.model, device, row.seed)
        device.start_of_peaks()
        contestant = entry.build(model, row)
        try:
            return {**_timed(contestant, row, device), "parameters": model.parameter_count(), **device.facts()}
        finally:
            contestant.close()
    except torch.cuda.OutOfMemoryError as error:
        return {"out_of_memory": str(error).splitlines()[0][:300], **device.facts()}


def build(config: ModelConfig, device: Device, seed: int) -> Transformer:
    """bf16 parameters, drawn on the device: the same for all contestants there."""
    torch.manual_seed(seed)
    # Where bf16 arithmetic is emulated, activations are fp32, as in training on CPUs everywhere else.
    compute = torch.bfloat16 if device.kind == "cuda" else torch.float32
    with device.torch:
        model = Transformer(config, compute)
    for param in model.parameters():
        param.data = param.data.bfloat16()
    return model


class Batches:
    """Micro-batches of real text, put on the device before they are needed."""

    def __init__(self, row: TrainRow, device: Device) -> None:
        corpus = load_corpus(None, row.model.sequence)
        self._source = BatchSource(corpus.train, row.batch, row.model.sequence, row.seed + 1)
        self._count, self._device = row.micro_batches, device.torch

    def next(self) -> list[Tensor]:
        return [self._source.next().to(self._device, non_blocking=True) for _ in range(self._count)]


def _timed(contestant: Contestant, row: TrainRow, device: Device) -> dict[str, Any]:
    batches = Batches(row, device)
    losses: list[Tensor] = []
    for _ in range(row.warm_up):
        losses.append(contestant.step(batches.next()))
        device.sample()
    seconds: list[float] = []
    for _ in range(row.blocks):
        steps = [batches.next() for _ in range(row.steps)]
        device.synchronize()
        began = time.perf_counter()
        for micro_batches in steps:
            losses.append(contestant.step(micro_batches))
        device.synchronize()
        seconds.append((time.perf_counter() - began) / row.steps)
        device.sample()  # not between steps: it costs time
    contestant.settle()
    return {
        "seconds_median": median(seconds),
        "seconds_min": min(seconds),
        "seconds": seconds,
        "tokens": row.tokens,
        "tokens_per_second": row.tokens / median(seconds),
        "losses": [float(loss) for loss in losses],
        "final_loss": float(losses[-1]),
        **device.memory(),
        **contestant.facts(),
    }
