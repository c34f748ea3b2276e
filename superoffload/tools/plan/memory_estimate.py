"""Estimates the peak memory of a run, by component, per GPU and per rank's share of the host."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from superoffload.engine.journal_reservation import JOURNAL_BYTES_PER_PARAM
from superoffload.errors import ArgumentError
from superoffload.tools.plan.machines import GB, Hardware
from superoffload.tools.plan.models import ModelShape

ENGINES = ("torch", "zero-offload", "deepspeed-superoffload", "superoffload")
SHARDINGS = ("none", "zero1", "zero2", "zero3", "fsdp2")
CHECKPOINTING = ("none", "full")

CONTEXT_BYTES = 1.5e9  # CUDA context, cuBLAS and NCCL
FRAGMENTATION = 0.15  # of a GPU's memory, which the caching allocator cannot reuse; docs/plan.md has the reasons
HOST_RESERVE = 16e9  # operating system, Python, data loading
HOST_RESERVE_SHARE = 0.25  # the largest part of a host's memory that the reserve takes
GATHERED_ELEMENTS = 1e9  # DeepSpeed's stage3_max_live_parameters, and its sub_group_size
REDUCE_ELEMENTS = 2 * 5e8  # two reduce buckets: one is in use while the other is filled
BUCKET_ELEMENTS = 32 << 20  # this project's largest bucket; four are in flight at once
JOURNAL = "journal, reserved"
MOMENTS_BYTES = {"fp32": 8.0, "bf16": 4.0, "8bit": 2 + 2 / 256}  # of both; 256 codes of eight bits share a scale
GPU_SHARE = 0.10  # of the optimizer, which DeepSpeed SuperOffload's examples keep on the GPU


def keeps_less(engine: str) -> bool:
    """Returns whether there are bf16 and 8-bit moments and split masters."""
    return engine == "superoffload"


@dataclass(frozen=True)
class Settings:
    """Holds a run's settings: `micro_batch` sequences per rank, `accumulation` of them per step.

    `clip_rate`: share of the steps that clip. `gpu_fraction`: of the optimizer's state, on the GPU (``placement``).
    """

    engine: str = "superoffload"
    sharding: str = "none"
    ranks: int = 1
    sequence: int = 2048
    micro_batch: int = 1
    accumulation: int = 1
    checkpointing: str = "none"
    clip_rate: float = 0.0
    utilization: float = 0.40
    state_dtype: str = "fp32"
    master_dtype: str = "fp32"
    gpu_fraction: float = 0.0
    gradient_dtype: str = "bf16"

    def __post_init__(self) -> None:
        for name, choices in (("engine", ENGINES), ("sharding", SHARDINGS), ("checkpointing", CHECKPOINTING)):
            if getattr(self, name) not in choices:
                raise ArgumentError(f"{name}={getattr(self, name)}: expected one of {', '.join(choices)}")
        for name in ("ranks", "sequence", "micro_batch", "accumulation"):
            if getattr(self, name) < 1:
                raise ArgumentError(f"{name}={getattr(self, name)}: expected a whole number of at least 1")
        if not 0 <= self.clip_rate <= 1:
            raise ArgumentError(f"clip_rate={self.clip_rate}: expected a share from 0 to 1")
        if not 0 < self.utilization <= 1:
            raise ArgumentError(f"utilization={self.utilization}: expected a share of the peak, above 0 and at most 1")
        if self.state_dtype not in MOMENTS_BYTES:
            raise ArgumentError(f"state_dtype={self.state_dtype}: expected one of {', '.join(MOMENTS_BYTES)}")
        if self.master_dtype not in ("fp32", "split"):
            raise ArgumentError(f"master_dtype={self.master_dtype}: expected fp32 or split")
        if (self.state_dtype, self.master_dtype) != ("fp32", "fp32") and not keeps_less(self.engine):
            raise ArgumentError(
                f"state_dtype={self.state_dtype}, master_dtype={self.master_dtype} with engine={self.engine}: expected "
                "fp32; bf16 and 8-bit moments and split masters are superoffload's"
            )
        if self.gradient_dtype not in ("fp32", "bf16"):
            raise ArgumentError(f"gradient_dtype={self.gradient_dtype}: expected fp32 or bf16")
        if self.engine in ("zero-offload", "deepspeed-superoffload") and self.sharding != "zero3":
            raise ArgumentError(f"engine={self.engine} with sharding={self.sharding}: expected sharding zero3")
        if not 0 <= self.gpu_fraction <= 1:
            raise ArgumentError(f"gpu_fraction={self.gpu_fraction}: expected a share of the state, from 0 to 1")
        if self.gpu_fraction > 0 and not self.can_place:
            raise ArgumentError(
                f"gpu_fraction={self.gpu_fraction} with engine={self.engine}, sharding={self.sharding}: expected 0; "
                "placement= is superoffload's, with sharding none or fsdp2"
            )
        if self.engine == "superoffload" and self.sharding in ("zero1", "zero2"):
            raise ArgumentError(
                f"sharding={self.sharding}: superoffload does not serve ZeRO stages 1 and 2; use zero3, fsdp2 or none"
            )

    @property
    def can_place(self) -> bool:
        """Returns whether ``placement=`` exists; DeepSpeed's partitions have their own key for it."""
        return self.engine == "superoffload" and self.sharding != "zero3"

    @property
    def master_bytes(self) -> int:
        """Returns the host bytes of a master beside its published copy."""
        return 4 if self.master_dtype == "fp32" else 2

    @property
    def moments_bytes(self) -> float:
        """Returns the bytes of exp_avg and exp_avg_sq of a parameter."""
        return MOMENTS_BYTES[self.state_dtype]

    @property
    def placed_bytes(self) -> float:
        """Returns the bytes on the GPU, per parameter, of state that ``placement`` keeps there: with a split master
        also its upper half, since only a step may change the parameter."""
        return 4 + self.moments_bytes + self.gradient_bytes

    @property
    def gradient_bytes(self) -> int:
        """Returns the bytes of a gradient element; DistributedDataParallel and ZeRO-3 keep gradients of their own."""
        wide = self.gradient_dtype == "fp32" and self.can_place and not self.is_replicated
        return 4 if wide else 2

    @property
    def is_replicated(self) -> bool:
        """Returns whether every rank has all parameters, under ``DistributedDataParallel``."""
        return self.ranks > 1 and self.sharding == "none"

    @property
    def shards_parameters(self) -> bool:
        return self.sharding in ("zero3", "fsdp2")

    @property
    def tokens_per_micro_batch(self) -> int:
        return self.sequence * self.micro_batch

    @property
    def tokens_per_step(self) -> int:
        """Returns the tokens of one rank."""
        return self.tokens_per_micro_batch * self.accumulation


@dataclass(frozen=True)
class Needs:
    """Holds bytes by component; `gpu_moments` are the times within a step, of which the worst one counts."""

    gpu: dict[str, float]
    host: dict[str, float]
    gpu_moments: dict[str, float] = field(default_factory=dict)

    @property
    def gpu_peak(self) -> float:
        """Returns the most bytes in use at a time, which torch reports as the peak of active bytes."""
        return sum(self.gpu.values()) + max(self.gpu_moments.values(), default=0.0)

    @property
    def host_peak(self) -> float:
        return sum(self.host.values())

    @property
    def worst_moment(self) -> str:
        return max(self.gpu_moments, key=self.gpu_moments.__getitem__, default="")


def activation_bytes(model: ModelShape, settings: Settings) -> tuple[float, float]:
    """Returns what forward leaves for backward (of all layers, of the output head), for one micro-batch, in bf16.

    Per token and layer without checkpointing: 16 x hidden for two RMSNorms (their fp32 input, the normalized value, the
    output), 10 x attention width for query, key and value as the attention kernel saw them and its output, and 8 x
    width of the feed-forward layer. It assumes a fused attention kernel, so no score matrix. The head keeps bf16
    logits, fp32 logits, their log-softmax and its gradient.
    """
    tokens = settings.tokens_per_micro_batch
    ffn = model.ffn * model.experts_used
    layer = tokens * (16.0 * model.hidden + 10.0 * model.attention_width + (8.0 if model.gated else 6.0) * ffn)
    head = tokens * model.vocabulary * 12.0
    if settings.checkpointing == "full":
        return model.layers * tokens * 2.0 * model.hidden + layer, head
    return model.layers * layer, head


def estimate_memory(model: ModelShape, settings: Settings) -> Needs:
    """Returns all components at their peak."""
    count, shard = float(model.parameters), model.parameters / settings.ranks
    gpu: dict[str, float] = {"parameters": 2 * (shard if settings.shards_parameters else count)}
    host: dict[str, float] = {}
    if settings.engine == "torch":
        _add_optimizer_on_gpu(gpu, settings, count, shard)
    else:
        _add_offloaded(gpu, host, settings, count, shard)
    if settings.ranks > 1:
        _add_communication(gpu, model, settings)
    layers, head = activation_bytes(model, settings)
    moments = {"start of backward": layers + head}
    _add_gradient_moments(moments, gpu, settings, count, shard)
    return Needs(gpu, host, moments)


def _add_optimizer_on_gpu(gpu: dict[str, float], settings: Settings, count: float, shard: float) -> None:
    own = count if settings.sharding == "none" else shard
    gpu["master"], gpu["moments"] = 4 * own, 8 * own
    if settings.sharding in ("zero3", "fsdp2"):
        gpu["gradients"] = 2 * shard  # allocated once
    if settings.sharding == "none":
        gpu["gradients"] = 4 * own  # unsharded gradients stay in fp32


def _add_offloaded(
    gpu: dict[str, float], host: dict[str, float], settings: Settings, count: float, shard: float
) -> None:
    """Adds the host's state and staging, and ours the journal; gradients leave the GPU bucket by bucket."""
    own = shard if settings.ranks > 1 else count
    if settings.engine == "superoffload":
        # Two slots down, one up. Parameters that go up before the verdict use free memory only.
        gpu["staging"] = (2 * settings.gradient_bytes + 2) * min(BUCKET_ELEMENTS, own)
        if settings.gpu_fraction > 0:
            gpu["state on the GPU (placement)"] = settings.gpu_fraction * settings.placed_bytes * own
            own *= 1 - settings.gpu_fraction
        host["master"], host["moments"] = settings.master_bytes * own, settings.moments_bytes * own
        host["packed gradient"] = settings.gradient_bytes * own
        host["shadow"], host[JOURNAL] = 2 * own, JOURNAL_BYTES_PER_PARAM * own
        if settings.is_replicated:
            gpu["gradients"] = 2 * count  # DistributedDataParallel keeps them
    elif settings.engine == "zero-offload":
        gpu["staging"] = 2 * min(GATHERED_ELEMENTS, own)
        host["master"], host["moments"] = 4 * own, 8 * own
        host["gradients"], host["parameters in bf16"] = 4 * own, 2 * own
    else:
        gpu["master and moments on the GPU"] = 12 * GPU_SHARE * own
        gpu["staging"] = 4 * min(GATHERED_ELEMENTS, own) + 4 * min(0.4e9, own)  # fp32 transfers both ways
        host["master"], host["moments"] = 4 * (1 - GPU_SHARE) * own, 8 * (1 - GPU_SHARE) * own
        host["gradients"], host["parameters in bf16"] = 4 * own, 2 * own


def _add_communication(gpu: dict[str, float], model: ModelShape, settings: Settings) -> None:
    if settings.sharding == "zero3":
        gpu["gathered parameters"] = 2 * min(GATHERED_ELEMENTS, model.parameters)
    elif settings.sharding == "fsdp2":
        gpu["gathered parameters"] = 3 * 2 * model.parameters / (model.layers + 1)  # this block, the next, a gradient
    else:
        gpu["reduce buckets"] = 2 * min(REDUCE_ELEMENTS, model.parameters)


def _add_gradient_moments(
    moments: dict[str, float], gpu: dict[str, float], settings: Settings, count: float, shard: float
) -> None:
    """Adds what the GPU holds late in a step and not at the start of backward."""
    if settings.engine != "torch":
        if settings.accumulation > 1 and not settings.is_replicated:  # partial sums wait on the GPU for the boundary
            size = settings.gradient_bytes
            gpu["accumulated gradients"] = size * (shard if settings.shards_parameters else count)
        elif settings.engine == "superoffload":
            moments["end of backward"] = settings.gradient_bytes * 4 * min(BUCKET_ELEMENTS, count)
        return
    if settings.sharding in ("zero1", "zero2"):
        moments["end of backward"] = 2 * (count if settings.sharding == "zero1" else shard)
        # this rank's gradients, their flat copy, and the fp32 copy that the optimizer reads
        moments["optimizer step"] = 8 * shard
    elif settings.sharding == "zero3":
        moments["optimizer step"] = 4 * min(GATHERED_ELEMENTS, shard)
    elif settings.sharding == "none":
        moments["end of backward"] = 2 * min(REDUCE_ELEMENTS, count)


@dataclass(frozen=True)
class Fit:
    """Tells whether a run fits, and what binds first."""

    gpu_need: float
    gpu_room: float
    host_need: float
    host_room: float

    @property
    def fits(self) -> bool:
        return self.gpu_need <= self.gpu_room and self.host_need <= self.host_room

    @property
    def binds(self) -> str:
        """Returns which of GPU and host memory is fuller."""
        gpu, host = (
            need / room if room > 0 else math.inf
            for need, room in ((self.gpu_need, self.gpu_room), (self.host_need, self.host_room))
        )
        return "GPU memory" if gpu >= host else "host memory"

    @property
    def lacking(self) -> list[str]:
        """Lists what is missing, such as `18.9 GB of GPU memory`; empty if the run fits."""
        kinds = (
            ("GPU memory", self.gpu_need - self.gpu_room),
            ("host memory", self.host_need - self.host_room),
        )
        return [f"{missing / GB:.1f} GB of {kind}" for kind, missing in kinds if missing > 0]

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "fits": self.fits, "binds": self.binds}


def check_fit(model: ModelShape, hardware: Hardware, settings: Settings) -> Fit:
    needs = estimate_memory(model, settings)
    reserve = HOST_RESERVE / min(settings.ranks, hardware.gpus_per_node)
    return Fit(
        gpu_need=needs.gpu_peak,
        gpu_room=max(0.0, hardware.gpu_memory * (1 - FRAGMENTATION) - CONTEXT_BYTES),
        host_need=needs.host_peak,
        host_room=hardware.host_memory - min(reserve, HOST_RESERVE_SHARE * hardware.host_memory),
    )
