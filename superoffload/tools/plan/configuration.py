"""Writes the configuration to paste for settings: a DeepSpeed JSON, or Python from the model to the end of a step."""

from __future__ import annotations

import json
from typing import Any

from superoffload.tools.plan.memory_estimate import Settings

_CLIPPING = 1.0
_LEARNING_RATE = "3e-4"
_OFFLOAD = {
    "zero-offload": {"device": "cpu", "pin_memory": True},
    "deepspeed-superoffload": {
        "device": "cpu", "pin_memory": True, "super_offload": True, "ratio": 0.9, "cpuadam_cores_perc": 0.9,
    },
    "superoffload": {"device": "superoffload", "pin_memory": True},
}  # fmt: skip
_CHECKPOINTING = "model.gradient_checkpointing_enable()"


def configuration(settings: Settings) -> str:
    """Returns JSON for ZeRO; else Python that expects `model` on its device, and `batch` or a list `micro_batches`.

    As in Hugging Face's models, `model.layers` are the blocks, and `model(batch).loss` is the mean loss.
    """
    return _deepspeed(settings) if settings.sharding.startswith("zero") else "\n".join(_python(settings))


def configuration_notes(settings: Settings) -> list[str]:
    """Returns what the script needs beside a DeepSpeed JSON."""
    if not settings.sharding.startswith("zero"):
        return []
    notes = ["the DeepSpeed configuration; deepspeed.initialize(model=model, config=...) takes it"]
    if settings.engine == "superoffload":
        notes.append("before that, in the script: superoffload.integrations.deepspeed.enable()")
    if settings.checkpointing == "full":
        notes.append(f"and for activations: {_CHECKPOINTING}")
    return notes


def _deepspeed(settings: Settings) -> str:
    zero: dict[str, Any] = {
        "stage": int(settings.sharding[-1]),
        "overlap_comm": True,
        "contiguous_gradients": True,
    }
    if settings.engine in _OFFLOAD:
        zero["offload_optimizer"] = _OFFLOAD[settings.engine]
    parameters: dict[str, Any] = {"lr": float(_LEARNING_RATE)}
    if settings.engine == "torch":
        parameters.update(torch_adam=True, fused=True)  # torch's own, since DeepSpeed's would have to be compiled
    values = {
        "bf16": {"enabled": True},
        "train_micro_batch_size_per_gpu": settings.micro_batch,
        "gradient_accumulation_steps": settings.accumulation,
        "gradient_clipping": _CLIPPING,
        "optimizer": {"type": "AdamW", "params": parameters},
        "zero_optimization": zero,
    }
    leaner = {"state_dtype": settings.state_dtype, "master_dtype": settings.master_dtype}
    leaner = {name: dtype for name, dtype in leaner.items() if dtype != "fp32"}
    if leaner:
        values["superoffload"] = leaner
    return json.dumps(values, indent=2)


def _python(settings: Settings) -> list[str]:
    ours = settings.engine == "superoffload"
    lines = ["import torch"]
    if settings.sharding == "fsdp2":
        lines.append("from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard")
    if ours:
        lines += ["", "import superoffload"]
    lines.append("")
    if settings.ranks > 1:
        lines += ["if not torch.distributed.is_initialized():", "    torch.distributed.init_process_group()"]
    if ours:
        lines.append("model = model.to(torch.bfloat16)  # the optimizer keeps fp32 masters")
    else:
        lines.append("model = model.to(torch.float32)  # the parameters are the masters; bf16 is for the arithmetic")
    if settings.checkpointing == "full":
        lines.append(f"{_CHECKPOINTING}  # before wrapping; so called in Hugging Face's models")
    return [*lines, *_wrapping(settings), _optimizer(settings), "", *_one_step(settings)]


def _wrapping(settings: Settings) -> list[str]:
    if settings.sharding == "fsdp2":
        return [
            "policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)",
            "for block in model.layers:  # your model's list of blocks",
            "    fully_shard(block, mp_policy=policy)",
            "fully_shard(model, mp_policy=policy)",
        ]
    return ["model = torch.nn.parallel.DistributedDataParallel(model)"] if settings.is_replicated else []


def _optimizer(settings: Settings) -> str:
    arguments = [f"lr={_LEARNING_RATE}"]
    if settings.engine == "torch":
        return f"optimizer = torch.optim.AdamW(model.parameters(), {arguments[0]}, fused=True)"
    arguments += [f"max_grad_norm={_CLIPPING}", "model=model"]
    if settings.is_replicated:
        arguments.append('replicated="shard"')
    if settings.state_dtype != "fp32":
        arguments.append(f'state_dtype="{settings.state_dtype}"')
    if settings.master_dtype == "split":
        arguments.append('master_dtype="split"')
    if settings.gradient_bytes == 4:
        arguments.append('accumulate_dtype="fp32"')
    if settings.gpu_fraction > 0:
        arguments.append(f'placement={{"gpu_fraction": {settings.gpu_fraction:g}}}')
    parts = ["model.parameters()", *arguments]
    return "optimizer = superoffload.AdamW(\n    " + ",\n    ".join(parts) + ",\n)"


def _one_step(settings: Settings) -> list[str]:
    """Returns the lines of one step; torch's AdamW needs its own line to clip, superoffload's clips itself."""
    ours, several = settings.engine == "superoffload", settings.accumulation > 1
    title = f"# one step of each rank, {settings.accumulation} x {settings.micro_batch} sequences"
    lines = [title, "optimizer.zero_grad()"]
    if several:
        lines += ["for micro_batch in micro_batches[:-1]:", *_indented(_not_the_last(settings))]
    lines += [*_loss(settings, "micro_batches[-1]" if several else "batch"), "loss.backward()"]
    if not ours:
        lines.append(f"torch.nn.utils.clip_grad_norm_(model.parameters(), {_CLIPPING})")
    return [*lines, "optimizer.step()"]


def _loss(settings: Settings, batch: str) -> list[str]:
    loss = f"loss = model({batch}).loss" + (" / len(micro_batches)" if settings.accumulation > 1 else "")
    if settings.engine == "torch" and settings.sharding == "none":
        return ['with torch.autocast("cuda", dtype=torch.bfloat16):', *_indented([loss])]
    return [loss]


def _not_the_last(settings: Settings) -> list[str]:
    contexts = ["model.no_sync()"] if settings.is_replicated else []
    if settings.engine == "superoffload":
        contexts.append("optimizer.accumulate()")
    body = [*_loss(settings, "micro_batch"), "loss.backward()"]
    return [f"with {', '.join(contexts)}:", *_indented(body)] if contexts else body


def _indented(lines: list[str]) -> list[str]:
    return ["    " + line for line in lines]
