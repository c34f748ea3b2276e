"""Presents a plan as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from superoffload.tools.plan.configuration import configuration
from superoffload.tools.plan.explanations import AutoPlacement, auto_placement, journal_lines, placement_lines
from superoffload.tools.plan.machines import GB, Hardware
from superoffload.tools.plan.memory_estimate import (
    CONTEXT_BYTES,
    FRAGMENTATION,
    HOST_RESERVE,
    HOST_RESERVE_SHARE,
    Settings,
    estimate_memory,
)
from superoffload.tools.plan.models import ModelShape
from superoffload.tools.plan.recommendations import Advice, advice_lines, name_of
from superoffload.tools.plan.settings import Choice, all_choices, evaluate
from superoffload.tools.plan.step_time import ZERO3_SECONDS_PER_LAYER

EXPECTED = (
    "GPU rows are what the model expects. On the one GPU that was measured, an H200, it was off by 1 to 23 % "
    "(docs/benchmarks.md)."
)


def assumptions(hardware: Hardware, settings: Settings) -> list[str]:
    nodes = (
        []
        if settings.ranks <= hardware.gpus_per_node
        else [
            f"{settings.ranks} ranks communicate as in one node of {hardware.gpus_per_node}; no network between nodes"
        ]
    )
    eight_bit = settings.state_dtype == "8bit"
    return [
        *nodes,
        f"{settings.utilization:.0%} of the GPU's bf16 peak in forward and backward (--utilization)",
        f"bf16 parameters, {'fp32' if settings.gradient_bytes == 4 else 'bf16'} gradients; activations of an eager "
        "Llama-like block with a fused attention kernel",
        f"{FRAGMENTATION:.0%} of GPU memory and {CONTEXT_BYTES / GB:g} GB kept for fragmentation and CUDA context",
        f"{HOST_RESERVE / GB:g} GB of the host's memory, at most {HOST_RESERVE_SHARE:.0%} of it, kept for the system, "
        "Python and data loading",
        f"ZeRO hides no collectives, stage 3 adds {1e3 * ZERO3_SECONDS_PER_LAYER:g} ms per layer; FSDP2 prefetches",
        "bandwidths only, no latencies; 64 equal buckets; eager delivery; new parameters travel before the verdict "
        "where the GPU has room; copies do not slow the processors further",
        f"{settings.clip_rate:.0%} of the steps clip (--clip-rate)",
        *(["8-bit moments: bytes only, though processors may be bound by computing"] if eight_bit else []),
    ]


def plan_as_json(model: ModelShape, hardware: Hardware, settings: Settings) -> dict[str, Any]:
    choice, advice = evaluate(model, hardware, settings), Advice.of(model, hardware, settings)
    needs = estimate_memory(model, settings)
    auto = _auto(model, hardware, choice)
    return {
        "command": "plan",
        "passed": choice.fit.fits,
        "model": {**vars(model), "parameters": model.parameters},
        "hardware": {**vars(hardware), "sources": dict(hardware.sources)},
        "settings": vars(settings),
        "memory": {
            "gpu": needs.gpu,
            "gpu_moments": needs.gpu_moments,
            "gpu_peak": needs.gpu_peak,
            "host": needs.host,
            "host_peak": needs.host_peak,
            **choice.fit.as_json(),
        },
        "step": {**choice.step.as_json(), "tokens_per_second": choice.tokens_per_second},
        "placement_auto": None if auto is None else auto.as_json(),
        **advice.as_json(),
        "choices": [other.as_json() for other in all_choices(model, hardware, settings)],
        "configuration": configuration(settings),
        "assumptions": assumptions(hardware, settings),
        "note": EXPECTED,
    }


def _auto(model: ModelShape, hardware: Hardware, choice: Choice) -> AutoPlacement | None:
    return auto_placement(model, choice.settings, choice.fit, choice.step, hardware.host_bandwidth)


def plan_as_text(model: ModelShape, hardware: Hardware, settings: Settings) -> str:
    choice = evaluate(model, hardware, settings)
    parts = [
        f"{model.parameters / 1e9:.2f} B parameters ({model.layers} layers, hidden {model.hidden}, ffn {model.ffn}, "
        f"vocabulary {model.vocabulary}) on {settings.ranks} x {hardware.name}, {_measured(hardware)}",
        f"{name_of(settings)}, {settings.tokens_per_step:,} tokens per rank and step: accumulation "
        f"{settings.accumulation} x micro-batch {settings.micro_batch} x sequence {settings.sequence}",
        "",
        *_memory_lines(model, settings, choice),
        "",
        *_step_lines(choice),
        *(placement_lines(_auto(model, hardware, choice)) if choice.fit.fits else []),
        "",
        *advice_lines(Advice.of(model, hardware, settings)),
        "",
        "Assumptions",
        *(f"  - {text}" for text in assumptions(hardware, settings)),
        *_hardware_lines(hardware),
        "",
        EXPECTED,
    ]
    return "\n".join(parts)


def _amount(name: str, value: float) -> str:
    if name == "flops":
        return f"{value / 1e12:.0f} TFLOP/s"
    return f"{value / GB:.0f} GB" + ("" if name.endswith("memory") else "/s")


def _measured(hardware: Hardware) -> str:
    if not hardware.measured:
        return "a profile, not measured"
    return "measured where the list below says so"


def _hardware_lines(hardware: Hardware) -> list[str]:
    groups = (
        ("Hardware, measured on this machine", [name for name in hardware.sources if name in hardware.measured]),
        ("Hardware, not measured", [name for name in hardware.sources if name not in hardware.measured]),
    )
    lines = []
    for title, names in groups:
        if names:
            lines.append(title)
            lines += [
                f"  - {name}: {_amount(name, getattr(hardware, name))}: {hardware.sources[name]}" for name in names
            ]
    return lines


def _memory_lines(model: ModelShape, settings: Settings, choice: Choice) -> list[str]:
    needs, fit = estimate_memory(model, settings), choice.fit
    lines = [f"Memory per GPU: {needs.gpu_peak / GB:.1f} GB of {fit.gpu_room / GB:.1f} usable"]
    lines += [f"  {name:<32} {size / GB:>8.1f} GB" for name, size in needs.gpu.items()]
    worst = needs.worst_moment
    lines += [
        f"  {'at ' + name:<32} {size / GB:>8.1f} GB{'  <- the peak' if name == worst else ''}"
        for name, size in needs.gpu_moments.items()
    ]
    if needs.host:
        lines.append(f"Host memory per GPU: {needs.host_peak / GB:.1f} GB of {fit.host_room / GB:.1f} usable")
        lines += [f"  {name:<32} {size / GB:>8.1f} GB" for name, size in needs.host.items()]
        lines += journal_lines(model, settings, needs)
    if fit.fits:
        lines.append(f"It fits; {fit.binds} is the tighter one.")
    else:
        lines.append(f"It does not fit: {' and '.join(fit.lacking)} are missing.")
    return lines


def _step_lines(choice: Choice) -> list[str]:
    step = choice.step
    title = "Step, predicted" if choice.fit.fits else "Step, predicted for a GPU and a host with enough memory"
    return [
        f"{title}: {step.total:.3f} s, {choice.tokens_per_second:,.0f} tokens/s over all ranks",
        f"  forward {step.forward:.3f} s, backward {step.backward:.3f} s, collectives exposed {step.collectives:.3f} s",
        f"  optimizer and its copies {step.optimizer:.3f} s: hidden behind backward or each other "
        f"{step.optimizer_hidden:.3f} s, "
        f"exposed {step.optimizer_exposed:.3f} s",
    ]


def comparison_table(choices: Sequence[Choice]) -> list[str]:
    """Returns a row for each combination, the fastest first."""
    width = max(len(name_of(choice.settings)) for choice in choices)
    lines = [f"{'engine':<{width}} {'fits':<6} {'GPU, GB':>8} {'host, GB':>9} {'step, s':>9} {'tokens/s':>10}"]
    for choice in choices:
        fit = choice.fit
        lines.append(
            f"{name_of(choice.settings):<{width}} {'yes' if fit.fits else 'no':<6} {fit.gpu_need / GB:>8.1f} "
            f"{fit.host_need / GB:>9.1f} {choice.step.total:>9.3f} {choice.tokens_per_second:>10,.0f}"
        )
    return lines
