"""Memory per GPU and per rank's share of the host, by component; what a run with these settings needs at its peak."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from superoffload.errors import ArgumentError
from superoffload.plan.hardware import Hardware
from superoffload.plan.models import ModelShape

ENGINES = ("torch", "zero-offload", "deepspeed-superoffload", "superoffload")
SHARDINGS = ("none", "zero1", "zero2", "zero3", "fsdp2")
CHECKPOINTING = ("none", "full")

CONTEXT_BYTES = 1.5e9  # CUDA context, cuBLAS and NCCL
FRAGMENTATION = 0.15  # of a GPU's memory, for what the caching allocator cannot reuse; docs/plan.md says why so much
HOST_RESERVE = 16e9  # operating system, Python, data loading
GATHERED_ELEMENTS = 1e9  # DeepSpeed's stage3_max_live_parameters, and its sub_group_size
REDUCE_ELEMENTS = 2 * 5e8  # two reduce buckets, one in use while the other is filled
BUCKET_ELEMENTS = 32 << 20  # this project's largest bucket; four are on their way at once
JOURNAL = "journal, reserved"
GPU_SHARE = 0.10  # of the optimizer, which DeepSpeed SuperOffload's examples keep on the GPU


@dataclass(frozen=True)
class Settings:
    """`clip_rate`: share of the steps that clip. `micro_batch` sequences per rank, `accumulation` of them per step."""

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
        if self.state_dtype not in ("fp32", "bf16"):
            raise ArgumentError(f"state_dtype={self.state_dtype}: expected fp32 or bf16")
        if self.engine in ("zero-offload", "deepspeed-superoffload") and self.sharding != "zero3":
            raise ArgumentError(f"engine={self.engine} with sharding={self.sharding}: expected sharding zero3")
        if self.engine == "superoffload" and self.sharding in ("zero1", "zero2"):
            raise ArgumentError(
                f"sharding={self.sharding}: superoffload does not serve ZeRO stages 1 and 2; use zero3, fsdp2 or none"
            )

    @property
    def shards_parameters(self) -> bool:
        return self.sharding in ("zero3", "fsdp2")

    @property
    def tokens_per_micro_batch(self) -> int:
        return self.sequence * self.micro_batch

    @property
    def tokens_per_step(self) -> int:
        """Of one rank."""
        return self.tokens_per_micro_batch * self.accumulation


@dataclass(frozen=True)
class Needs:
    """Bytes by component; `gpu_moments` are the times within a step of which the worst one counts."""

    gpu: dict[str, float]
    host: dict[str, float]
    gpu_moments: dict[str, float] = field(default_factory=dict)

    @property
    def gpu_peak(self) -> float:
        """What torch reports as the most that was ever allocated."""
        return sum(self.gpu.values()) + max(self.gpu_moments.values(), default=0.0)

    @property
    def host_peak(self) -> float:
        return sum(self.host.values())

    @property
    def worst_moment(self) -> str:
        return max(self.gpu_moments, key=self.gpu_moments.__getitem__, default="")


def activation_bytes(model: ModelShape, settings: Settings) -> tuple[float, float]:
    """(of all layers, of the output head) that forward leaves for backward, for one micro-batch, in bf16.

    Per token and layer without checkpointing: 16 x hidden for two RMSNorms (their fp32 input, the normalized value,
    the output), 10 x attention width for query, key and value as the attention kernel saw them and its output, and
    8 x width of the feed-forward layer. No score matrix: the attention kernel is taken to be a fused one. The head
    keeps bf16 logits, fp32 logits, their log-softmax and its gradient.
    """
    tokens = settings.tokens_per_micro_batch
    ffn = model.ffn * model.experts_used
    layer = tokens * (16.0 * model.hidden + 10.0 * model.attention_width + (8.0 if model.gated else 6.0) * ffn)
    head = tokens * model.vocabulary * 12.0
    if settings.checkpointing == "full":
        return model.layers * tokens * 2.0 * model.hidden + layer, head
    return model.layers * layer, head


def estimate_memory(model: ModelShape, settings: Settings) -> Needs:
    """All components at their peak."""
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
        gpu["gradients"] = 4 * own  # kept in fp32 where nothing is sharded


def _add_offloaded(
    gpu: dict[str, float], host: dict[str, float], settings: Settings, count: float, shard: float
) -> None:
    """Gradients leave the GPU bucket by bucket; the host keeps state and staging, ours the journal as well."""
    own = shard if settings.ranks > 1 else count
    if settings.engine == "superoffload":
        gpu["staging"] = 2 * 4 * min(BUCKET_ELEMENTS, own)
        host["master"] = 4 * own
        host["moments"] = (8 if settings.state_dtype == "fp32" else 4) * own
        host["packed gradient"], host["shadow"], host[JOURNAL] = 2 * own, 2 * own, 2.5 * own
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
    """What lives on the GPU late in a step and not at the start of backward."""
    if settings.engine != "torch":
        if settings.accumulation > 1:  # partial sums wait on the GPU for the boundary
            gpu["accumulated gradients"] = 2 * (shard if settings.shards_parameters else count)
        elif settings.engine == "superoffload":
            moments["end of backward"] = 2 * 4 * min(BUCKET_ELEMENTS, count)
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
    """Whether it fits, and what binds first."""

    gpu_need: float
    gpu_room: float
    host_need: float
    host_room: float

    @property
    def fits(self) -> bool:
        return self.gpu_need <= self.gpu_room and self.host_need <= self.host_room

    @property
    def binds(self) -> str:
        """Of GPU and host memory the one that is fuller."""
        return "GPU memory" if self.gpu_need / self.gpu_room >= self.host_need / self.host_room else "host memory"

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "fits": self.fits, "binds": self.binds}


def check_fit(model: ModelShape, hardware: Hardware, settings: Settings) -> Fit:
    needs = estimate_memory(model, settings)
    return Fit(
        gpu_need=needs.gpu_peak,
        gpu_room=hardware.gpu_memory * (1 - FRAGMENTATION) - CONTEXT_BYTES,
        host_need=needs.host_peak,
        host_room=hardware.host_memory - HOST_RESERVE / min(settings.ranks, hardware.gpus_per_node),
    )
