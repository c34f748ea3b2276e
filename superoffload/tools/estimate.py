"""Estimates a model's size, and the memory and the time of a training step; docs/settings.md describes how."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from superoffload.engine.journal import JOURNAL_BYTES_PER_PARAM
from superoffload.errors import ArgumentError, shown
from superoffload.tools.machines import Machine

CONTEXT_BYTES, FRAGMENTATION = 1.5e9, 0.15  # of a GPU: CUDA and its libraries; what the allocator cannot reuse
HOST_RESERVE, HOST_RESERVE_SHARE = 16e9, 0.25  # for the system, Python and data; at most this share of the memory
BUCKET_ELEMENTS, BUCKETS_IN_FLIGHT = 32 << 20, 4  # the largest bucket
GRADIENT_BYTES = {"bf16": 2, "fp32": 4}
MOMENTS_BYTES = {"fp32": 8.0, "bf16": 4.0, "8bit": 2 + 2 / 256}  # of both; 256 codes of eight bits share a scale
# Host bytes per parameter of one pass (docs/kernel.md): master and moments both ways, bf16 gradient and new parameter.
PLAIN_BYTES, JOURNALED_BYTES = 28.0, 29.2
SUM_BYTES = 12.0  # of adding a gradient to a sum in host memory: both are read, one is written
PIPELINE_BUCKETS, LATE_BUCKETS = 64, 2  # of all; those whose parameters always travel after the verdict
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_LARGEST = 1 << 24  # of any size of a model or a run
_NAMES = {  # in a config.json; the first one that it has counts, the others are older
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "num_heads"),
    "vocabulary": ("vocab_size",),
}
_GATED = ("silu", "swish", "swiglu", "gelu_pytorch_tanh", None)


@dataclass(frozen=True)
class ModelShape:
    """Holds a decoder's sizes; `ffn` is the inner width of an expert, with three matrices if gated."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int
    head_width: int | None = None
    tied: bool = False
    gated: bool = True
    experts: int = 1
    experts_used: int = 1

    def __post_init__(self) -> None:
        _check_sizes({name: size for name, size in vars(self).items() if not (size is None or isinstance(size, bool))})

    @property
    def attention_width(self) -> int:
        return self.heads * (self.head_width or self.hidden // self.heads)

    @property
    def parameters(self) -> int:
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return self.layers * self.layer_parameters(self.experts) + self.hidden + embeddings

    def layer_parameters(self, experts: int) -> int:
        """Counts the parameters of one layer with this many experts."""
        kv_width = self.attention_width // self.heads * self.kv_heads
        router = self.hidden * self.experts if self.experts > 1 else 0
        ffn = experts * (3 if self.gated else 2) * self.hidden * self.ffn
        return 2 * self.hidden * (self.attention_width + kv_width) + ffn + router + 2 * self.hidden

    def flops_per_token(self, sequence: int) -> float:
        """Counts forward and backward: 6 for each parameter that a token is multiplied with (those of the experts it
        uses, no input embedding), and causal attention over half the sequence on average."""
        multiplied = self.layers * self.layer_parameters(self.experts_used) + self.vocabulary * self.hidden
        return 6.0 * (multiplied + self.layers * self.attention_width * sequence)


def _check_sizes(sizes: Mapping[str, Any]) -> None:
    for name, value in sizes.items():
        if type(value) is not int or not 1 <= value <= _LARGEST:
            raise ArgumentError(f"{name}={shown(value)}: expected a whole number from 1 to {_LARGEST}")


def find_model(text: str) -> ModelShape:
    """Returns the shape of `7B`, or of a config.json or the model folder with one."""
    path = Path(text)
    if path.suffix == ".json" or os.path.exists(path):
        try:
            return _shape_of(_read_config(path / "config.json" if path.is_dir() else path))
        except (OSError, TypeError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise ArgumentError(f"model={path}: {why}; name the config.json of a decoder-only transformer") from error
    found = re.fullmatch(r"(\d*\.?\d+(?:E\d+)?)([KMBT]?)", text.upper())
    count = float(found[1]) * _UNITS[found[2]] if found else 0.0
    if not 1e5 <= count <= 1e14:
        paths = "the path of a Hugging Face config.json or of the folder with it (nothing is downloaded)"
        raise ArgumentError(f"model={shown(text)}: expected a number of parameters such as 7B or 350M, or {paths}")
    return typical_shape(count)


def typical_shape(parameters: float) -> ModelShape:
    """Returns a decoder of about that many parameters in usual proportions: 128 hidden per layer, heads of 128."""
    vocabulary = max(256, min(128_000, int(parameters * 0.25 / 512)))  # small, where it would be most of the model
    shapes = []
    for hidden in range(64, 1 << 16, 64):
        heads, ffn = max(1, hidden // 128), 64 * math.ceil(int(1.3 * int(8 * hidden / 3)) / 64)  # Llama's rule
        kv_heads = next(count for count in (8, 4, 2, 1) if heads % count == 0)
        shape = ModelShape(1, hidden, heads, kv_heads, ffn, vocabulary)
        layers = round((parameters - 2 * vocabulary * hidden) / shape.layer_parameters(1))
        if layers < 1:
            break
        shapes.append(replace(shape, layers=layers))
    return min(shapes, key=lambda shape: abs(shape.layers - shape.hidden / 128))


def _read_config(path: Path) -> dict[str, Any]:
    """Has transformers, if installed, fill in a class's defaults; nothing is downloaded, no code of a model is run."""
    try:
        values = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"not JSON that can be read ({error})") from error
    if not isinstance(values, dict):
        raise ArgumentError("expected a JSON object")
    text = values.get("text_config")
    flat = {**values, **text} if isinstance(text, dict) else values
    _check_sizes({key: flat[key] for keys in _NAMES.values() for key in keys if flat.get(key) is not None})
    try:
        from transformers import AutoConfig

        given = {key: value for key, value in values.items() if key != "model_type"}
        filled: dict[str, Any] = AutoConfig.for_model(values["model_type"], **given).get_text_config().to_dict()
    except Exception:  # not installed, or whatever one of its classes raises: the values themselves may do
        return flat
    return filled


def _shape_of(values: Mapping[str, Any]) -> ModelShape:
    def first(*names: str) -> Any:
        return next((values[name] for name in names if values.get(name)), None)

    sizes = {name: first(*keys) for name, keys in _NAMES.items()}
    for name in (_NAMES[name][0] for name, size in sizes.items() if size is None):
        raise ArgumentError(f"{name} is missing: add it, or install transformers, which knows defaults")
    experts = first("num_local_experts", "num_experts", "n_routed_experts") or 1
    ffn = first("moe_intermediate_size") if experts > 1 else None
    plain = "n_embd" in values or values.get("model_type") == "starcoder2"
    return ModelShape(
        **sizes,
        kv_heads=first("num_key_value_heads") or sizes["heads"],
        ffn=ffn or first("intermediate_size", "n_inner", "ffn_dim") or 4 * sizes["hidden"],
        head_width=first("head_dim"),
        tied=bool(values.get("tie_word_embeddings", True)),  # files leave it out where it is true
        gated=not plain and first("hidden_act", "hidden_activation", "activation_function") in _GATED,
        experts=experts,
        experts_used=(first("num_experts_per_tok") or 1) if experts > 1 else 1,
    )


def _option(default: Any, words: str, *choices: str) -> Any:
    return field(default=default, metadata={"help": words, "type": type(default), "choices": choices or None})


@dataclass(frozen=True)
class Settings:
    """Holds a run's settings; those with words are options of the command."""

    ranks: int = _option(1, "one per GPU; several shard the model with FSDP2")
    sequence: int = _option(2048, "tokens per sequence")
    micro_batch: int = _option(1, "sequences per rank at once")
    accumulation: int = _option(1, "micro-batches per step")
    checkpointing: str = _option("none", "of activations", "none", "full")
    master_dtype: str = _option("fp32", "of the master weights", "fp32", "split")
    state_dtype: str = _option("fp32", "of the moments", *MOMENTS_BYTES)
    gradient_dtype: str = _option("bf16", "fp32 is accumulate_dtype='fp32'", *GRADIENT_BYTES)
    sums_on_host: bool = False  # of micro-batches, as accumulate_dtype="fp32" adds where a GPU has no room
    utilization: float = _option(0.4, "of the GPU's peak, in forward and backward")

    def __post_init__(self) -> None:
        _check_sizes({name: getattr(self, name) for name in ("ranks", "sequence", "micro_batch", "accumulation")})
        if not 0 < self.utilization <= 1:
            raise ArgumentError(f"utilization={self.utilization}: expected a share of the peak, above 0 and at most 1")


def activation_bytes(model: ModelShape, settings: Settings) -> float:
    """Returns what forward leaves for backward, for one micro-batch in bf16 with a fused attention kernel.

    Per token and layer without checkpointing: 16 x hidden for two RMSNorms (fp32 input, normalized value, output), 10 x
    attention width for query, key, value and output, and 8 x the inner width. The head keeps bf16 logits, fp32 logits,
    their log-softmax and its gradient.
    """
    tokens, ffn = settings.sequence * settings.micro_batch, model.ffn * model.experts_used
    layer = tokens * (16.0 * model.hidden + 10.0 * model.attention_width + (8.0 if model.gated else 6.0) * ffn)
    recomputed = settings.checkpointing == "full"
    kept = model.layers * tokens * 2.0 * model.hidden + layer if recomputed else model.layers * layer
    return kept + tokens * model.vocabulary * 12.0


def estimate_memory(model: ModelShape, settings: Settings, *, has_gpu: bool = True) -> list[dict[str, float]]:
    """Returns the peak bytes of a rank on the GPU and in host memory, by component; without a GPU all in the latter."""
    own, width = model.parameters / settings.ranks, GRADIENT_BYTES[settings.gradient_dtype]
    activations, device = activation_bytes(model, settings), {"parameters": 2.0 * own}
    if settings.ranks > 1:  # FSDP2: parameters of this block and the next, a gradient
        device["gathered parameters"] = 6 * model.parameters / (model.layers + 1)
    if not has_gpu or (settings.accumulation > 1 and not settings.sums_on_host):  # else a GPU frees them one by one
        device["gradients"] = width * own
    if has_gpu:
        bucket = min(BUCKET_ELEMENTS, own)
        device["copies on their way"] = (2 * width + 2) * bucket  # two buckets down, one up
        activations = max(activations, BUCKETS_IN_FLIGHT * width * bucket)  # gone when the last gradients wait
    device["activations"] = activations
    masters = 2.0 if has_gpu and settings.master_dtype == "split" else 4.0
    host = {"master weights": masters * own, "moments": MOMENTS_BYTES[settings.state_dtype] * own}
    if not has_gpu:  # CPUAdamW, and AdamW with speculation="never", step in place
        return [{}, {**device, **host}]
    host |= {"packed gradients": width * own, "new parameters": 2.0 * own}
    return [device, {**host, "undo journal (reserved)": JOURNAL_BYTES_PER_PARAM * own}]


def torch_on_gpu_bytes(model: ModelShape, settings: Settings) -> float:
    """Returns a rank's GPU memory with ``torch.optim.AdamW`` on it: bf16 copy, fp32 master, moments, gradient."""
    several = settings.ranks > 1
    gathered = 6 * model.parameters / (model.layers + 1) if several else 0.0
    return (16 if several else 18) * model.parameters / settings.ranks + gathered + activation_bytes(model, settings)


def rooms(machine: Machine, settings: Settings) -> tuple[float, float]:
    """Returns the bytes of GPU and host memory that a rank can use."""
    reserve = HOST_RESERVE / min(settings.ranks, machine.gpus_per_node)
    gpu = max(0.0, machine.gpu_memory * (1 - FRAGMENTATION) - CONTEXT_BYTES)
    return gpu, machine.host_memory - min(reserve, HOST_RESERVE_SHARE * machine.host_memory)


def estimate_step(model: ModelShape, machine: Machine, settings: Settings) -> dict[str, float]:
    """Returns seconds of a step that does not clip, by bandwidths alone; nothing where a speed is unknown. All but
    "optimizer, hidden", which runs beside other work, add up to the step."""
    if not (machine.flops and machine.host_bandwidth):
        return {}
    own, tokens = model.parameters / settings.ranks, settings.sequence * settings.micro_batch * settings.accumulation
    seconds = tokens * model.flops_per_token(settings.sequence) / (machine.flops * settings.utilization)
    forward, backward, communication = seconds / 3, seconds * (1 if settings.checkpointing == "full" else 2 / 3), 0.0
    if settings.ranks > 1:  # FSDP2 prefetches
        once = (settings.ranks - 1) * 2 * own / machine.collectives
        communication = max(settings.accumulation * 3 * once - forward - backward, 2 * once / model.layers)
    # Only the last micro-batch's backward makes gradients final; communication stretches it in proportion.
    window = (backward + communication * 2 / 3) / settings.accumulation
    busy, exposed = _optimizer(model, machine, settings, window)
    hidden = max(0.0, busy - exposed)
    if settings.sums_on_host:  # from the second micro-batch on, backward waits for the copy and for the addition
        exposed += (settings.accumulation - 1) * own * (4 / machine.link_down + SUM_BYTES / machine.host_bandwidth)
    parts = {"forward": forward, "backward": backward, "waiting for other ranks": communication}
    return {**parts, "optimizer, exposed": exposed, "optimizer, hidden": hidden}


def _optimizer(model: ModelShape, machine: Machine, settings: Settings, window: float) -> tuple[float, float]:
    """Returns the seconds of optimizer and copies, and those after backward; it speculates where that is faster."""
    own, width = model.parameters / settings.ranks, GRADIENT_BYTES[settings.gradient_dtype]
    down, up = width * own / machine.link_down, 2 * own / machine.link_up
    # Moments move both ways. A split master saves 2 bytes: of 8 for the master and 2 for the new parameter, 4 + 4 stay.
    fewer = 2 * (8 - MOMENTS_BYTES[settings.state_dtype]) + 2 - width + 2 * (settings.master_dtype == "split")
    plain, journaled = ((size - fewer) * own / machine.host_bandwidth for size in (PLAIN_BYTES, JOURNALED_BYTES))
    verdict = pipeline(window, [down]) - window
    speculating = max(pipeline(window, [down, journaled]) - window + up / PIPELINE_BUCKETS, verdict + up)
    # New parameters travel before the verdict where half of the GPU's free memory holds them, since the gradients leave
    # as they are packed (docs/pipeline.md); then the GPU reads and writes each once.
    free = rooms(machine, settings)[0] - sum(estimate_memory(model, settings)[0].values())
    if free >= 2 * width * own:
        there = pipeline(window, [down, journaled, up]) - window
        speculating = max(there, verdict + LATE_BUCKETS * up / PIPELINE_BUCKETS) + 4 * own / machine.gpu_bandwidth
    waiting = verdict + max(plain, up) + min(plain, up) / PIPELINE_BUCKETS
    return (down + journaled + up, speculating) if speculating <= waiting else (down + plain + up, waiting)


def pipeline(window: float, stages: Sequence[float]) -> float:
    """Returns when the last bucket has left the last stage; they become ready evenly over `window`."""
    steps = (window, *stages)  # the slowest keeps the last bucket waiting, each other one takes as long as for one
    return max(steps) + (sum(steps) - max(steps)) / PIPELINE_BUCKETS
