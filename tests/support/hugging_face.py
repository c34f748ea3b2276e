"""Small models, data and trainers of Hugging Face Transformers."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

transformers: Any = None
with contextlib.suppress(ImportError):
    transformers = importlib.import_module("transformers")

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
NEEDS = "needs transformers: pip install 'superoffload[transformers]'"
SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip

BASIC: dict[str, Any] = {
    "per_device_train_batch_size": 4, "learning_rate": 3e-3, "logging_steps": 1, "save_strategy": "no",
    "report_to": "none", "use_cpu": True, "disable_tqdm": True, "optim": "adamw_torch", "seed": 3,
}  # fmt: skip


def model_of(family: str = "llama", dtype: torch.dtype = torch.float32, layers: int = 2) -> Any:
    torch.manual_seed(0)
    sizes = {**SIZES, "num_hidden_layers": layers}
    configs = {
        "llama": lambda: transformers.LlamaConfig(**sizes),
        "qwen": lambda: transformers.Qwen3Config(**sizes, head_dim=8, tie_word_embeddings=True),
        "gpt-oss": lambda: transformers.GptOssConfig(
            **SIZES, head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=16
        ),
    }
    return transformers.AutoModelForCausalLM.from_config(configs[family](), dtype=dtype)


class Counting(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Sequences that can be learned: each token is the one before plus the sequence's number."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = (torch.arange(17) * (1 + index % 5) + index) % 97
        return {"input_ids": tokens, "labels": tokens}


def trainer_of(folder: Path, model: Any, ours: str | None, metrics: Any = True, **options: Any) -> Any:
    """``ours``: how to speculate; None: torch's AdamW, clipped by Trainer. ``metrics``: what ``offload`` logs."""
    values: dict[str, Any] = {"max_steps": 10, "weight_decay": 0.1, "warmup_steps": 2, "max_grad_norm": 1.0}
    args = transformers.TrainingArguments(output_dir=str(folder), **{**BASIC, **values, **options})
    trainer = transformers.Trainer(model=model, args=args, train_dataset=Counting())
    if ours is not None:
        from superoffload.integrations.transformers import offload

        offload(trainer, metrics=metrics, speculation=ours, threads=1)
    return trainer


def logs_of(trainer: Any) -> list[dict[str, float]]:
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def end(trainer: Any) -> dict[str, str]:
    optimizer = trainer.optimizer.optimizer
    digests: dict[str, str] = optimizer.state_digests()
    optimizer.close()
    return digests


def tokenizer_of() -> Any:
    from tokenizers import Tokenizer, models

    words = {"<pad>": 0, "<end>": 1, **{f"w{i}": i for i in range(2, 97)}}
    inner = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<end>")


# ---- trainers of TRL: supervised, and two that generate what they learn from -----------------------------------------
#
# The model is made behind the arguments: by these Transformers knows whether DeepSpeed cuts it while it is made.

PLAIN: dict[str, Any] = {"bf16": False, "gradient_checkpointing": False}  # which TRL has by default
GENERATING: dict[str, Any] = {
    "max_steps": 3,
    "gradient_accumulation_steps": 2,
    "num_generations": 4,
    "max_completion_length": 6,
    "max_grad_norm": 0.5,
    "beta": 0.0,  # else RLOO looks for the reference model on a hub
}


def sft(folder: Path | str, model: Callable[[], Any], **options: Any) -> Any:
    import trl

    sequences = [Counting()[i]["input_ids"].tolist() for i in range(64)]
    basic = {"max_steps": 4, "dataset_kwargs": {"skip_prepare_dataset": True}}
    kinds = trl.SFTConfig, trl.SFTTrainer
    return _trl(kinds, folder, model, {"input_ids": sequences, "labels": sequences}, {**basic, **options})


def _trl(
    kinds: tuple[Any, Any], folder: Path | str, model: Callable[[], Any], data: Any, options: Any, **more: Any
) -> Any:
    import datasets

    args = kinds[0](output_dir=str(folder), **{**BASIC, **PLAIN, **options})
    given = datasets.Dataset.from_dict(data)
    return kinds[1](model=model(), args=args, train_dataset=given, processing_class=tokenizer_of(), **more)


def even_tokens(completion_ids: Sequence[Sequence[int]], **others: Any) -> list[float]:
    return [sum(token % 2 == 0 for token in tokens) / len(tokens) for tokens in completion_ids]


def generating(kind: str, folder: Path | str, model: Callable[[], Any], **options: Any) -> Any:
    """``kind``: "GRPO" or "RLOO". The reward is the share of even tokens."""
    import datasets
    import trl

    kinds = {"GRPO": (trl.GRPOConfig, trl.GRPOTrainer), "RLOO": (trl.RLOOConfig, trl.RLOOTrainer)}[kind]
    prompts = {"prompt": [f"w{i} w{i + 1} w{i + 2}" for i in range(2, 60)]}
    more = {"reward_funcs": even_tokens, "eval_dataset": datasets.Dataset.from_dict(prompts).select(range(2))}
    return _trl(kinds, folder, model, prompts, {**GENERATING, **options}, **more)
