"""Times one contestant at one setting: whole steps in blocks, with one wait for the device at the end of each block."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_suite.contestants import CONTESTANTS, Plain
from benchmarks.gpu_suite.devices import Device, open_device
from benchmarks.gpu_suite.jobs import ENDS_VARIABLE
from benchmarks.gpu_suite.settings import TrainRow
from benchmarks.training.config import ModelConfig
from benchmarks.training.corpus import BatchSource, load_corpus
from benchmarks.training.model import Transformer
from superoffload.host.memory import is_out_of_memory

# Of superoffload.AdamW.stats(), reported for the timed steps alone.
_COUNTED = (
    "steps", "skipped_steps", "clipped_steps", "buckets_speculated", "buckets_committed", "buckets_replayed",
    "buckets_undone", "buckets_stepped", "buckets_two_phase", "journal_overflows", "optimizer_seconds",
    "optimizer_seconds_exposed", "bytes_down", "bytes_up", "bytes_up_early",
)  # fmt: skip
_LEAST_BLOCKS, _ENDING_SECONDS = 2, 10.0


def rank() -> int:
    """Returns the rank that a launcher gave this process; 0 without one."""
    return int(os.environ.get("RANK", "0"))


def _seconds_left() -> float:
    """Returns the seconds until this process is ended from outside."""
    return float(os.environ.get(ENDS_VARIABLE, "inf")) - time.monotonic()


def measure(row: TrainRow) -> dict[str, Any]:
    """Returns the row's result; ``missing`` or ``out_of_memory`` if there is none."""
    entry = CONTESTANTS[row.contestant]
    missing = entry.import_error()
    if missing is not None:
        return {"missing": missing}
    device = open_device(row.device)
    if row.capped_gib is not None:
        device.cap(row.capped_gib)
    try:
        model = build(row.model, device, row.seed)
        found = {"parameters": model.parameter_count(), "bare_seconds": _bare_seconds(model, row, device)}
        device.start_of_peaks()
        with device.links():
            contestant = entry.make(model, row)
            device.prepare(model)
            try:
                found.update(_timed(contestant, row, device))
            except BaseException:
                with suppress(Exception):  # the row reports the first error
                    contestant.close()
                raise
            contestant.close()
        return {**found, **device.facts()}
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return {"out_of_memory": str(error).splitlines()[0][:300], **device.facts()}


def build(config: ModelConfig, device: Device, seed: int) -> Transformer:
    """Returns a model with bf16 parameters, drawn on the device: the same for all contestants there."""
    torch.manual_seed(seed)
    # Where bf16 arithmetic is emulated, activations are fp32, as in training on CPUs elsewhere.
    compute = torch.bfloat16 if device.kind == "cuda" else torch.float32
    with device.torch:
        model = Transformer(config, compute)
    for param in model.parameters():
        param.data = param.data.bfloat16()
    return model


class Batches:
    """Holds micro-batches of real text, put on the device before they are needed."""

    def __init__(self, row: TrainRow, device: Device) -> None:
        corpus = load_corpus(row.model.sequence)
        self._source = BatchSource(corpus.train, row.batch, row.model.sequence, row.seed + 1 + rank())
        self._count, self._device = row.micro_batches, device.torch

    def next(self) -> list[Tensor]:
        return [self._source.next().to(self._device, non_blocking=True) for _ in range(self._count)]


def _bare_seconds(model: Transformer, row: TrainRow, device: Device) -> float:
    """Times a step without an optimizer in this process; what the contestant takes longer is exposed."""
    bare, batches = Plain(model, row), Batches(row, device)
    for _ in range(min(2, row.warm_up)):
        bare.step(batches.next())
    return _block(bare, [batches.next() for _ in range(row.steps)], device, [])


def _block(contestant: Plain, steps: list[list[Tensor]], device: Device, losses: list[Tensor]) -> float:
    """Returns seconds per step; appends the losses to ``losses``."""
    device.synchronize()
    began = time.perf_counter()
    for micro_batches in steps:
        losses.append(contestant.step(micro_batches))
    device.synchronize()
    return (time.perf_counter() - began) / len(steps)


def _timed(contestant: Plain, row: TrainRow, device: Device) -> dict[str, Any]:
    batches = Batches(row, device)
    losses: list[Tensor] = []
    for _ in range(row.warm_up):
        losses.append(contestant.step(batches.next()))
        device.sample()
    before = contestant.counters()  # the processors' remaining work for the last step belongs to the first block
    seconds: list[float] = []
    for _ in range(row.blocks):
        seconds.append(_block(contestant, [batches.next() for _ in range(row.steps)], device, losses))
        device.sample()  # not between steps: it costs time
        if len(seconds) >= _LEAST_BLOCKS and _seconds_left() < 2 * max(seconds) * row.steps + _ENDING_SECONDS:
            break  # fewer blocks are a result; a row that is ended from outside has none
    contestant.settle()
    device.catch_up()
    return {
        "seconds_median": median(seconds),
        "seconds_min": min(seconds),
        "seconds_mean": sum(seconds) / len(seconds),
        "seconds": seconds,
        "tokens": row.tokens,
        "tokens_per_second": row.ranks * row.tokens / median(seconds),
        "losses": [float(loss) for loss in losses],
        "final_loss": float(losses[-1]),
        "timed": {name: value - before[name] for name, value in contestant.counters().items() if name in _COUNTED},
        **device.memory(),
        **contestant.facts(),
    }
