"""What cases train: small models, recorded data, configs, and one loop that reports everything a test compares."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor, nn

OURS = {"device": "superoffload"}
STOCK = {"device": "cpu"}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(torch.nn.functional.gelu(self.up(self.norm(x))))
        return x + out


class Small(nn.Module):
    """Odd sizes, so that partitions are padded; ``extra`` is used only where a case asks for it."""

    def __init__(self, width: int = 33, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(61, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.extra = nn.Linear(width, width)
        self.head = nn.Linear(width, 61)

    def forward(self, tokens: Tensor, targets: Tensor, use_extra: bool = True) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        if use_extra:
            x = x + self.extra(x)
        logits = self.head(x).float()
        return nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


class Dot(nn.Module):
    """Its gradient is what it is called with, whatever the weights are."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape) * 0.05)

    def forward(self, gradient: Tensor) -> Tensor:
        return (self.weight.float() * gradient).sum()


class Recorded(nn.Module):
    """Gradients that do not depend on the weights: two optimizers get the same ones, however long they train.

    Odd sizes, so that partitions are padded; (1,) leaves a rank without a single element.
    """

    SHAPES = ((61, 33), (1,), (129,), (40, 50), (7, 11, 13), (2048,), (3,))

    def __init__(self) -> None:
        super().__init__()
        self.dots = nn.ModuleList(Dot(*shape) for shape in self.SHAPES)

    def forward(
        self, step: int, micro: int = 0, skip: Sequence[int] = (), poison: Mapping[int, float] | None = None
    ) -> Tensor:
        """``skip``: dots not used; ``poison``: a value for one element of a dot's gradient."""
        total = torch.zeros(())
        for index, dot in enumerate(self.dots):
            if index in skip:
                continue
            gradient = recorded_gradient(step, micro, dist.get_rank(), index, self.SHAPES[index])
            if poison and index in poison:
                gradient.view(-1)[gradient.numel() // 2] = poison[index]
            total = total + dot(gradient)
        return total


def recorded_gradient(step: int, micro: int, rank: int, index: int, shape: tuple[int, ...]) -> Tensor:
    """Norms over a decade, so that some steps are clipped and some are not."""
    generator = torch.Generator().manual_seed(((step * 16 + micro) * 16 + rank) * 16 + index)
    size = 0.01 * 10 ** (0.5 * ((step * 7) % 5 - 2) / 2)
    return torch.randn(shape, generator=generator) * size


def config(
    offload: dict[str, Any] | None = None,
    *,
    precision: str = "bf16",
    clip: float = 0.0,
    accumulation: int = 1,
    optimizer: dict[str, Any] | None = None,
    zero: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
    kind: str = "AdamW",
    **more: Any,
) -> dict[str, Any]:
    """A DeepSpeed config with small buckets, so that several reductions happen in a backward."""
    offload = dict(OURS if offload is None else offload)
    result: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clip,
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {**offload, "pin_memory": False},
            "reduce_bucket_size": 4000,
            "stage3_prefetch_bucket_size": 4000,
            "stage3_param_persistence_threshold": 0,
            **(zero or {}),
        },
        "optimizer": {
            "type": kind,
            "params": {"lr": 3e-3, "weight_decay": 0.1, "torch_adam": True, **(optimizer or {})},
        },
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
        **more,
    }
    if precision == "bf16":
        result["bf16"] = {"enabled": True}
    elif precision != "fp32":
        result["fp16"] = {"enabled": True, **({} if precision == "fp16" else {"loss_scale": float(precision[5:])})}
        if precision == "fp16":
            result["fp16"].update(initial_scale_power=10, loss_scale_window=2, hysteresis=1)
    if "device" in offload and (offload["device"] == "superoffload" or offload.get("super_offload")):
        result["superoffload"] = {"bucket_numel": 4096, **(options or {})}
    return result


def make_engine(configuration: dict[str, Any], model: nn.Module | None = None, **arguments: Any) -> Any:
    """An engine on a model with the same initial weights on every rank and in every run."""
    import deepspeed

    import superoffload.integrations.deepspeed as ours

    ours.enable()
    if model is None:
        torch.manual_seed(1)
        model = Small()
    if "optimizer" not in arguments:
        arguments.setdefault("model_parameters", [p for p in model.parameters() if p.requires_grad])
    engine, *_ = deepspeed.initialize(model=model, config=configuration, **arguments)
    return engine


def batch(step: int, micro: int = 0) -> tuple[Tensor, Tensor]:
    """Different on every rank."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + dist.get_rank())
    tokens = torch.randint(0, 61, (2, 8), generator=generator)
    return tokens, (tokens * 7 + 3) % 61


Micro = Callable[[Any, int, int], Tensor]


def plain(engine: Any, step: int, micro: int) -> Tensor:
    loss: Tensor = engine(*batch(step, micro))
    return loss


def run_steps(
    engine: Any,
    steps: range,
    *,
    micros: int = 1,
    loss_of: Micro = plain,
    before_step: Callable[[Any, int], None] | None = None,
    one_step_call: bool = False,
) -> dict[str, Any]:
    """Trains and records what stock and ours must agree on. ``one_step_call``: unmanaged accumulation."""
    record: dict[str, list[Any]] = {name: [] for name in ("losses", "norms", "applied", "scales", "lrs")}
    for step in steps:
        for micro in range(micros):
            loss = loss_of(engine, step, micro)
            engine.backward(loss)
            last = micro == micros - 1
            if last and before_step is not None:
                before_step(engine, step)
            if last or not one_step_call:
                engine.step()
        record["losses"].append(float(loss))
        record["norms"].append(float(engine.get_global_grad_norm() or 0.0))
        record["applied"].append(bool(engine.was_step_applied()))
        record["scales"].append(float(engine.optimizer.loss_scale))
        record["lrs"].append([float(lr) for lr in engine.get_lr()])
    return record


def masters(engine: Any) -> dict[str, Tensor]:
    """Full fp32 masters by name."""
    from deepspeed.utils import safe_get_full_fp32_param

    return {
        name: safe_get_full_fp32_param(param).clone()
        for name, param in engine.module.named_parameters()
        if param.requires_grad
    }


def end(engine: Any) -> None:
    """Ends an engine within a case."""
    engine.destroy()
