"""Hugging Face Trainer with DeepSpeed ZeRO-3 and superoffload: trains a small Llama on any text file, from scratch.

    superoffload run -- torchrun --nproc-per-node 2 examples/deepspeed/train.py --text some.txt --out runs/trainer

or, with the two lines marked below, without `superoffload run`. Needs: pip install deepspeed transformers accelerate.
Without a GPU set DS_ACCELERATOR=cpu. `--resume` goes on from the last checkpoint in --out.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import superoffload.integrations.deepspeed  # line 1 of 2

superoffload.integrations.deepspeed.enable()  # line 2 of 2


class Bytes(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """The bytes of a text in sequences of one length."""

    def __init__(self, text: bytes, length: int) -> None:
        self.tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self.length = length

    def __len__(self) -> int:
        return len(self.tokens) // self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        piece = self.tokens[index * self.length : (index + 1) * self.length]
        return {"input_ids": piece, "labels": piece}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True, type=Path)
    parser.add_argument("--out", default="runs/trainer")
    parser.add_argument("--deepspeed", default=str(Path(__file__).with_name("ds.json")))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-steps", type=int, default=20)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()

    data = Bytes(args.text.read_bytes(), 64)
    held_out = torch.utils.data.Subset(data, range(min(16, len(data))))
    training = TrainingArguments(
        output_dir=args.out,
        deepspeed=args.deepspeed,
        bf16=True,
        max_steps=args.steps,
        per_device_train_batch_size=4,
        learning_rate=2e-3,
        lr_scheduler_type="cosine",
        warmup_steps=5,
        max_grad_norm=1.0,
        logging_steps=1,
        save_steps=args.save_steps,
        eval_strategy="steps",
        eval_steps=args.save_steps,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
        seed=1,
    )
    torch.manual_seed(1)
    shape = LlamaConfig(
        vocab_size=256,
        hidden_size=args.hidden,
        intermediate_size=4 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=4,
        max_position_embeddings=64,
    )
    trainer = Trainer(model=LlamaForCausalLM(shape), args=training, train_dataset=data, eval_dataset=held_out)
    trainer.train(resume_from_checkpoint=args.resume)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    if trainer.is_world_process_zero():
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {trainer.state.global_step} steps", flush=True)


if __name__ == "__main__":
    main()
