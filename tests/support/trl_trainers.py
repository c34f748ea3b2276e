"""Trainers of TRL for small models: supervised, and two that generate what they learn from.

The model is made behind the arguments: by these Transformers knows whether DeepSpeed cuts it while it is made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.support.hugging_face import Counting, tokenizer_of

BASIC: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "learning_rate": 3e-3,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "use_cpu": True,
    "bf16": False,
    "disable_tqdm": True,
    "seed": 3,
    "gradient_checkpointing": False,
    "optim": "adamw_torch",
}
GENERATING: dict[str, Any] = {
    "max_steps": 3,
    "gradient_accumulation_steps": 2,
    "num_generations": 4,
    "max_completion_length": 6,
    "max_grad_norm": 0.5,
    "beta": 0.0,  # else RLOO looks for the reference model on a hub
}


def sft(folder: Path | str, model: Callable[[], Any], **options: Any) -> Any:
    import datasets
    import trl

    sequences = [Counting()[i]["input_ids"].tolist() for i in range(64)]
    basic = {**BASIC, "max_steps": 4, "dataset_kwargs": {"skip_prepare_dataset": True}}
    args = trl.SFTConfig(output_dir=str(folder), **{**basic, **options})
    return trl.SFTTrainer(
        model=model(),
        args=args,
        train_dataset=datasets.Dataset.from_dict({"input_ids": sequences, "labels": sequences}),
        processing_class=tokenizer_of(),
    )


def even_tokens(completion_ids: Sequence[Sequence[int]], **others: Any) -> list[float]:
    return [sum(token % 2 == 0 for token in tokens) / len(tokens) for tokens in completion_ids]


def generating(kind: str, folder: Path | str, model: Callable[[], Any], **options: Any) -> Any:
    """``kind``: "GRPO" or "RLOO". The reward is the share of even tokens."""
    import datasets
    import trl

    config, trainer = {"GRPO": (trl.GRPOConfig, trl.GRPOTrainer), "RLOO": (trl.RLOOConfig, trl.RLOOTrainer)}[kind]
    prompts = datasets.Dataset.from_dict({"prompt": [f"w{i} w{i + 1} w{i + 2}" for i in range(2, 60)]})
    args = config(output_dir=str(folder), **{**BASIC, **GENERATING, **options})
    return trainer(
        model=model(),
        reward_funcs=even_tokens,
        args=args,
        train_dataset=prompts,
        eval_dataset=prompts.select(range(2)),
        processing_class=tokenizer_of(),
    )
