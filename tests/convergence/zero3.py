"""Adapts ZeRO-3 with superoffload behind ``offload_optimizer`` to the other engines' terms, as engine ``deepspeed``."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.training.model import DTYPES, build_model
from tests.convergence.engines import Step, train_in_a_loop, world
from tests.convergence.setup import Setup


class Zero3:
    """Trains parameters in bf16 (or fp32); DeepSpeed reduces and accumulates gradients in fp32."""

    def __init__(self, setup: Setup, speculation: str) -> None:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "error")
        os.environ.setdefault("LOCAL_SIZE", "1")  # otherwise every reduction runs numactl, to count one device
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")  # at every gather
        import deepspeed

        import superoffload.integrations.deepspeed as ours

        ours.enable()
        # Gloo's collectives: DeepSpeed's own take a minute to compile, and ranks that wait in them spin.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
        model = build_model(setup.model, DTYPES[setup.dtype], torch.float32, setup.seed)
        tables = model.cos.clone(), model.sin.clone()
        parameters = [param for param in model.parameters() if param.requires_grad]
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=parameters, config=configuration(setup, speculation)
        )
        model.set_rotary_tables(*tables)  # DeepSpeed has rounded the buffers along with the parameters
        self.engine: Any = engine
        self.model: nn.Module = model
        self._poisoned = model.head.weight
        self.optimizer = _Optimizer(engine)

    def train(self, step: Step) -> tuple[float, float]:
        return train_in_a_loop(self, step)

    def backward(self, micro_batches: Sequence[Tensor], scale: float) -> float:
        losses = []
        for micro, tokens in enumerate(micro_batches):
            if micro:
                self.engine.step()  # not the boundary yet
            logits = self.engine(tokens[:, :-1])
            loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
            self.engine.backward(loss * scale)
            losses.append(loss.item())
        return math.fsum(losses) / len(losses)

    @property
    def share(self) -> tuple[int, int]:
        return world()

    def poison(self, last_rank: bool) -> None:
        if last_rank:
            self.engine.optimizer.parts.gradients.partition_of(self._poisoned, write=True)[0] = math.nan

    def weights(self) -> dict[str, Tensor]:
        from deepspeed.utils import safe_get_full_fp32_param

        return {name: safe_get_full_fp32_param(param).clone() for name, param in self.model.named_parameters()}

    def digests(self) -> dict[str, str]:
        digests: dict[str, str] = self.engine.optimizer.state_digests()
        return digests

    def stats(self) -> dict[str, Any]:
        stats: dict[str, Any] = self.engine.optimizer.stats()
        return stats

    def close(self) -> None:
        self.engine.destroy()


class _Optimizer:
    """Presents DeepSpeed's engine to a training loop as an optimizer."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    @property
    def param_groups(self) -> Any:
        return self._engine.optimizer.param_groups

    @property
    def max_grad_norm(self) -> float | None:
        return self._engine.optimizer.clip_grad or None

    @max_grad_norm.setter
    def max_grad_norm(self, value: float | None) -> None:
        self._engine.optimizer.clip_grad = value or 0.0

    @property
    def grad_norm(self) -> float:
        return float(self._engine.get_global_grad_norm())

    def zero_grad(self) -> None:
        self._engine.optimizer.zero_grad()

    def step(self) -> None:
        self._engine.step()


def configuration(setup: Setup, speculation: str) -> dict[str, Any]:
    """Returns DeepSpeed's JSON, with small buckets, so that a backward has several reductions."""
    world = torch.distributed.get_world_size()
    return {
        "train_micro_batch_size_per_gpu": setup.batch // (world * setup.micro_batches),
        "gradient_accumulation_steps": setup.micro_batches,
        "gradient_clipping": setup.max_grad_norm,
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        "bf16": {"enabled": setup.dtype == "bf16"},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "superoffload", "pin_memory": False},
            "reduce_bucket_size": 8 * setup.bucket_numel,
            "stage3_prefetch_bucket_size": 8 * setup.bucket_numel,
            "stage3_param_persistence_threshold": 0,
        },
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": setup.lr, "betas": [0.9, 0.95], "weight_decay": 0.1, "torch_adam": True},
        },
        "superoffload": {"speculation": speculation, "bucket_numel": setup.bucket_numel, "threads": 1},
        "steps_per_print": 10**9,
    }
