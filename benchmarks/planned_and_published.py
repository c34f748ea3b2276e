"""Compares published measurements of DeepSpeed, and of models that were trained, with the planner's arithmetic.

The model's size, activations, reserves and pipeline are the planner's. What ZeRO and DeepSpeed's engines keep where is
modelled here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from superoffload.tools.estimate import (
    PLAIN_BYTES,
    ModelShape,
    Settings,
    activation_bytes,
    estimate_memory,
    pipeline,
    rooms,
    typical_shape,
)
from superoffload.tools.machines import GB, GIB, MACHINES, Machine

# All from https://rahulsteiger.github.io/notes/2025/lsaie-project/
HIDDEN_SIZES = (2048, 3072, 4096, 5120)
PARAMETERS_WITHOUT_EMBEDDINGS = (1.7e9, 3.7e9, 6.7e9, 10.4e9)
LARGEST_HIDDEN = {
    "ZeRO stage 0": (2048, 2048, 2048, 2048),
    "stage 1": (2048, 3072, 4096, 4096),
    "stage 2": (2048, 3072, 4096, 4096),
    "stage 3": (3072, 3072, 4096, 4096),
    "stage 3 + ZeRO-Offload": (5120, 5120, 5120, 5120),
    "stage 3 + SuperOffload": (5120, 5120, 5120, 5120),
}
PEAK_GB = {
    "stage 1": 58.8,
    "stage 2": 58.6,
    "stage 3": 52.6,
    "stage 3 + ZeRO-Offload": 24.2,
    "stage 3 + SuperOffload": 30.5,
}
TOKENS_PER_SECOND = {"stage 1": 19_700, "stage 2": 19_600, "stage 3": 14_600}
RELATIVE_TO_STAGE_3 = {"stage 3 + ZeRO-Offload": -0.45, "stage 3 + SuperOffload": -0.20}
LARGE_MODELS = (("20 B on one GH200-96", 20e9, 1), ("70 B on four GH200-96", 70e9, 4))

GH200 = replace(MACHINES["gh200-96"], gpu_memory=96 * GIB, host_memory=480 * GB)
GATHERED_ELEMENTS = 1e9  # DeepSpeed's stage3_max_live_parameters, and its sub_group_size
REDUCE_ELEMENTS = 2 * 5e8  # two reduce buckets: one is in use while the other is filled
GPU_SHARE = 0.10  # of the optimizer, which DeepSpeed SuperOffload's examples keep on the GPU
# DeepSpeed's path: fp32 gradient in, master and moments both ways, then a cast of the master to bf16.
ZERO_OFFLOAD_BYTES = 4.0 + 24.0 + 6.0
DEEPSPEED_OF_LIMIT = 1 / 1.3  # its kernel against a faster one on Grace, as SuperOffload's authors measured
# Exposed per layer by stage 3's gathers and hooks; fitted to the published stage 3 row, which it cannot predict.
ZERO3_SECONDS_PER_LAYER = 1.7e-3


class Needs(NamedTuple):
    """Holds bytes of a rank: what the GPU always holds, what it holds at times, and the host's."""

    gpu: float
    moments: dict[str, float]
    host: float

    @property
    def gpu_peak(self) -> float:
        return self.gpu + max(self.moments.values())

    @property
    def worst_moment(self) -> str:
        return max(self.moments, key=self.moments.__getitem__)


def swiglu_width(hidden: int, multiple_of: int = 1024) -> int:
    """Returns the inner width by Llama's rule: two thirds of 4 x hidden, times the multiplier, rounded up."""
    return multiple_of * math.ceil(int(1.3 * int(2 * 4 * hidden / 3)) / multiple_of)


def evaluated_model(hidden: int) -> ModelShape:
    """Returns 32 layers, 32 heads, 8 KV heads, SwiGLU with multiplier 1.3; the tokenizer's vocabulary of 131072."""
    return ModelShape(32, hidden, 32, 8, swiglu_width(hidden), 131_072)


def evaluated_machine(ranks: int) -> Machine:
    """Returns up to four GH200-96 in one node; every rank can use its 512 GB of host memory, so each gets its part."""
    return replace(GH200, host_memory=512 * GB / ranks)


def needs_of(name: str, model: ModelShape, settings: Settings) -> Needs:
    """Adds up what each configuration keeps on the GPU and in host memory."""
    count, own = float(model.parameters), model.parameters / settings.ranks
    moments = {"start of backward": activation_bytes(model, settings)}
    several = settings.ranks > 1
    if name == "ZeRO stage 0":  # fp32 masters, gradients and moments
        moments["end of backward"] = 2 * min(REDUCE_ELEMENTS, count)
        return Needs(18 * count + (2 * min(REDUCE_ELEMENTS, count) if several else 0), moments, 0.0)
    if name in ("stage 1", "stage 2"):  # then this rank's gradients, their flat copy, and the fp32 copy of the step
        moments |= {"end of backward": 2 * (count if name == "stage 1" else own), "optimizer step": 8 * own}
        return Needs(2 * count + 12 * own + (2 * min(REDUCE_ELEMENTS, count) if several else 0), moments, 0.0)
    gpu = 2 * own + (2 * min(GATHERED_ELEMENTS, count) if several else 0)
    if name == "stage 3":
        return Needs(gpu + 14 * own, {**moments, "optimizer step": 4 * min(GATHERED_ELEMENTS, own)}, 0.0)
    if name == "stage 3 + ZeRO-Offload":
        return Needs(gpu + 2 * min(GATHERED_ELEMENTS, own), moments, 18 * own)
    staging = 4 * min(GATHERED_ELEMENTS, own) + 4 * min(0.4e9, own)  # fp32 transfers both ways
    return Needs(gpu + 12 * GPU_SHARE * own + staging, moments, (12 * (1 - GPU_SHARE) + 6) * own)


def seconds_of(name: str, model: ModelShape, machine: Machine, settings: Settings) -> float:
    """Returns the seconds of a step. Nothing of ZeRO's communication is taken as hidden."""
    tokens = settings.sequence * settings.micro_batch
    compute = tokens * model.flops_per_token(settings.sequence) / (machine.flops * settings.utilization)
    own = model.parameters / settings.ranks
    once = (settings.ranks - 1) * 2 * own / machine.collectives
    stage3 = name.startswith("stage 3")
    communication = 3 * once + ZERO3_SECONDS_PER_LAYER * model.layers if stage3 else 2 * once
    window = (compute + communication) * 2 / 3
    if name == "stage 3 + ZeRO-Offload":  # gradients go down during backward; the step and the way up come after it
        step = ZERO_OFFLOAD_BYTES * own / (machine.host_bandwidth * DEEPSPEED_OF_LIMIT)
        exposed = max(0.0, 2 * own / machine.link_down - window) + step + 2 * own / machine.link_up
    elif name == "stage 3 + SuperOffload":  # steps during backward, without clipping; fp32 moves both ways
        moved = (1 - GPU_SHARE) * own
        speeds = ((4, machine.link_down), (PLAIN_BYTES, machine.host_bandwidth), (4, machine.link_up))
        exposed = pipeline(window, [size * moved / speed for size, speed in speeds]) - window
        exposed += PLAIN_BYTES * GPU_SHARE * own / machine.gpu_bandwidth
    else:
        exposed = PLAIN_BYTES * (own if name != "ZeRO stage 0" else model.parameters) / machine.gpu_bandwidth
    return compute + communication + exposed


def largest_hidden(name: str, ranks: int) -> int:
    """Returns the largest of the sizes that were tried; 0 if none fits."""
    settings = Settings(ranks=ranks)
    gpu_room, host_room = rooms(evaluated_machine(ranks), settings)
    needs = {hidden: needs_of(name, evaluated_model(hidden), settings) for hidden in HIDDEN_SIZES}
    return max((h for h, need in needs.items() if need.gpu_peak <= gpu_room and need.host <= host_room), default=0)


def table_of_parameters() -> Iterator[str]:
    yield "| hidden | published, B | planned without embeddings, B | error | with embeddings, B |"
    yield "|---|---|---|---|---|"
    for hidden, published in zip(HIDDEN_SIZES, PARAMETERS_WITHOUT_EMBEDDINGS, strict=True):
        model = evaluated_model(hidden)
        body = model.parameters - 2 * model.vocabulary * model.hidden
        yield (
            f"| {hidden} | {published / 1e9:.1f} | {body / 1e9:.2f} | {body / published - 1:+.0%} | "
            f"{model.parameters / 1e9:.2f} |"
        )


def table_of_sizes() -> Iterator[str]:
    yield "| configuration | 1 GPU | 2 | 3 | 4 |"
    yield "|---|---|---|---|---|"
    for name, published in LARGEST_HIDDEN.items():
        cells = []
        for ranks, expected in enumerate(published, 1):
            planned = largest_hidden(name, ranks)
            cells.append(str(planned) if planned == expected else f"**{planned}** (published {expected})")
        yield f"| {name} | {' | '.join(cells)} |"


def table_of_peaks() -> Iterator[str]:
    yield "| configuration | published, GB | planned, GB | error | planned worst moment |"
    yield "|---|---|---|---|---|"
    for name, published in PEAK_GB.items():
        needs = needs_of(name, evaluated_model(4096), Settings(ranks=4))
        peak = needs.gpu_peak / GB
        yield f"| {name} | {published} | {peak:.1f} | {peak / published - 1:+.0%} | {needs.worst_moment} |"


def planned_tokens_per_second(name: str) -> float:
    settings = Settings(ranks=4)
    return 4 * settings.sequence / seconds_of(name, evaluated_model(4096), evaluated_machine(4), settings)


def table_of_throughput() -> Iterator[str]:
    yield "| configuration | published, tokens/s | planned, tokens/s | error | |"
    yield "|---|---|---|---|---|"
    notes = {"stage 1": "bandwidth of collectives fitted to it", "stage 3": "time per layer fitted to it"}
    for name, published in TOKENS_PER_SECOND.items():
        planned = planned_tokens_per_second(name)
        yield f"| {name} | {published:,} | {planned:,.0f} | {planned / published - 1:+.0%} | {notes.get(name, '')} |"
    yield ""
    yield "| configuration | published, against stage 3 | planned | error, points |"
    yield "|---|---|---|---|"
    base = planned_tokens_per_second("stage 3")
    for name, relative in RELATIVE_TO_STAGE_3.items():
        planned = planned_tokens_per_second(name) / base - 1
        yield f"| {name} | about {relative:+.0%} | {planned:+.0%} | {100 * (planned - relative):+.0f} |"


def large_model_needs(engine: str, parameters: float, ranks: int) -> tuple[float, float, Settings]:
    """Returns (GPU bytes, host bytes) under stage 3 with sequence 4096, one per GPU, and checkpointing; the publication
    does not tell the batch. With several ranks ours gathers as ZeRO does."""
    model, settings = typical_shape(parameters), Settings(ranks, sequence=4096, checkpointing="full")
    if engine == "deepspeed-superoffload":
        needs = needs_of("stage 3 + SuperOffload", model, settings)
        return needs.gpu_peak, needs.host, settings
    gpu, host = estimate_memory(model, settings)
    if ranks > 1:
        gpu["gathered parameters"] = 2 * GATHERED_ELEMENTS
    return sum(gpu.values()), sum(host.values()), settings


def table_of_large_models() -> Iterator[str]:
    yield "| published as trained | engine | planner | GPU, GB | host per GPU, GB |"
    yield "|---|---|---|---|---|"
    for name, parameters, ranks in LARGE_MODELS:
        for engine in ("deepspeed-superoffload", "superoffload"):
            gpu, host, settings = large_model_needs(engine, parameters, ranks)
            gpu_room, host_room = rooms(GH200, settings)
            verdict = "fits" if gpu <= gpu_room and host <= host_room else "**does not fit**"
            yield (
                f"| {name} | {engine} | {verdict} | {gpu / GB:.0f} of {gpu_room / GB:.0f} | "
                f"{host / GB:.0f} of {host_room / GB:.0f} |"
            )


def comparison() -> str:
    """Returns the whole comparison as Markdown."""
    parts: list[str] = []
    for title, lines in (
        ("Parameters", table_of_parameters()),
        ("Largest hidden size per configuration and GPU count", table_of_sizes()),
        ("Peak GPU memory, hidden 4096 on 4 GPUs", table_of_peaks()),
        ("Throughput, hidden 4096 on 4 GPUs", table_of_throughput()),
        ("Large models", table_of_large_models()),
    ):
        parts += [f"### {title}", "", *lines, ""]
    return "\n".join(parts)


if __name__ == "__main__":
    print(comparison())
