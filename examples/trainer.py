"""Hugging Face Trainer without DeepSpeed: one line, `offload(trainer)`. Trains a small decoder on the bytes of a text.

python examples/trainer.py --text some.txt --out runs/trainer --family llama
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    LlamaConfig,
    PretrainedConfig,
    Qwen3Config,
    Trainer,
    TrainingArguments,
)

from superoffload.integrations.transformers import offload

SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}


def config_of(family: str) -> PretrainedConfig:
    """Llama, Qwen, or a mixture of experts as in gpt-oss; small ones."""
    if family == "llama":
        return LlamaConfig(**SIZES)
    if family == "qwen":
        return Qwen3Config(**SIZES, head_dim=16)
    return GptOssConfig(**SIZES, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=32)


class Bytes(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """The bytes of a text in sequences of one length."""

    def __init__(self, text: bytes, length: int = 64) -> None:
        self.tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self.length = length

    def __len__(self) -> int:
        return len(self.tokens) // self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        piece = self.tokens[index * self.length : (index + 1) * self.length]
        return {"input_ids": piece, "labels": piece}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True, type=Path)
    parser.add_argument("--out", default="runs/trainer")
    parser.add_argument("--family", choices=["llama", "qwen", "gpt-oss"], default="llama")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--save-steps", type=int, default=20)
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config_of(args.family), dtype=torch.bfloat16)
    training = TrainingArguments(
        output_dir=args.out,
        max_steps=args.steps,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        warmup_steps=4,
        weight_decay=0.1,
        max_grad_norm=1.0,
        logging_steps=1,
        save_steps=args.save_steps,
        report_to="none",
        use_cpu=True,
        seed=1,
    )
    trainer = Trainer(model=model, args=training, train_dataset=Bytes(args.text.read_bytes()))
    offload(trainer)  # the one line
    trainer.train(resume_from_checkpoint=args.resume)
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    last = logs[-1]
    print(
        f"loss {logs[0]['loss']:.4f} -> {last['loss']:.4f}, norm {last['grad_norm']:.3f}, "
        f"clipped {last['superoffload/clip_rate']:.0%} of the steps",
        flush=True,
    )


if __name__ == "__main__":
    main()
