"""TRL's SFTTrainer, with or without a LoRA adapter: a small decoder and a tokenizer made from the text itself.

python examples/sft.py --text some.txt --out runs/sft --lora
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from trainer import SIZES, config_of
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from superoffload.integrations.transformers import offload


def tokenizer_of(lines: list[str]) -> PreTrainedTokenizerFast:
    """Byte pairs of these very lines; nothing is downloaded."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<pad>", "<end>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=512, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(lines, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True, type=Path)
    parser.add_argument("--out", default="runs/sft")
    parser.add_argument("--family", choices=["llama", "qwen", "gpt-oss"], default="qwen")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lora", action="store_true")
    args = parser.parse_args()

    lines = [line for line in args.text.read_text().splitlines() if len(line) > 20]
    tokenizer = tokenizer_of(lines)
    SIZES["vocab_size"] = len(tokenizer)
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config_of(args.family), dtype=torch.bfloat16)
    training = SFTConfig(
        output_dir=args.out,
        max_steps=args.steps,
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        max_grad_norm=1.0,
        max_length=48,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        seed=1,
    )
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM") if args.lora else None
    data = Dataset.from_dict({"text": lines})
    trainer = SFTTrainer(model=model, args=training, train_dataset=data, processing_class=tokenizer, peft_config=lora)
    offload(trainer)  # the one line
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    trained = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    print(f"loss {logs[0]['loss']:.4f} -> {logs[-1]['loss']:.4f}, {trained} parameters trained", flush=True)


if __name__ == "__main__":
    main()
