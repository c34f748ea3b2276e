"""Adapts DeepSpeed's ZeRO with superoffload behind ``offload_optimizer`` to the other engines' terms, as engines
``deepspeed`` (stage 3) and ``zero2``."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from tests.convergence.engines import BaseEngine, Step, next_token_loss, world
from tests.convergence.setup import Setup


class Zero3(BaseEngine):
    """Trains parameters in bf16 (or fp32); DeepSpeed reduces and accumulates gradients in fp32."""

    stage = 3

    def build(self, setup: Setup) -> Any:
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
        return super().build(setup)

    def make_optimizer(self, setup: Setup, speculation: str) -> Any:
        import deepspeed

        tables = self.inner.cos.clone(), self.inner.sin.clone()
        parameters = [param for param in self.inner.parameters() if param.requires_grad]
        self.engine, *_ = deepspeed.initialize(
            model=self.inner, model_parameters=parameters, config=configuration(setup, speculation, self.stage)
        )
        self.inner.set_rotary_tables(*tables)  # DeepSpeed has rounded the buffers along with the parameters
        return self.engine.optimizer

    def train(self, step: Step) -> tuple[float, float]:
        for group in self.optimizer.param_groups:
            group["lr"] = step.lr
        self.optimizer.clip_grad = step.max_grad_norm
        loss = self.backward(step.micro_batches, step.scale)
        if step.nan:
            self.poison(step.last_rank)
        if step.late_norm is not None:
            self.optimizer.clip_grad = step.late_norm
        self.engine.step()
        return loss, float(self.engine.get_global_grad_norm())

    def backward(self, micro_batches: Sequence[Tensor], scale: float) -> float:
        losses = []
        for micro, tokens in enumerate(micro_batches):
            if micro:
                self.engine.step()  # not the boundary yet
            loss = next_token_loss(self.engine, tokens)
            self.engine.backward(loss * scale)
            losses.append(loss.item())
        return math.fsum(losses) / len(losses)

    def poison(self, last_rank: bool) -> None:
        if last_rank:  # which has the end of it in every stage
            self.engine.optimizer.parts.gradients.partition_of(self.inner.head.weight, write=True)[0] = math.nan

    def weights(self) -> dict[str, Tensor]:
        from deepspeed.utils import safe_get_full_fp32_param

        return {name: safe_get_full_fp32_param(param).clone() for name, param in self.inner.named_parameters()}

    def close(self) -> None:
        self.engine.destroy()


class Zero2(Zero3):
    stage = 2


def configuration(setup: Setup, speculation: str, stage: int) -> dict[str, Any]:
    """Returns DeepSpeed's JSON, with small buckets, so that a backward has several reductions."""
    return {
        "train_micro_batch_size_per_gpu": setup.batch // (world()[1] * setup.micro_batches),
        "gradient_accumulation_steps": setup.micro_batches,
        "gradient_clipping": setup.max_grad_norm,
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        "bf16": {"enabled": setup.dtype == "bf16"},
        "zero_optimization": {
            "stage": stage,
            "offload_optimizer": {"device": "superoffload", "pin_memory": False},
            "reduce_bucket_size": 8 * setup.bucket_numel,
            "stage3_prefetch_bucket_size": 8 * setup.bucket_numel,
            "stage3_param_persistence_threshold": 0,
        },
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": setup.lr, "betas": [0.9, 0.95], "weight_decay": 0.1, "torch_adam": True},
        },
        "superoffload": {
            "speculation": speculation,
            "bucket_numel": setup.bucket_numel,
            "threads": 1,
            "rank_check": setup.rank_check,
        },
        "steps_per_print": 10**9,
    }
