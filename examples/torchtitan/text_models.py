"""Configurations for torchtitan: its small Llama 3 and DeepSeek V3 on the bytes of Python's standard library."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from on_cpus import without_flex_attention
from torch.utils.data import IterableDataset
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.models import deepseek_v3, llama3

from superoffload.integrations.torchtitan import Trainer

LAYERS = 4


def llama() -> Trainer.Config:
    return _configuration(llama3.model_registry("debugmodel"))


def deepseek() -> Trainer.Config:
    return _configuration(deepseek_v3.model_registry("debugmodel"))


class Bytes(BaseTokenizer):
    """Takes each byte of a text for a token."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, *, tokenizer_path: str) -> None:
        super().__init__()
        self.eos_id = 0

    def encode(self, text: str, **_: Any) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int], **_: Any) -> str:
        return bytes(tokens).decode(errors="replace")

    def get_vocab_size(self) -> int:
        return 256


class StandardLibrary(ParallelAwareDataloader):
    """Reads the sources of Python's standard library, each data-parallel rank its own pieces."""

    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):
        pass

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        tokenizer: BaseTokenizer,
        seq_len: int,
        local_batch_size: int,
        **_: Any,
    ) -> None:
        pieces = Pieces(seq_len, dp_rank, dp_world_size)
        super().__init__(pieces, dp_rank, dp_world_size, batch_size=local_batch_size)


class Pieces(IterableDataset):
    def __init__(self, length: int, rank: int, ranks: int) -> None:
        sources = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-e]*.py"))
        self._text = torch.frombuffer(bytearray(b"".join(map(Path.read_bytes, sources))), dtype=torch.uint8).long()
        self._length, self._rank, self._ranks, self._next = length, rank, ranks, 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            start = (self._next * self._ranks + self._rank) * self._length % (len(self._text) - self._length - 1)
            self._next += 1
            piece = self._text[start : start + self._length + 1]
            yield {"input": piece[:-1], "positions": torch.arange(self._length)}, piece[1:]

    def state_dict(self) -> dict[str, int]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._next = state["next"]


def _configuration(spec: Any) -> Trainer.Config:
    spec.model.layers = spec.model.layers[:LAYERS]
    return Trainer.Config(
        loss=CrossEntropyLoss.Config(global_vocab_size=spec.model.vocab_size),
        model_spec=without_flex_attention(spec),
        optimizer=default_adamw(lr=8e-4),
        tokenizer=Bytes.Config(),
        dataloader=StandardLibrary.Config(),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        training=TrainingConfig(local_batch_size=4, seq_len=64, steps=10, disable_cuda_graphs=True),
        metrics=MetricsProcessor.Config(log_freq=1),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor", pipeline_parallel_schedule="1F1B"),
        activation_checkpoint=None,
        checkpoint=CheckpointManager.Config(interval=5, last_save_model_only=False),
    )
