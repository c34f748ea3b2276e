"""Times Hugging Face Trainer with gradient accumulation and its own clipping: ours, everything on the GPU, neither."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from benchmarks.gpu_suite.devices import Device, open_device
from benchmarks.gpu_suite.rows import TRAINER_WAYS
from benchmarks.gpu_suite.settings import BETAS, EPS, LR, WEIGHT_DECAY, TrainRow
from benchmarks.training.config import ModelConfig
from benchmarks.training.corpus import BatchSource, load_corpus

_SGD, _IN_FP32, _OURS = TRAINER_WAYS
_MAX_GRAD_NORM = 1.0


def measure_trainer(row: TrainRow) -> dict[str, Any]:
    """Returns the row's result: seconds per step in blocks, memory, norms and losses as Trainer logs them."""
    device = open_device(row.device)
    torch.manual_seed(0)
    trains_in_fp32 = row.contestant == _IN_FP32
    with device.torch:
        model = LlamaForCausalLM(_config(row.model))
    model.to(torch.float32 if trains_in_fp32 else torch.bfloat16)
    device.start_of_peaks()
    blocks = Blocks(device, row)
    with tempfile.TemporaryDirectory() as folder:
        arguments = _arguments(row, folder, autocast=trains_in_fp32)
        trainer = Trainer(model, arguments, train_dataset=Text(row), callbacks=[blocks])
        if row.contestant == _OURS:
            from superoffload.integrations.transformers import offload

            offload(trainer, delivery="on_demand")
        trainer.train()
    logs = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    result = {
        "parameters": sum(param.numel() for param in model.parameters()),
        "seconds_median": median(blocks.seconds),
        "seconds": blocks.seconds,
        "tokens_per_second": row.tokens / median(blocks.seconds),
        "losses": [entry["loss"] for entry in logs],
        "final_loss": logs[-1]["loss"],
        "grad_norms": [entry["grad_norm"] for entry in logs],
        **device.memory(),
        **device.facts(),
    }
    return {**result, "stats": _stats(trainer)} if row.contestant == _OURS else result


def _config(model: ModelConfig) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=model.vocabulary, hidden_size=model.hidden, intermediate_size=model.mlp,
        num_hidden_layers=model.layers, num_attention_heads=model.heads, num_key_value_heads=model.kv_heads,
        max_position_embeddings=model.sequence, tie_word_embeddings=False, use_cache=False,
        attn_implementation="sdpa",
    )  # fmt: skip


def _arguments(row: TrainRow, folder: str, *, autocast: bool) -> TrainingArguments:
    return TrainingArguments(
        folder, per_device_train_batch_size=row.batch, gradient_accumulation_steps=row.micro_batches,
        max_steps=row.warm_up + row.blocks * row.steps, max_grad_norm=_MAX_GRAD_NORM, learning_rate=LR,
        adam_beta1=BETAS[0], adam_beta2=BETAS[1], adam_epsilon=EPS, weight_decay=WEIGHT_DECAY,
        lr_scheduler_type="constant", optim="sgd" if row.contestant == _SGD else "adamw_torch_fused", bf16=autocast,
        logging_steps=row.steps, save_strategy="no", report_to="none", disable_tqdm=True, seed=0,
        use_cpu=not row.device.startswith("cuda"), dataloader_pin_memory=row.device.startswith("cuda"),
    )  # fmt: skip


class Text(IterableDataset[dict[str, Tensor]]):
    """Gives the same sequences of real text to every way."""

    def __init__(self, row: TrainRow) -> None:
        self._sequence = row.model.sequence

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        source = BatchSource(load_corpus(self._sequence).train, 1, self._sequence, 1)
        while True:
            tokens = source.next()[0, : self._sequence].long()
            yield {"input_ids": tokens, "labels": tokens}


class Blocks(TrainerCallback):
    """Times blocks of steps, with one wait for the device at the end of each."""

    def __init__(self, device: Device, row: TrainRow) -> None:
        self.seconds: list[float] = []
        self._device, self._row, self._began = device, row, 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        done = state.global_step - self._row.warm_up
        if done < 0 or done % self._row.steps:
            return
        self._device.synchronize()
        if done:
            self.seconds.append((time.perf_counter() - self._began) / self._row.steps)
        self._device.sample()
        self._began = time.perf_counter()


def _stats(trainer: Any) -> dict[str, float]:
    from superoffload.integrations.transformers import optimizer_of

    optimizer = optimizer_of(trainer.optimizer)
    optimizer.synchronize()
    found = dict(optimizer.stats())
    optimizer.close()
    return found
