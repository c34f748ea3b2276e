"""TRL's GRPOTrainer: a small decoder learns to write letters; the optimizer sleeps while the model generates.

python examples/grpo.py --text some.txt --out runs/grpo
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from sft import tokenizer_of
from trainer import SIZES, config_of
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

from superoffload.integrations.transformers import offload


def letters(completions: list[str], **others: Any) -> list[float]:
    """Rewards the share of letters in what was generated."""
    return [sum(character.isalpha() for character in text) / max(1, len(text)) for text in completions]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True, type=Path)
    parser.add_argument("--out", default="runs/grpo")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--sleep", choices=["no", "yes"], default="yes")
    args = parser.parse_args()

    lines = [line for line in args.text.read_text().splitlines() if len(line) > 20]
    tokenizer = tokenizer_of(lines)
    SIZES["vocab_size"] = len(tokenizer)
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config_of("qwen"), dtype=torch.bfloat16)
    training = GRPOConfig(
        output_dir=args.out,
        max_steps=args.steps,
        per_device_train_batch_size=32,
        num_generations=8,
        max_completion_length=12,
        learning_rate=3e-2,
        max_grad_norm=1.0,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        seed=1,
    )
    prompts = Dataset.from_dict({"prompt": [line.strip()[:12] for line in lines]})
    trainer = GRPOTrainer(
        model=model, reward_funcs=letters, args=training, train_dataset=prompts, processing_class=tokenizer
    )
    Path(args.out).mkdir(parents=True, exist_ok=True)
    offload(trainer, sleep=args.sleep == "yes")  # the one line
    trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    print(f"reward {rewards[0]:.3f} -> {rewards[-1]:.3f}", flush=True)


if __name__ == "__main__":
    main()
