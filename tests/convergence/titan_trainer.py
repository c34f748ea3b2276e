"""Trains a small Llama 3 of torchtitan with torchtitan's Trainer, as engines ``titan`` and ``plain-titan``.

Its configuration alone decides between ``superoffload.AdamW`` and torchtitan's own AdamW, shards with ``fully_shard``
over all ranks, and on four or more ranks in pairs adds tensor parallelism over two. Clipping, accumulation, learning
rates, loss and norm are torchtitan's too. Ours are the text, the trouble, and what
examples.torchtitan.on_cpus changes so that torchtitan runs on processors.
"""

from __future__ import annotations

import gc
import logging
import math
import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.training.config import ModelConfig
from examples.torchtitan.on_cpus import prepare, without_flex_attention
from tests.convergence.engines import BaseEngine, Step, put_nan, whole
from tests.convergence.meshes import PAIR
from tests.convergence.setup import Setup


class Titan(BaseEngine):
    """Trains with ``superoffload.AdamW``: fp32 parameters, cast to bf16 for compute, as torchtitan does by default."""

    def __init__(self, setup: Setup, speculation: str) -> None:
        for name in ("", "torch.distributed.tensor"):  # torchtitan's logger is the root; both warn of what is intended
            logging.getLogger(name).setLevel(logging.ERROR)
        warnings.filterwarnings("ignore", message="DTensor")  # of random numbers on processors
        prepare()
        self._logged = _Logged()
        self._trainer = make_trainer(_configuration(setup, speculation, ours=self.ours), self._logged)
        (self.inner,) = self._trainer.model_parts
        self.model = self.inner
        self.optimizer = self._trainer.optimizers.adamw if self.ours else self._trainer.optimizers

    def train(self, step: Step) -> tuple[float, float]:
        self._trainer.train_with(step)
        return self._logged.loss, self._logged.norm

    @torch.no_grad()
    def weights(self) -> dict[str, Tensor]:
        return {name: whole(param).clone() for name, param in self.model.named_parameters()}

    @property
    def share(self) -> tuple[int, int]:
        mesh = self._trainer.parallel_dims.get_optional_mesh("batch")
        return (0, 1) if mesh is None else (mesh.get_local_rank(), mesh.size())

    def close(self) -> None:
        super().close()
        self._trainer.close()
        gc.enable()  # the Trainer has switched it off


class PlainTitan(Titan):
    """Trains with torchtitan's own AdamW, which leaves out the steps whose gradients are not finite, as ours does."""

    ours = False


@dataclass
class _Logged:
    """Is a logger of torchtitan's metrics that keeps those of the last step."""

    loss: float = math.nan
    norm: float = math.nan

    def log(self, metrics: dict[str, Any], step: int) -> None:
        self.loss, self.norm = metrics["loss_metrics/global_avg_loss"], metrics["grad_norm"]

    def close(self) -> None: ...


class _NoData:
    """Stands where torchtitan's configuration has data and a tokenizer: the batches are those of ``Step``."""

    def build(self, **_: Any) -> None: ...


def make_trainer(config: Any, logged: _Logged) -> Any:
    """Returns torchtitan's Trainer with the method ``train_with``."""
    from superoffload.integrations.torchtitan import Optimizers, Trainer

    class Troubled(Trainer):
        """Is our Trainer of docs/frameworks.md#torchtitan with batches and trouble that are given step by step."""

        def __init__(self) -> None:
            super().__init__(config)
            self.metrics_processor.logger = logged
            self.model_parts[0].register_forward_hook(self._scaled)
            if not isinstance(self.optimizers, Optimizers):
                self.optimizers.register_step_pre_hook(self._leave_out)

        def train_with(self, step: Step) -> None:
            self._step, self._backward_passes = step, 0
            self.gradient_accumulation_steps = len(step.micro_batches)
            # The optimizer hears of it after backward: it has speculated with the norm of the step before.
            self.config.training.max_norm = step.max_grad_norm if step.late_norm is None else step.late_norm
            self.step += 1
            self.train_step(self.batch_generator(map(_with_labels, step.micro_batches)))

        def forward_backward_step(self, **inputs: Any) -> Any:
            loss = super().forward_backward_step(**inputs)
            self._backward_passes += 1
            if self._step.nan and self._step.last_rank and self._backward_passes == len(self._step.micro_batches):
                put_nan(self.model_parts[0].parameters())
            return loss

        def _scaled(self, model: Any, given: Any, made: Tensor) -> None:
            """Scales the gradients. The Trainer would end with an error where the loss is not finite."""
            if self._step.scale != 1.0:
                made.register_hook(lambda grad, scale=self._step.scale: grad * scale)

        def _leave_out(self, optimizers: Any, *_: Any) -> None:
            if self._step.broken:
                optimizers.zero_grad()

    return Troubled()


def _with_labels(tokens: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    given, labels = tokens[:, :-1], tokens[:, 1:]
    return {"input": given, "positions": torch.arange(given.shape[1]).expand_as(given)}, labels


def _configuration(setup: Setup, speculation: str, *, ours: bool) -> Any:
    from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
    from torchtitan.config import DebugConfig, ParallelismConfig, TrainingConfig
    from torchtitan.models.llama3 import model_registry

    from superoffload.integrations.torchtitan import Trainer, offload

    spec = without_flex_attention(_resized(model_registry("debugmodel"), setup.model))
    ranks = dist.get_world_size()
    pairs = PAIR if ranks > PAIR and ranks % PAIR == 0 else 1
    adamw = default_adamw(lr=setup.lr)
    options = {name: getattr(setup, name) for name in ("bucket_numel", "delivery", "rank_check")}
    return Trainer.Config(
        loss=CrossEntropyLoss.Config(global_vocab_size=spec.model.vocab_size),
        model_spec=spec,
        optimizer=offload(adamw, speculation=speculation, threads=1, **options) if ours else adamw,
        tokenizer=_NoData(),
        dataloader=_NoData(),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=setup.warmup, min_lr_factor=0.1),
        training=TrainingConfig(
            local_batch_size=setup.batch * pairs // (ranks * setup.micro_batches),
            global_batch_size=setup.batch,
            seq_len=setup.model.sequence,
            steps=setup.steps,
            max_norm=setup.max_grad_norm,
            mixed_precision_param={"bf16": "bfloat16", "fp32": "float32"}[setup.dtype],
            disable_cuda_graphs=True,
        ),
        metrics=MetricsProcessor.Config(log_freq=1, disable_color_printing=True),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor", tensor_parallel_degree=pairs),
        activation_checkpoint=None,
        checkpoint=CheckpointManager.Config(enable=False),
        debug=DebugConfig(seed=setup.seed, enable_structured_logging=False),
    )


def _resized(spec: Any, size: ModelConfig) -> Any:
    """Returns the ``spec`` of a Llama 3 with the sizes of the other engines' model."""
    from torchtitan.models import llama3

    model, tokens, width = spec.model, size.vocabulary, size.hidden
    layers = llama3._build_llama3_layers(
        n_layers=size.layers, dim=width, n_heads=size.heads, n_kv_heads=size.kv_heads, hidden_dim=size.mlp,
        rope=replace(model.layers[0].attention.rope, dim=size.head_width), attn_backend="flex",
    )  # fmt: skip
    ends = {
        "tok_embeddings": replace(model.tok_embeddings, num_embeddings=tokens, embedding_dim=width),
        "norm": replace(model.norm, normalized_shape=width),
        "lm_head": replace(model.lm_head, in_features=width, out_features=tokens),
    }
    return replace(spec, model=replace(model, dim=width, vocab_size=tokens, layers=layers, **ends))
