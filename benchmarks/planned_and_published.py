"""Compares published measurements with the planner. docs/plan.md shows its output."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from superoffload.tools.plan.machines import GB, Hardware
from superoffload.tools.plan.memory_estimate import Settings, check_fit, estimate_memory
from superoffload.tools.plan.models import ModelShape, swiglu_width, typical_shape
from superoffload.tools.plan.profiles import GH200_96
from superoffload.tools.plan.step_time import estimate_step

# All from https://rahulsteiger.github.io/notes/2025/lsaie-project/
HIDDEN_SIZES = (2048, 3072, 4096, 5120)
PARAMETERS_WITHOUT_EMBEDDINGS = (1.7e9, 3.7e9, 6.7e9, 10.4e9)

CONFIGURATIONS = {
    "ZeRO stage 0": Settings(engine="torch", sharding="none"),
    "stage 1": Settings(engine="torch", sharding="zero1"),
    "stage 2": Settings(engine="torch", sharding="zero2"),
    "stage 3": Settings(engine="torch", sharding="zero3"),
    "stage 3 + ZeRO-Offload": Settings(engine="zero-offload", sharding="zero3"),
    "stage 3 + SuperOffload": Settings(engine="deepspeed-superoffload", sharding="zero3"),
}
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


def evaluated_model(hidden: int) -> ModelShape:
    """Returns 32 layers, 32 heads, 8 KV heads, SwiGLU with multiplier 1.3; the tokenizer's vocabulary of 131072."""
    return ModelShape(32, hidden, 32, 8, swiglu_width(hidden), 131_072)


def evaluated_machine(ranks: int) -> Hardware:
    """Returns up to four GH200-96 in one node; every rank can use its 512 GB of host memory, so each gets its part."""
    return replace(GH200_96, host_memory=512 * GB / ranks)


def largest_hidden(name: str, ranks: int) -> int:
    """Returns the largest of the sizes that were tried; 0 if none fits."""
    settings = replace(CONFIGURATIONS[name], ranks=ranks)
    machine = evaluated_machine(ranks)
    return max((h for h in HIDDEN_SIZES if check_fit(evaluated_model(h), machine, settings).fits), default=0)


def table_of_parameters() -> Iterator[str]:
    yield "| hidden | published, B | planned without embeddings, B | error | with embeddings, B |"
    yield "|---|---|---|---|---|"
    for hidden, published in zip(HIDDEN_SIZES, PARAMETERS_WITHOUT_EMBEDDINGS, strict=True):
        model = evaluated_model(hidden)
        body = model.parameters - model.embedding_parameters
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
        needs = estimate_memory(evaluated_model(4096), replace(CONFIGURATIONS[name], ranks=4))
        peak = needs.gpu_peak / GB
        yield f"| {name} | {published} | {peak:.1f} | {peak / published - 1:+.0%} | {needs.worst_moment} |"


def planned_tokens_per_second(name: str) -> float:
    settings = replace(CONFIGURATIONS[name], ranks=4)
    return 4 * settings.tokens_per_step / estimate_step(evaluated_model(4096), evaluated_machine(4), settings).total


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


LARGE_MODELS = (("20 B on one GH200-96", 20e9, 1), ("70 B on four GH200-96", 70e9, 4))


def large_model_settings(ranks: int, engine: str) -> Settings:
    """Returns sequence 4096, one per GPU, with checkpointing; the publication does not tell the batch."""
    sharding = "zero3" if engine != "superoffload" or ranks > 1 else "none"
    return Settings(engine, sharding, ranks, sequence=4096, checkpointing="full")


def table_of_large_models() -> Iterator[str]:
    yield "| published as trained | engine | planner | GPU, GB | host per GPU, GB |"
    yield "|---|---|---|---|---|"
    for name, parameters, ranks in LARGE_MODELS:
        for engine in ("deepspeed-superoffload", "superoffload"):
            fit = check_fit(typical_shape(parameters), GH200_96, large_model_settings(ranks, engine))
            yield (
                f"| {name} | {engine} | {'fits' if fit.fits else f'**does not fit** ({fit.binds})'} | "
                f"{fit.gpu_need / GB:.0f} of {fit.gpu_room / GB:.0f} | {fit.host_need / GB:.0f} of "
                f"{fit.host_room / GB:.0f} |"
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
