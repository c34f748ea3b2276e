"""A plugin for Axolotl: its trainers train with ``superoffload.AdamW`` after a few lines of YAML.

    plugins:
      - superoffload.integrations.axolotl.SuperOffloadPlugin
    superoffload:
      state_dtype: bf16

docs/frameworks.md#axolotl has what changes and what is refused.
"""

from __future__ import annotations

from typing import Any, Literal

from superoffload.integrations.transformers import names_of, offload

try:
    from axolotl.integrations.base import BasePlugin
    from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
except ImportError as error:
    raise ImportError(f"superoffload.integrations.axolotl needs axolotl 0.19 and what it imports: {error}") from error

_ADAMW = ("adamw_torch", "adamw_torch_fused")
_TOP_LEVEL = {
    "lr": "learning_rate",
    "learning_rate": "learning_rate",
    "betas": "adam_beta1 and adam_beta2",
    "eps": "adam_epsilon",
    "weight_decay": "weight_decay",
    "max_grad_norm": "max_grad_norm",
}
# Settings with which Axolotl makes groups of its own; without them it leaves that to Trainer.
_GROUPS = ("loraplus_lr_ratio", "embedding_lr_scale", "embedding_lr", "lr_groups")


class Options(BaseModel):
    """Has what may stand below ``superoffload:``: arguments of ``offload()`` and of ``superoffload.AdamW``."""

    model_config = ConfigDict(extra="forbid", strict=True)

    metrics: bool | Literal["all"] | list[str] | None = None
    sleep: bool | None = None
    speculation: Literal["adaptive", "always", "never"] | None = None
    delivery: Literal["eager", "on_demand"] | None = None
    keep_grads: bool | None = None
    placement: Literal["auto"] | dict[Literal["gpu_fraction"], float] | None = None
    bucket_numel: int | None = Field(None, ge=1)
    threads: int | None = Field(None, ge=1)
    rank_check: Literal["off", "light", "full"] | dict[Literal["full"], int] | None = None
    trace: str | None = None
    replicated: Literal["replicate", "shard"] | None = None
    rank_timeout: float | None = Field(None, gt=0)
    state_dtype: Literal["fp32", "bf16", "8bit"] | None = None
    master_dtype: Literal["fp32", "split"] | None = None
    accumulate_dtype: Literal["fp32"] | None = None
    seed: int | None = Field(None, ge=0)
    maximize: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _know(cls, given: Any) -> Any:
        """Says where a setting belongs, or which there are; pydantic names neither."""
        known = cls.model_fields
        for name in given if isinstance(given, dict) else ():
            if name in _TOP_LEVEL:
                raise ValueError(f"{name}={given[name]!r}: set {_TOP_LEVEL[name]} at the configuration's top level")
            if name not in known:
                raise ValueError(f"{name}={given[name]!r}: no such setting, expected some of {', '.join(known)}")
        return given

    @field_validator("metrics")
    @classmethod
    def _name_metrics(cls, metrics: Any) -> Any:
        names_of(metrics or False)
        return metrics


class Arguments(BaseModel):
    """Is mixed into Axolotl's configuration, and refuses what the plugin cannot train before a model is loaded."""

    superoffload: Options | None = None

    @model_validator(mode="after")
    def _train_with_adamw(self) -> Arguments:
        config: Any = self  # Axolotl's whole configuration
        optimizer = getattr(config.optimizer, "value", config.optimizer)
        if optimizer not in _ADAMW:
            raise ValueError(
                f"optimizer: {optimizer!r}, expected {_ADAMW[1]!r}: superoffload computes AdamW; for bf16 or 8-bit "
                "moments set state_dtype below superoffload"
            )
        if config.optim_args:
            raise ValueError(f"optim_args: {config.optim_args!r}, expected none; options are set below superoffload")
        if config.deepspeed:
            raise ValueError(
                f"deepspeed: {config.deepspeed!r}, expected none: this plugin is for one process, DDP and FSDP2; with "
                "ZeRO-3 leave it out and use superoffload.integrations.deepspeed (docs/deepspeed.md)"
            )
        version = config.fsdp_version or getattr(config.fsdp_config, "fsdp_version", None)
        if (config.fsdp or config.fsdp_config) and str(version) != "2":
            raise ValueError(f"fsdp_version: {version!r}, expected 2: superoffload knows the shards of FSDP2 alone")
        if config.relora:
            raise ValueError("relora: True, expected false: it prunes the optimizer's moments; not tried here")
        return self


class SuperOffloadPlugin(BasePlugin):
    """Has Axolotl's trainers, causal and of preferences, train with ``superoffload.AdamW``."""

    def get_input_args(self) -> str:
        return f"{__name__}.{Arguments.__name__}"

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        offload(trainer, **dict(cfg.superoffload or {}))
        _keep_groups(trainer)


def _keep_groups(trainer: Any) -> None:
    """Leaves the groups as they are without the plugin. OptimizerMixin takes any optimizer that it is given as a
    reason to make its own groups, in which embeddings do not decay."""
    from axolotl.core.trainers.mixins.optimizer import OptimizerMixin  # loads all trainers, so not with a configuration

    if isinstance(trainer, OptimizerMixin) and all(getattr(trainer.args, name) is None for name in _GROUPS):
        trainer.create_optimizer = super(OptimizerMixin, trainer).create_optimizer
