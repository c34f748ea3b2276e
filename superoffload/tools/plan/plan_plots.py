"""Draws two plots: predicted throughput over tokens per step, and memory over model size."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import style
from superoffload.tools.plan.machines import GB, Hardware
from superoffload.tools.plan.memory_estimate import Settings, check_fit, estimate_memory
from superoffload.tools.plan.models import ModelShape, typical_shape
from superoffload.tools.plan.step_time import estimate_step

_TOKENS = tuple(1024 << power for power in range(8))
_BILLIONS = (0.5, 1, 2, 4, 7, 10, 14, 20, 28, 40)
_COLOURS = {
    "all on the GPU": style.MUTED,
    "ZeRO-Offload": style.RED,
    "DeepSpeed SuperOffload, no clipping": style.ORANGE,
    "superoffload": style.BLUE,
    "superoffload, every step clips": style.PALE_BLUE,
}


def _contestants(settings: Settings) -> dict[str, Settings]:
    ranked = "fsdp2" if settings.ranks > 1 else "none"
    return {
        "all on the GPU": replace(settings, engine="torch", sharding=ranked),
        "ZeRO-Offload": replace(settings, engine="zero-offload", sharding="zero3"),
        "DeepSpeed SuperOffload, no clipping": replace(settings, engine="deepspeed-superoffload", sharding="zero3"),
        "superoffload": replace(settings, engine="superoffload", sharding=ranked),
        "superoffload, every step clips": replace(settings, engine="superoffload", sharding=ranked, clip_rate=1.0),
    }


def _figure(path: Path) -> AbstractContextManager[Any]:
    # Without a date and a version in the file, the same plan gives the same bytes.
    return style.drawing(path, 9.5, 4.2, metadata={"Software": None})


def plot_throughput(model: ModelShape, hardware: Hardware, settings: Settings, path: Path) -> None:
    """Plots tokens per second of one rank, with circles if the model would fit with micro-batches of one sequence."""
    with _figure(path) as figure:
        axes = figure.subplots()
        for name, contestant in _contestants(replace(settings, clip_rate=0.0)).items():
            rates = []
            for tokens in _TOKENS:
                each = replace(
                    contestant, sequence=min(2048, tokens), accumulation=max(1, tokens // 2048), micro_batch=1
                )
                rates.append(each.tokens_per_step / estimate_step(model, hardware, each).total)
            fits = check_fit(model, hardware, replace(contestant, sequence=2048, micro_batch=1)).fits
            label = name if fits else f"{name} (does not fit)"
            axes.plot(_TOKENS, rates, "o-" if fits else "--", color=_COLOURS[name], markersize=4, label=label)
        axes.set_xscale("log", base=2)
        axes.set_xticks(_TOKENS, [f"{tokens // 1024} k" for tokens in _TOKENS])
        axes.set_ylim(bottom=0)
        axes.set_xlabel("tokens per step and rank")
        axes.set_title(
            f"Tokens/s per rank as planned, {model.parameters / 1e9:.1f} B parameters, "
            f"{settings.ranks} x {hardware.name}"
        )
        axes.legend(loc="lower right")


def plot_memory(hardware: Hardware, settings: Settings, path: Path) -> None:
    """Plots peak GPU and host memory per rank for models of usual proportions."""
    with _figure(path) as figure:
        gpu, host = figure.subplots(1, 2)
        shapes = [typical_shape(size * 1e9) for size in _BILLIONS]
        actual = [shape.parameters / 1e9 for shape in shapes]
        for name, contestant in _contestants(settings).items():
            if "clips" in name:
                continue
            needs = [estimate_memory(shape, contestant) for shape in shapes]
            gpu.plot(actual, [need.gpu_peak / GB for need in needs], color=_COLOURS[name], label=name)
            host.plot(actual, [need.host_peak / GB for need in needs], color=_COLOURS[name], label=name)
        fit = check_fit(shapes[0], hardware, settings)
        for axes, room, what in ((gpu, fit.gpu_room, "GPU"), (host, fit.host_room, "Host")):
            axes.axhline(room / GB, color=style.INK, linestyle="--", linewidth=1)
            axes.annotate("usable", (actual[0], room / GB), xytext=(0, 3), textcoords="offset points", fontsize=8)
            axes.set_title(f"{what} memory per rank (GB), {settings.ranks} x {hardware.name}")
            axes.set_ylim(0, 1.6 * room / GB)
            axes.set_xlabel("parameters (B)")
        gpu.legend(loc="lower right")
