"""Batches of byte windows, drawn by a generator of their own so that a seed alone decides what a step sees."""

from __future__ import annotations

import torch
from torch import Tensor


class BatchSource:
    """Random windows of `sequence + 1` bytes from one text, as int64 tokens [batch, sequence + 1]."""

    def __init__(self, text: Tensor, batch: int, sequence: int, seed: int) -> None:
        self._text = text
        self._batch = batch
        self._offsets = torch.arange(sequence + 1)
        self._generator = torch.Generator().manual_seed(seed)

    def next(self) -> Tensor:
        last_start = self._text.numel() - self._offsets.numel()
        starts = torch.randint(0, last_start + 1, (self._batch, 1), generator=self._generator)
        return self._text[starts + self._offsets].long()


def held_out_batches(text: Tensor, batch: int, sequence: int, count: int) -> list[Tensor]:
    """The same `count` evenly spread batches of windows for every evaluation of every run."""
    windows = batch * count
    last_start = text.numel() - (sequence + 1)
    starts = torch.linspace(0, last_start, windows, dtype=torch.float64).long().unsqueeze(1)
    tokens = text[starts + torch.arange(sequence + 1)].long()
    return list(tokens.split(batch))
